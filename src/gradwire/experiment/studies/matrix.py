"""Every pair of synchronization and architecture, measured: Table 5 of the survey with numbers.

Tang et al. 2020 (arXiv 2003.06307, Table 5) grade the pairs by model consistency, communication
frequency, communication congestion and convergence. Here each pair that makes sense trains for a
few steps, and each grade is a figure read off the run.

A pair that is refused gets a row with the reason. A problem of all pairs is an error before the
first run.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gradwire.architecture import ARCHITECTURE
from gradwire.core.errors import StoppedError
from gradwire.core.notation import notation_name
from gradwire.core.protocols import Architecture, ability_of
from gradwire.core.registry import Registry
from gradwire.experiment.run.config import Config
from gradwire.experiment.run.outcome import Run, use_threads
from gradwire.experiment.run.record import Row
from gradwire.experiment.run.setup import prepare
from gradwire.experiment.simulate.simulation import simulate
from gradwire.experiment.studies.compare import check, failure
from gradwire.experiment.studies.defaults import MATRIX_BASE as BASE
from gradwire.synchronization import SYNCHRONIZATION

# The grades of the survey, by architecture and synchronization: how alike the models are, how often
# they are exchanged, how crowded the busiest node is, how training goes.
_GRADES = ("consistency", "frequency", "congestion", "convergence")
_SURVEY: dict[str, dict[str, tuple[str, ...]]] = {
    "parameter server": {
        "bsp": ("high", "high", "high", "stable"),
        "ssp(...)": ("normal", "high", "normal", "normal"),
        "asp": ("low", "high", "low", "unstable"),
        "localsgd(...)": ("normal", "low", "high", "unstable"),
    },
    "all-reduce": {
        "bsp": ("high", "high", "low", "easy"),
        "localsgd(...)": ("normal", "low", "low", "stable"),
    },
    "gossip": {
        "bsp": ("low", "high", "low", "stable"),
        "asp": ("low", "high", "low", "unstable"),
        "localsgd(...)": ("low", "low", "low", "stable"),
    },
}


@dataclass(frozen=True)
class Pair:
    synchronization: str
    architecture: str
    refusal: str = ""  # why there is no such pair


def pairs(synchronizations: Sequence[str] = (), architectures: Sequence[str] = ()) -> list[Pair]:
    """All pairs of what is given, or of everything: by architecture, refused ones among them."""
    return [
        Pair(repr(synchronization), repr(architecture), _refusal(synchronization, architecture))
        for architecture in _chosen(ARCHITECTURE, architectures)
        for synchronization in _chosen(SYNCHRONIZATION, synchronizations)
    ]


def _chosen(registry: Registry[Any], texts: Sequence[str]) -> list[Any]:
    return [registry.parse(text) for text in texts or _everything(registry)]


def _everything(registry: Registry[Any]) -> Iterator[str]:
    """The examples of each class for short runs."""
    for cls in registry:
        yield from cls.short_examples or cls.examples[:1] or (notation_name(cls),)


def _refusal(synchronization: Any, architecture: Any) -> str:
    try:
        ability_of(synchronization, architecture)
    except ValueError as error:
        return str(error)
    return ""


def survey(pair: Pair) -> dict[str, str] | None:
    """The survey's grades of a pair; None if it is not in its table."""
    rule = SYNCHRONIZATION.parse(pair.synchronization)
    name = notation_name(type(rule))
    written = name if repr(rule) == name else f"{name}(...)"
    grades = _SURVEY[_family(ARCHITECTURE.parse(pair.architecture))].get(written)
    return dict(zip(_GRADES, grades)) if grades else None


def _family(architecture: Architecture) -> str:
    """The survey's name for an architecture."""
    if architecture.num_servers:
        return "parameter server"
    return "gossip" if {"mix", "mix_async"} & set(architecture.offers) else "all-reduce"


def measure(
    chosen: Sequence[Pair],
    base: Config = BASE,
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> list[Row]:
    """One row per pair. Losses are those after the time that the fastest pair took."""
    if base.steps < 1:
        raise ValueError(f"steps must be at least 1, got {base.steps}")
    chosen = _checked(chosen, base)
    valid = [pair for pair in chosen if not pair.refusal]
    runs: dict[Pair, Run | str] = {}
    for number, pair in enumerate(valid):
        progress(f"{pair.synchronization} on {pair.architecture}", number, len(valid))
        try:
            runs[pair] = simulate(_config(pair, base))
        except (StoppedError, ValueError) as error:
            runs[pair] = failure(error)
    finished = [run for run in runs.values() if isinstance(run, Run)]
    equal_time = min((run.virtual_time_s for run in finished), default=0.0)
    initial = _initial_loss(finished[0].config) if finished else None
    return [_row(pair, runs.get(pair), equal_time, initial) for pair in chosen]


def _config(pair: Pair, base: Config) -> Config:
    return replace(base, synchronization=pair.synchronization, architecture=pair.architecture)


def _checked(chosen: Sequence[Pair], base: Config) -> list[Pair]:
    """The pairs, with what each refuses of the base, such as its number of workers."""
    shared = _refused(base)
    checked = [
        pair if pair.refusal else replace(pair, refusal=_refused(_config(pair, base)))
        for pair in chosen
    ]
    if shared and all(pair.refusal for pair in checked):
        raise ValueError(shared)
    return checked


def _refused(config: Config) -> str:
    """The reason why this run is refused; empty if it is not."""
    try:
        check(config)
    except ValueError as error:
        return str(error)
    return ""


def _initial_loss(config: Config) -> float:
    experiment = prepare(config)
    with use_threads(experiment.config.threads):
        first = experiment.plan.initial_replicas()[0]
        test = experiment.plan.task.evaluate(first.params, first.buffers, experiment.test_batches())
    return test.loss


def _row(pair: Pair, run: Run | str | None, equal_time: float, initial: float | None) -> Row:
    names = {"architecture": pair.architecture, "synchronization": pair.synchronization}
    if run is None:
        return {**names, "refusal": pair.refusal}
    grades = survey(pair)
    graded = {"survey": grades} if grades else {}
    if isinstance(run, str):
        return {**names, "failure": run, **graded}
    summary = run.summary
    steps = summary["gradients"] / run.config.workers  # those that were taken
    before = [row for row in run.metrics if row["virtual_time_s"] <= equal_time]
    return {
        **names,
        "distance": _mean([row["distance"] for row in run.metrics]),
        "messages_per_step": summary["messages_sent"] / steps,
        "bytes_per_step": summary["bytes_sent"] / steps,
        "busiest_node_bytes_per_step": summary["busiest_node_bytes"] / steps,
        "time_per_step_s": run.virtual_time_s / steps,
        "equal_time_s": equal_time,
        "loss_after_equal_time": before[-1]["test_loss"] if before else initial,
        "loss": summary["test_loss"],
        "accuracy": summary["test_accuracy"],
        **graded,
    }


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if len(known) == len(values) else None
