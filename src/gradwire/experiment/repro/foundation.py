"""Methods for language models side by side: a small GPT on Shakespeare, all at equal tokens.

There is no published table with these columns. Methods are from Douillard et al. 2023 (DiLoCo,
arXiv 2311.08105) and 2025 (Streaming DiLoCo, arXiv 2501.18512), Sarfi et al. 2025 (SparseLoCo),
Peng, Quesnelle and Kingma 2024 (DeMo, arXiv 2411.19870), Vogels et al. 2019 (PowerSGD), with the
outer learning rates of their papers. Every method sees the same batches; what differs is when
workers agree and what travels.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from gradwire.core.units import format_bytes
from gradwire.experiment.report.comparison import format_seconds
from gradwire.experiment.repro.recipe import Row
from gradwire.experiment.repro.scale import Scale
from gradwire.experiment.repro.table import Table
from gradwire.experiment.repro.trained import Cell, Trained, accuracy_text, by_place

_COLUMN = "Shakespeare"
_BASE = "BSP"
_NETWORKS = ("100Mbit", "1Gbit", "10Gbit")


@dataclass(frozen=True)
class _Size:
    model: str
    settings: dict[str, Any]
    short: int  # steps of a round of local SGD
    long: int  # and of DiLoCo's
    delay: int  # steps that an exchange of streaming DiLoCo may take


_SIZES: dict[Scale, _Size] = {
    "smoke": _Size(
        "nanogpt(layers=1, heads=2, width=32)",
        {"batch_size": 4, "steps": 8, "eval_every": 8},
        short=2,
        long=4,
        delay=1,
    ),
    "small": _Size(
        "nanogpt(layers=2, heads=2, width=64)",
        {"batch_size": 8, "steps": 400},
        short=8,
        long=20,
        delay=2,
    ),
    "full": _Size(
        "nanogpt(layers=4, heads=4, width=256, dropout=0.1)",
        {"batch_size": 32, "steps": 3000},
        short=8,
        long=50,
        delay=5,
    ),
}


def _methods(size: _Size) -> dict[str, dict[str, str]]:
    """Settings by name. Means of gradients overlap with the backward pass."""
    overlapped = {"scheduling": "wfbp"}
    streaming = f"diloco({size.long}, outer_lr=0.4, fragments=4, delay={size.delay}, mixing=0.5)"
    return {
        _BASE: overlapped,
        "PowerSGD, rank 4, with feedback": {"compression": "ef(powersgd(4))", **overlapped},
        "dq, 1 bit, with feedback": {"compression": "ef(dq(1.0))", **overlapped},
        "DeMo": {
            "compression": "demo(dctk(64, 8))",
            "optimizer": "sgd(0.001)",
            **overlapped,
        },
        f"local SGD, tau = {size.short}": {"synchronization": f"localsgd({size.short})"},
        f"DiLoCo, {size.long} steps": {"synchronization": f"diloco({size.long})"},
        f"streaming DiLoCo, 4 fragments, delay {size.delay}": {
            "synchronization": streaming,
            "scheduling": 'sequential("layer")',
        },
        "SparseLoCo, 3% in 2 bits": {
            "synchronization": f"diloco({size.long}, outer_lr=1.0, outer_momentum=0.0)",
            "compression": "ef(topk(0.03) >> eden(2, unbiased=False))",
        },
    }


class Foundation(Trained):
    name = "foundation"
    title = "A small GPT on Shakespeare, 4 workers, equal tokens: loss against bytes and time"
    choices = (
        "Chosen here, since papers use other models: Adam with a learning rate of 0.001 that falls "
        "along a cosine (DeMo steps along signs, with plain SGD at 0.001), gradients of 20 ms in "
        "virtual time, 50 us of latency, an all-reduce. Means of gradients travel layer by layer "
        "during the backward pass (wfbp); of streaming DiLoCo one fragment at a time, while "
        "workers continue. Coding counts, by the table of costs of a CPU."
    )

    def shared(self, scale: Scale) -> dict[str, Any]:
        size = _SIZES[scale]
        return {
            "data": "shakespeare",
            "model": size.model,
            "workers": 4,
            "optimizer": "adam(0.001)",
            "schedule": "cosine",
            "compute": "fixed(0.02)",
            "bandwidth": _NETWORKS[0],
            "what_if": list(_NETWORKS[1:]),
            **size.settings,
        }

    def cells(self, scale: Scale) -> Iterable[Cell]:
        for name, settings in _methods(_SIZES[scale]).items():
            yield Cell(name, _COLUMN, settings)

    def tables(self, rows: Sequence[Row]) -> list[Table]:
        found = by_place(rows)
        base = found.get((_BASE, _COLUMN), {}).get("bytes_sent")
        lines = [_line(row, base) for row in found.values()]
        head = ("method", "test loss", "accuracy %", "bytes /worker /step", "ratio")
        return [Table(self.title, (*head, *(f"time {n}" for n in _NETWORKS)), lines)]


def _line(row: Row, base: float | None) -> list[str]:
    if "accuracy" not in row:
        return [row["line"], "-", accuracy_text(row), *["-"] * (2 + len(_NETWORKS))]
    times = row["virtual_times_s"]
    return [
        row["line"],
        f"{row['test_loss']:.4f}",
        accuracy_text(row),
        format_bytes(row["bytes_per_worker_step"]),
        f"{base / row['bytes_sent']:.1f}x" if base else "-",
        *(format_seconds(times[name]) for name in _NETWORKS),
    ]


RECIPES = (Foundation(),)
