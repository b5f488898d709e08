"""Several methods on one task, side by side, with the baselines fp32 and fp16 always among them.

A method that makes no sense, diverges or stops gets a row with the reason. A problem of all
methods, such as a missing data set, is an error before the first run.
"""

import itertools
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gradwire import kernels
from gradwire.core.errors import NonFiniteError, StoppedError, WhatIfError
from gradwire.experiment.report.comparison import counted_headers
from gradwire.experiment.report.score import score_part
from gradwire.experiment.run.config import Config
from gradwire.experiment.run.given import NOTHING, Given
from gradwire.experiment.run.outcome import Progress, Run
from gradwire.experiment.run.record import Record, Row
from gradwire.experiment.run.registries import DIMENSIONS
from gradwire.experiment.run.setup import prepare
from gradwire.experiment.run.subject import with_data
from gradwire.experiment.simulate.simulation import simulate_given
from gradwire.runtime.virtual.compute_time import COMPUTE_TIME, Fixed, Measured

FP32, FP16 = "identity", "fp16"
_EVERYWHERE = {"synchronization": "bsp", "architecture": "allreduce"}  # any compression goes there
Started = Callable[[str], Progress | None]


@dataclass(frozen=True)
class Outcome:
    """One row of a comparison: a finished run, or why there is none."""

    label: str
    config: Config
    run: Run | None
    failure: str = ""  # begins with its kind: refused, diverged, stopped, failed
    times: Mapping[str, float | None] = field(default_factory=dict)  # virtual, by what-if bandwidth
    remarks: tuple[str, ...] = ()  # why there is none at some of them


def label(config: Config) -> str:
    """The name of a method: its dimensions, without those that are the default."""
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


def with_baselines(configs: Sequence[Config], given: Given = NOTHING) -> dict[Config, str]:
    """The same, preceded by fp32 and fp16 in every step if they are missing, and their labels.

    If the first architecture does not support them, they run on allreduce, and their labels say so.
    """
    own = [replace(configs[0], compression=c, synchronization="bsp") for c in (FP32, FP16)]
    labels = {config: label(config) for config in (*own, *configs)}
    try:
        for config in own:
            check(config, given)
        return labels
    except ValueError:
        elsewhere = [replace(config, **dict[str, Any](_EVERYWHERE)) for config in own]
    for config in elsewhere:
        check(config, given)  # what is refused here concerns everything
    words = {config: ", ".join((config.compression, *_EVERYWHERE.values())) for config in elsewhere}
    return words | {config: words.get(config, label(config)) for config in configs}


def check(config: Config, given: Given = NOTHING) -> None:
    """Raises what a run would raise before its first step."""
    compute = config.compute
    if isinstance(COMPUTE_TIME.parse(compute), Measured):
        compute = repr(Fixed(1.0))  # to measure takes time
    kernels.backend()  # warns, once, if there is no C library
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the run will say it
        prepare(replace(config, compute=compute), given)


def compare(
    configs: Sequence[Config],
    out: Path | None = None,
    started: Started = lambda label: None,
    given: Given = NOTHING,
) -> list[Outcome]:
    """Runs all of them. A method that diverges is a result, not an error.

    `started` gets each method before it runs and returns its progress callback. `given` has the
    Python objects for which texts in the configurations stand.
    """
    if any(config.engine != "simulator" for config in configs):
        raise ValueError(
            "a comparison runs on the simulator; real processes run one experiment at a time: "
            "gradwire run --engine process"
        )
    if out is not None:
        Record(out).check_empty()
    given = with_data(given, configs)
    wanted = [_canonical(config) for config in configs]
    labels = with_baselines(wanted, given)
    refusals = _refusals(wanted, given)
    # One measured gradient time serves all: the methods differ in communication, not in this.
    compute = prepare(next(iter(labels)), given).config.compute
    folders = {config: out / folder_name(name) if out else None for config, name in labels.items()}
    for folder in folders.values():
        if folder is not None and folder.is_dir() and any(folder.iterdir()):
            raise ValueError(f"{folder} already holds a run. Choose another folder.")
    return [
        Outcome(name, config, None, f"refused: {refusals[config]}")
        if config in refusals
        else _outcome(name, replace(config, compute=compute), given, folders[config], started)
        for config, name in labels.items()
    ]


def _refusals(configs: Sequence[Config], given: Given) -> dict[Config, str]:
    """The reasons why some make no sense; an error if all of them are refused."""
    refusals = {}
    for config in configs:
        try:
            check(config, given)
        except ValueError as error:
            refusals[config] = str(error)
    if all(config in refusals for config in configs):
        raise ValueError("\n".join(dict.fromkeys(refusals.values())))
    return refusals


def _outcome(
    name: str, config: Config, given: Given, folder: Path | None, started: Started
) -> Outcome:
    try:
        try:
            run = simulate_given(config, given, folder, started(name))
        except WhatIfError:
            return _once_per_bandwidth(name, config, given, folder, started)
    except (StoppedError, ValueError) as error:
        return Outcome(name, config, None, failure(error))
    return Outcome(name, run.config, run, times=run.summary["virtual_times_s"])


def _once_per_bandwidth(
    name: str, config: Config, given: Given, folder: Path | None, started: Started
) -> Outcome:
    """Runs a method whose messages depend on the network once for each of them."""
    if folder is not None:
        shutil.rmtree(folder)  # the run that could not be played on the other networks
    alone = replace(config, what_if=())
    run = simulate_given(alone, given, folder, started(name))
    times: dict[str, float | None] = {}
    remarks = []
    for bandwidth in config.what_if:
        if bandwidth == config.bandwidth:
            continue
        where = f"at {bandwidth}"
        try:
            other = simulate_given(
                replace(alone, bandwidth=bandwidth),
                given,
                folder / folder_name(where) if folder is not None else None,
                started(f"{name} {where}"),
            )
        except (StoppedError, ValueError) as error:
            remarks.append(f"{where} {failure(error)}")
            times[bandwidth] = None
        else:
            times[bandwidth] = other.virtual_time_s
    return Outcome(name, run.config, run, times=times, remarks=tuple(remarks))


def failure(error: StoppedError | ValueError) -> str:
    """The message for a run without result: the kind of failure, and the reason."""
    if isinstance(error, StoppedError):
        return f"stopped: {error}"
    return f"{'diverged' if isinstance(error, NonFiniteError) else 'failed'}: {error}"


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
    fp32, fp16 = (_baseline(outcomes, compression) for compression in (FP32, FP16))
    return [_row(outcome, fp32, fp16) for outcome in outcomes]


def _baseline(outcomes: Sequence[Outcome], compression: str) -> Run | None:
    """The first with this compression: `compare` puts the baselines before all others."""
    return next((o.run for o in outcomes if o.config.compression == compression), None)


def _row(outcome: Outcome, fp32: Run | None, fp16: Run | None) -> Row:
    run = outcome.run
    if run is None:
        return {"method": outcome.label, "failure": outcome.failure}
    headers = counted_headers(run.config.architecture)
    remarks = [*outcome.remarks, *([f"has {headers}"] if headers else [])]
    return {
        "method": outcome.label,
        **score_part(run.summary),
        "bytes_per_worker_step": run.summary["bytes_per_worker_step"],
        "ratio_fp32": _ratio(fp32, run),
        "ratio_fp16": _ratio(fp16, run),
        "virtual_times_s": {run.config.bandwidth: run.virtual_time_s, **outcome.times},
        "dropped_steps": run.summary["dropped_steps"],
        "wall_time_s": run.summary["wall_time_s"],
        **({"remarks": remarks} if remarks else {}),
    }


def _ratio(baseline: Run | None, run: Run) -> float | None:
    if baseline is None or run.bytes_sent == 0:
        return None
    return baseline.bytes_sent / run.bytes_sent
