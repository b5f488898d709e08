"""Runs in groups: by task, and within a task by method, which has a run for each seed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean
from typing import Any

from gradwire.experiment.report.page.found import Found, label_of
from gradwire.experiment.report.score import score_name
from gradwire.experiment.run.config import DIMENSION_NAMES, Config
from gradwire.experiment.run.record import Row

TASK = ("data", "model", "loss", "metric")  # runs with the same are comparable
_NAMES = tuple(vars(Config()))
# What does not change what is trained, or how long that takes.
_HIDDEN = ("seed", "what_if", "threads", "record_order", "record_spans", "epochs")
_OWN_OBJECTS = ("data", "model", "loss", "metric", "collate")
_SHORTER = ("steps", "eval_every")  # a recording of spans may be
# What a run that failed may have left as it was, and others have resolved.
_UNRESOLVED: dict[str, Any] = {
    "model": "",
    "loss": "",
    "metric": "",
    "steps": 0,
    "eval_every": 0,
    "momentum_at": "auto",
    "evaluation": "auto",
    "compile": "auto",
    "compute": "measured",
}


@dataclass
class Method:
    """The runs of all seeds of one method."""

    name: str
    settings: Row
    data: str  # the setting, with the digest of a user's own data
    runs: list[Found] = field(default_factory=list)
    recording: Found | None = None  # a run with spans

    @property
    def done(self) -> list[Found]:
        return [run for run in self.runs if not run.failure]

    @property
    def failures(self) -> list[str]:
        return sorted({run.failure for run in self.runs if run.failure})

    @property
    def bytes_per_worker_step(self) -> float | None:
        values = [run.summary["bytes_per_worker_step"] for run in self.done]
        return mean(values) if values else None


@dataclass
class Task:
    """What was trained, and the methods with which."""

    name: str
    score: str  # accuracy, or the name of another metric
    methods: list[Method]

    @property
    def shared(self) -> Row:
        """The settings that all methods have alike."""
        first = self.methods[0].settings
        return {
            name: first[name]
            for name in _NAMES
            if name not in _HIDDEN
            and all(method.settings[name] == first[name] for method in self.methods)
        }

    def varied(self, method: Method) -> Row:
        """The settings of a method that another one has not."""
        shared = self.shared
        return {
            name: method.settings[name]
            for name in _NAMES
            if name not in shared and name not in _HIDDEN
        }

    def ratio(self, method: Method, compression: str) -> tuple[float | None, str]:
        """Bytes per worker and step with this compression over those of a method, and with what.

        The baseline has this compression in every step. It has all other settings of the method, or
        if there is no such one, as many workers of the same task.
        """
        own = method.bytes_per_worker_step
        wanted = {**method.settings, "compression": compression, "synchronization": "bsp"}
        candidates = [
            other
            for other in self.methods
            if other.done
            and (other.settings["compression"], other.settings["synchronization"])
            == (compression, "bsp")
            and other.settings["workers"] == method.settings["workers"]
        ]
        if not own or not candidates:
            return None, ""
        base = min(candidates, key=lambda other: _distance(other.settings, wanted))
        there = base.bytes_per_worker_step
        return (there / own if there else None), base.name


def tasks_of(runs: Sequence[Found]) -> list[Task]:
    """The tasks of these runs. Runs of the same settings but the seed are those of one method."""
    methods: list[Method] = []
    by_key: dict[tuple[Any, ...], Method] = {}
    for run in runs:
        if run.failure or _is_recording(run, runs):
            continue
        key = _key(run)
        if key not in by_key:
            by_key[key] = Method(run.method, _settings(run), run.row["data"])
            methods.append(by_key[key])
        by_key[key].runs.append(run)
    for run in runs:
        if run.failure:
            _add_failed(run, methods)
        elif _is_recording(run, runs):
            own = _settings(run)
            for method in methods:
                if _same(method.settings, own, (*_HIDDEN, *_SHORTER)):
                    method.recording = run
    for method in methods:
        spans = (run for run in method.done if _has_spans(run))
        method.recording = method.recording or next(spans, None)
    return _by_task(methods)


def _by_task(methods: Sequence[Method]) -> list[Task]:
    groups: dict[tuple[Any, ...], list[Method]] = {}
    for method in methods:
        key = (method.data, *(method.settings[name] for name in TASK))
        groups.setdefault(key, []).append(method)
    tasks = []
    for own in groups.values():
        _name_apart(own)
        settings = own[0].settings
        done = next((run for method in own for run in method.done), None)
        score = score_name(done.summary) if done else settings["metric"] or "accuracy"
        name = f"{settings['model'] or 'default model'} on {settings['data']}"
        tasks.append(Task(name, score, own))
    names = [task.name for task in tasks]
    for task in tasks:
        if names.count(task.name) > 1:
            task.name = f"{task.name}, {task.score}"
    return tasks


def _name_apart(methods: Sequence[Method]) -> None:
    """Names without what all methods have alike; settings that differ, where a name is not enough.

    A name that a file of a sweep gives stays.
    """
    others = [name for name in DIMENSION_NAMES if name != "compression"]
    shared = [name for name in others if len({m.settings[name] for m in methods}) == 1]
    defaults = {name: getattr(Config(), name) for name in shared}
    if len(methods) > 1:
        for method in methods:
            if method.name == label_of(method.settings):
                method.name = label_of({**method.settings, **defaults})
    by_name: dict[str, list[Method]] = {}
    for method in methods:
        by_name.setdefault(method.name, []).append(method)
    for name, same in by_name.items():
        if len(same) == 1:
            continue
        chosen: list[str] = []
        num_apart = 1
        for each in _NAMES:
            more = [*chosen, each]
            num_more = len({repr([method.settings[n] for n in more]) for method in same})
            if each not in _HIDDEN and num_more > num_apart:
                chosen, num_apart = more, num_more
        for method in same:
            values = (_words(each, method.settings[each]) for each in chosen)
            method.name = ", ".join([name, *values])


def _words(name: str, value: Any) -> str:
    """A setting; expressions speak for themselves."""
    return str(value) if "(" in str(value) else f"{name.replace('_', ' ')} {value}"


def _settings(run: Found) -> Row:
    """What a run has in common with those of other seeds."""
    settings = run.settings
    for name in _OWN_OBJECTS:  # the digest of an own model differs with the seed
        settings[name] = settings[name].partition("#")[0]
    if run.summary.get("compute_measured") is not None:
        settings["compute"] = "measured"  # each run has measured a little else
    return settings


def _key(run: Found) -> tuple[Any, ...]:
    settings = _settings(run)
    own = (settings[name] for name in _NAMES if name not in _HIDDEN)
    return (run.row["data"], *map(repr, own))


def _same(one: Mapping[str, Any], other: Mapping[str, Any], but: Sequence[str]) -> bool:
    return all(one[name] == other[name] for name in _NAMES if name not in but)


def _distance(one: Mapping[str, Any], other: Mapping[str, Any]) -> int:
    """The number of settings that differ."""
    return sum(one[name] != other[name] for name in _NAMES if name not in _HIDDEN)


def _has_spans(run: Found) -> bool:
    return any(run.folder.glob("spans-*.jsonl"))


def _is_recording(run: Found, runs: Sequence[Found]) -> bool:
    """Whether it is a short run for the timeline of a method that has others."""
    if run.failure or not run.row["record_spans"]:
        return False
    own = _settings(run)
    return any(
        not other.failure
        and not other.row["record_spans"]
        and other.row["steps"] > run.row["steps"]
        and _same(_settings(other), own, (*_HIDDEN, *_SHORTER))
        for other in runs
    )


def _add_failed(run: Found, methods: list[Method]) -> None:
    """Adds a run without result to the method of the other seeds, if there are such."""
    own = _settings(run)
    unresolved = [
        name
        for name, value in _UNRESOLVED.items()
        if own[name] == value or (name == "compute" and str(own[name]).startswith(value))
    ]
    for method in methods:
        if _same(method.settings, own, (*_HIDDEN, *unresolved)):
            method.runs.append(run)
            return
    data = own["data"]
    for method in methods:  # of the same task
        others = [name for name in _NAMES if name not in TASK or name in unresolved]
        if _same(method.settings, own, others):
            data = method.data
            own |= {name: method.settings[name] for name in unresolved}
            break
    methods.append(Method(run.method, own, data, [run]))
