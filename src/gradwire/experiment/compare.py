"""Several methods on one task, side by side, with the baselines fp32 and fp16 always among them."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gradwire.core.errors import NonFiniteError
from gradwire.experiment.config import Config
from gradwire.experiment.record import Row
from gradwire.experiment.runner import Progress, Run, simulate, use_threads
from gradwire.experiment.setup import DIMENSIONS, prepare

FP32, FP16 = "identity", "fp16"


@dataclass(frozen=True)
class Outcome:
    """One row of a comparison: a finished run, or why there is none."""

    label: str
    config: Config
    run: Run | None
    failure: str = ""


def label(config: Config) -> str:
    """A method in words: its dimensions, without those that are the default."""
    usual = Config()
    chosen = [getattr(config, name) for name in DIMENSIONS]
    words = [w for w, name in zip(chosen, DIMENSIONS) if w != getattr(usual, name)]
    return ", ".join(words) or config.compression


def combinations(base: Config, **choices: Sequence[str]) -> list[Config]:
    """The base configuration with every combination of the choices of each dimension."""
    names = list(choices)
    return [
        replace(base, **dict[str, Any](zip(names, combination)))
        for combination in itertools.product(*choices.values())
    ]


def with_baselines(configs: Sequence[Config]) -> list[Config]:
    """The same, preceded by fp32 and fp16 in every step if they are missing."""
    first = configs[0]
    baselines = [replace(first, compression=name, synchronization="bsp") for name in (FP32, FP16)]
    return list(dict.fromkeys([*baselines, *configs]))


def compare(
    configs: Sequence[Config],
    out: Path | None = None,
    started: Callable[[str], Progress | None] = lambda label: None,
) -> list[Outcome]:
    """Runs all of them. A method that diverges is a result, not an error.

    `started` is told each method before it runs and returns its progress callback.
    """
    configs = with_baselines([_canonical(config) for config in configs])
    # One measured gradient time serves all: the methods differ in communication, not in this.
    with use_threads(configs[0].threads):
        compute = prepare(configs[0]).config.compute
    outcomes = []
    for config in configs:
        name = label(config)
        progress = started(name)
        folder = out / folder_name(name) if out is not None else None
        try:
            run = simulate(replace(config, compute=compute), out=folder, progress=progress)
            outcomes.append(Outcome(name, run.config, run))
        except NonFiniteError as error:
            outcomes.append(Outcome(name, config, None, f"diverged: {error}"))
    return outcomes


def folder_name(name: str) -> str:
    return "".join(c if c.isalnum() or c in "._" else "-" for c in name).strip("-")


def _canonical(config: Config) -> Config:
    """The dimensions as their expressions write themselves, so that equal methods are equal."""
    words: dict[str, Any] = {
        name: repr(r.parse(getattr(config, name))) for name, r in DIMENSIONS.items()
    }
    return replace(config, **words)


def rows(outcomes: Sequence[Outcome]) -> list[Row]:
    """The table: bytes off the wire, ratios of measured bytes, virtual times by bandwidth."""
    sent = {o.config.compression: o.run for o in outcomes if o.config.synchronization == "bsp"}
    fp32, fp16 = sent.get(FP32), sent.get(FP16)
    return [_row(outcome, fp32, fp16) for outcome in outcomes]


def _row(outcome: Outcome, fp32: Run | None, fp16: Run | None) -> Row:
    run = outcome.run
    if run is None:
        return {"method": outcome.label, "failure": outcome.failure}
    return {
        "method": outcome.label,
        "test_accuracy": run.accuracy,
        "bytes_per_worker_step": run.summary["bytes_per_worker_step"],
        "ratio_fp32": _ratio(fp32, run),
        "ratio_fp16": _ratio(fp16, run),
        "virtual_times_s": {
            run.config.bandwidth: run.virtual_time_s,
            **run.summary["virtual_times_s"],
        },
        "dropped_steps": run.summary["dropped_steps"],
        "wall_time_s": run.summary["wall_time_s"],
    }


def _ratio(baseline: Run | None, run: Run) -> float | None:
    if baseline is None or run.bytes_sent == 0:
        return None
    return baseline.bytes_sent / run.bytes_sent
