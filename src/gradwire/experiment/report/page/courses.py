"""The course of a run as columns: one value for each evaluation."""

import json
from collections.abc import Sequence
from typing import Any

from gradwire.core.units import parse_bandwidth
from gradwire.experiment.report.score import score_value
from gradwire.experiment.run.record import Record, Row

_DIGITS = 7  # significant; a page of many runs stays small


def courses_of(records: Sequence[Record]) -> list[Row]:
    """The courses of a run: one, or one for each network if what it does depends on the network."""
    return [_course(record) for record in records]


def _course(record: Record) -> Row:
    config = record.config
    path = record.folder / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    networks = []
    if rows and "virtual_time_s" in rows[0]:
        own = {config.bandwidth: [row["virtual_time_s"] for row in rows]}
        others = {name: [row["virtual_times_s"][name] for row in rows] for name in config.what_if}
        for name, times in {**own, **others}.items():
            networks.append({"name": name, "rate": rate_of(name), "times": shortened(times)})
    is_measured = bool(rows) and "time_s" in rows[0]
    return {
        "step": [row["step"] for row in rows],
        "epoch": shortened([row["epoch"] for row in rows]),
        "score": shortened([score_value(row) for row in rows]),
        "test_loss": shortened([row["test_loss"] for row in rows]),
        "train_loss": shortened([row["train_loss"] for row in rows]),
        "bytes": shortened([row["bytes_sent"] / config.workers for row in rows]),
        "measured": shortened([row["time_s"] for row in rows]) if is_measured else None,
        "networks": networks,
    }


def rate_of(bandwidth: str) -> float | None:
    """Bits per second; None: the nodes have different ones."""
    return None if "," in bandwidth else 8 * parse_bandwidth(bandwidth)


def shortened(values: Sequence[Any]) -> list[Any]:
    return [short(value) for value in values]


def short(value: Any) -> Any:
    return float(f"{value:.{_DIGITS}g}") if isinstance(value, float) else value
