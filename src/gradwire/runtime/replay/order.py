"""The event order of a real run: what was decided outside the programs of one node.

What a node does follows from its programs and from the answers to their effects. Answers to `send`,
`call`, `spawn`, `watch`, `begin` and `open` depend on the node alone. All others depend on the
speed of other nodes, on clocks and on the membership: each of them has an entry, in the order in
which the programs of the node continued. Messages are not kept: the sender's programs make the next
one of that sender and tag again (`runtime/replay/engine.py`).

A file is text, with one JSON value in a line, and behind a tab the checksum of all lines so far
(`storage/text.py`). It is written line by line, so a killed process leaves its order up to that
moment. The first line identifies the file. Then there are, for each run of the engine, ["run",
first, last] with the numbers of steps, its entries and ["end", time]. The last line of a node that
finished is ["result", digest], a digest of its state. An entry is [task, kind, ...], with tasks
numbered from 0 as they were spawned:

    [0, "start"]                                it runs for the first time
    [0, "received", 2, 3735928559]              from rank 2; 32 bits of the hash of the tag
    [0, "received any", 2, 3735928559]          the same, but it would have taken any rank's
    [0, "nothing", 3735928559]                  no message with this tag came in time
    [0, "change", 3735928559, 2, 0, 1.25]       from `watch`: rank 2 was lost (1: came), and when
    [0, "lost", 2, 3735928559, 2, 1.25, 1.5]    it waited for rank 2, which is lost,
                                                and when; when that was noticed
    [0, "computed"]                             a gradient
    [0, "reached"]                              the part of a gradient that it waited for
    [0, "slept"]
    [0, "joined"]                               a program that it had spawned has ended
    [0, "now", 1.25]                            the time
    [0, "members", 0, 2]                        the workers that are there
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf, isfinite
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from gradwire.core.errors import PeerLost
from gradwire.core.node import (
    Compute,
    CurrentMembers,
    Framed,
    Join,
    Membership,
    Now,
    Reach,
    Recv,
    RecvAny,
    Sleep,
    Tag,
)
from gradwire.runtime.interpreter.interpreter import WAITING, Handler, Task
from gradwire.runtime.process.frames import tag_hash
from gradwire.runtime.storage.files import FileError, naming
from gradwire.runtime.storage.text import LineSeal

START, RECEIVED, RECEIVED_ANY, NOTHING = "start", "received", "received any", "nothing"
CHANGE, LOST = "change", "lost"
COMPUTED, REACHED = "computed", "reached"
SLEPT, JOINED, NOW, MEMBERS = "slept", "joined", "now", "members"
RUN, END, RESULT = "run", "end", "result"

_FORMAT, _VERSION = "gradwire order", 5
_VERSIONS = (4, _VERSION)  # that can be read; version 4 has no "reached"
_PLAIN = {Compute: COMPUTED, Reach: REACHED, Sleep: SLEPT, Join: JOINED}

# What follows the name of an entry: a rank, a hash, a bit, a time. "ranks": as many as there are.
_VALUES: dict[str, tuple[str, ...]] = {
    START: (),
    RECEIVED: ("rank", "hash"),
    RECEIVED_ANY: ("rank", "hash"),
    NOTHING: ("hash",),
    CHANGE: ("hash", "rank", "bit", "time"),
    LOST: ("rank", "hash", "rank", "time", "time"),
    COMPUTED: (),
    REACHED: (),
    SLEPT: (),
    JOINED: (),
    NOW: ("time",),
    MEMBERS: ("ranks",),
}


class OrderError(ValueError):
    """An order that is damaged, or not that of these programs."""


class OrderEntry(NamedTuple):
    """A program continues: its number, the kind of the answer, and the answer's values."""

    task: int
    kind: str
    values: tuple[Any, ...] = ()


class RunOrder(NamedTuple):
    """The entries of one run of an engine."""

    entries: tuple[OrderEntry, ...]
    end_s: float | None  # None: the process was killed
    steps: tuple[int, int] = (0, 0)  # the first, and the one after the last
    first_line: int = 0  # where the entries begin in the file


@dataclass(frozen=True)
class EventOrder:
    """What one node recorded. `about` identifies the run (its configuration)."""

    rank: int
    num_nodes: int
    num_workers: int
    about: str
    runs: tuple[RunOrder, ...]
    result: str = ""  # a digest of the node's final state, if it finished
    source: str = ""  # where it was read from


def short_hash(tag: Tag) -> int:
    """Enough of a tag's hash to notice that it is another one."""
    return tag_hash(tag) & 0xFFFFFFFF


class Recorder:
    """Writes the event order of one node into a file, while its engine runs.

    With a `step` the file exists already: its entries of later steps are dropped.
    """

    def __init__(
        self,
        path: Path,
        rank: int,
        num_nodes: int,
        num_workers: int,
        about: str = "",
        step: int = 0,
    ) -> None:
        self.rank = rank
        self.steps = (0, 0)  # of the next run
        self._waiting: dict[int, Any] = {}  # the effects that tasks wait for
        self._path = path
        self._seal = LineSeal()
        if step:
            kept = _until(path, (rank, num_nodes, num_workers, about), step)
            for line in kept.splitlines():
                self._seal.open(line)
            with naming(path):
                os.truncate(path, len(kept.encode()))  # at no moment is less there
                self._file: TextIO = path.open("a", encoding="utf-8", buffering=1)
            return
        with naming(path):
            self._file = path.open("w", encoding="utf-8", buffering=1)
        first = {
            "format": _FORMAT,
            "version": _VERSION,
            "rank": rank,
            "nodes": num_nodes,
            "workers": num_workers,
            "about": about,
        }
        self._write(first)

    def begin(self) -> None:
        self._waiting.clear()
        self._write([RUN, *self.steps])

    def end(self, now: float) -> None:
        self._write([END, now])

    def result(self, digest: str) -> None:
        """Writes the digest of the node's final state."""
        self._write([RESULT, digest])

    def close(self) -> None:
        self._file.close()

    def record(
        self, handlers: dict[type, Handler], tasks: Mapping[Task, int]
    ) -> dict[type, Handler]:
        """Handlers that answer as these do, and record the answers. `tasks` has the numbers."""

        def answer(task: Task, effect: Any) -> Any:
            number = tasks[task]
            self.ask(number, effect)
            try:
                value = handlers[type(effect)](task, effect)
            except Exception as error:
                self.resume(number, None, error)
                raise
            if value is not WAITING:
                self.resume(number, value, None)
            return value

        return dict.fromkeys(handlers, answer)

    def ask(self, task: int, effect: Any) -> None:
        """A program awaits an effect."""
        self._waiting[task] = effect

    def resume(self, task: int, value: Any, failure: Exception | None) -> None:
        """A program starts, or the effect that it awaited is answered."""
        effect = self._waiting.pop(task, None)
        kind = type(effect)
        if effect is None:
            self._write([task, START])
        elif kind in _PLAIN:
            self._write([task, _PLAIN[kind]])
        elif kind is Recv:
            if isinstance(failure, PeerLost):
                at = (failure.crashed_s, failure.noticed_s)
                self._write([task, LOST, effect.src, short_hash(effect.tag), failure.rank, *at])
            elif failure is None:
                self._received(task, RECEIVED, effect.src, effect.tag, value)
        elif kind is RecvAny:
            if value is not None:
                self._received(task, RECEIVED_ANY, value[0], effect.tag, value[1])
            elif failure is None:
                self._write([task, NOTHING, short_hash(effect.tag)])
        elif kind is Now:
            self._write([task, NOW, value])
        elif kind is CurrentMembers:
            self._write([task, MEMBERS, *sorted(value)])

    def _received(self, task: int, kind: str, src: int, tag: Tag, message: Any) -> None:
        header = message.header if isinstance(message, Framed) else None
        if src == self.rank and isinstance(header, Membership):  # made by the engine, not sent
            change = [header.rank, int(header.there), header.time_s]
            self._write([task, CHANGE, short_hash(tag), *change])
        else:
            self._write([task, kind, src, short_hash(tag)])

    def _write(self, value: Any) -> None:
        line = self._seal.seal(json.dumps(value, separators=(",", ":")))
        try:
            self._file.write(line)
        except OSError as error:
            raise FileError("write", self._path, error) from error


def load(path: Path, *, was_killed: bool = False) -> EventOrder:
    """Reads a file and checks every line of it.

    `was_killed`: the process was, so the last run need not have an end, nor the last line.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise OrderError(f"{path} cannot be read: {error}") from error
    lines = _opened(path, text, was_killed)
    head = _parsed(path, 1, lines[0]) if lines else None
    names = {"format": str, "version": int, "rank": int, "nodes": int, "workers": int, "about": str}
    if (
        not isinstance(head, dict)
        or head.get("format") != _FORMAT
        or {name: type(value) for name, value in head.items()} != names
    ):
        raise OrderError(f"{path} is no recorded order: its first line does not say so")
    if head["version"] not in _VERSIONS:
        known = " and ".join(map(str, _VERSIONS))
        raise OrderError(f"{path}: version {head['version']}, this program reads {known}")
    rank, num_nodes, num_workers = head["rank"], head["nodes"], head["workers"]
    if not (0 <= rank < num_nodes and 1 <= num_workers <= num_nodes):
        raise OrderError(
            f"{path}: rank {rank} of {num_nodes} nodes, of which {num_workers} are workers"
        )
    runs: list[RunOrder] = []
    entries: list[OrderEntry] | None = None
    started: set[int] = set()
    steps, first, result = (0, 0), 0, ""
    for number, line in enumerate(lines[1:], 2):
        value = _parsed(path, number, line)
        if _is_line(value, RUN, int, int) and entries is None and not result:
            entries, steps, first = [], (value[1], value[2]), number + 1
            started.clear()
        elif _is_line(value, END, float) and entries is not None:
            runs.append(RunOrder(tuple(entries), value[1], steps, first))
            entries = None
        elif _is_line(value, RESULT, str) and entries is None and not result:
            result = value[1]
        else:
            entry = _entry(value, num_nodes)
            if entries is None or entry is None:
                raise OrderError(f"{path}, line {number}: {line[:80]!r} is not expected there")
            if (entry.kind == START) == (entry.task in started):
                raise OrderError(
                    f"{path}, line {number}: {line!r}, but task {entry.task} "
                    + ("started before" if entry.kind == START else "has not started")
                )
            started.add(entry.task)
            entries.append(entry)
    if entries is not None:
        if not was_killed:
            raise OrderError(
                f"{path} ends in the middle of a run, after line {len(lines)}: it is cut short, or "
                "the process was killed"
            )
        runs.append(RunOrder(tuple(entries), None, steps, first))
    return EventOrder(rank, num_nodes, num_workers, head["about"], tuple(runs), result, str(path))


def _opened(path: Path, text: str, was_killed: bool) -> list[str]:
    """The lines of a file, without their checksums, which are checked."""
    if text.startswith('{"format":"gradwire order","version":1,'):
        raise OrderError(f"{path} was written by an older gradwire, without checksums")
    *whole, rest = text.split("\n")
    if rest and not was_killed:
        raise OrderError(f"{path}, line {len(whole) + 1}: {rest[:80]!r} is cut short")
    seal, lines = LineSeal(), []
    for number, line in enumerate(whole, 1):
        opened = seal.open(line)
        if opened is None:
            raise OrderError(
                f"{path}, line {number}: {line[:80]!r} is damaged: its checksum does not fit"
            )
        lines.append(opened)
    return lines


def _until(path: Path, whose: tuple[int, int, int, str], step: int) -> str:
    """The text of a file up to the run that ended before this step."""
    order = load(path, was_killed=True)
    if (order.rank, order.num_nodes, order.num_workers, order.about) != whose:
        raise OrderError(f"{path} is the order of another run")
    last_line, reached = 1, 0
    for one in order.runs:
        if one.end_s is None or one.steps[0] != reached or one.steps[1] > step:
            break
        reached, last_line = one.steps[1], one.first_line + len(one.entries)
    if reached != step:
        raise OrderError(f"{path} has the order up to step {reached}, not {step}")
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return "".join(lines[:last_line])


def _parsed(path: Path, number: int, line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        raise OrderError(
            f"{path}, line {number}: {line[:80]!r} is no JSON; is it cut short?"
        ) from None


def _is_line(value: Any, name: str, *kinds: type) -> bool:
    """Whether it is a line of this name, with finite numbers that are not negative, or texts."""
    if not isinstance(value, list) or [type(one) for one in value] != [str, *kinds]:
        return False
    return value[0] == name and all(
        bool(one) if isinstance(one, str) else 0 <= one < inf for one in value[1:]
    )


def _entry(value: Any, num_nodes: int) -> OrderEntry | None:
    """The entry in a line; None if the line is no entry."""
    if not isinstance(value, list) or len(value) < 2:
        return None
    task, kind, *rest = value
    if not (type(task) is int and task >= 0 and isinstance(kind, str) and kind in _VALUES):
        return None
    expected = _VALUES[kind]
    if expected == ("ranks",):
        expected = ("rank",) * len(rest)
    if len(rest) != len(expected) or not all(
        _is(what, one, num_nodes) for what, one in zip(expected, rest)
    ):
        return None
    return OrderEntry(task, kind, tuple(rest))


def _is(what: str, value: Any, num_nodes: int) -> bool:
    if what == "time":
        return type(value) in (int, float) and isfinite(value)
    limit = {"rank": num_nodes, "hash": 1 << 32, "bit": 2}[what]
    return type(value) is int and 0 <= value < limit
