"""How long coding takes in virtual time: as measured here and now, or by a model of costs.

`call` and `share` are the work of a node besides gradients: encoding and decoding, averaging,
updating parameters. By the model an operation takes

    seconds = fixed + per_element * elements + per_byte * bytes

with three numbers for each operation of each codec, from a table that was measured once. So the
same configuration gives the same virtual times on every machine. A call costs what the codecs in it
report (`core/metering.py`), and what the entry of its function says for the number of reports and
the bytes of the tensors that it reads and makes. Functions without an entry and without codecs
count as plain arithmetic on vectors. A call that only returns its arguments costs nothing of its
own.

An engine without either charges nothing.
"""

import functools
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from gradwire.core.codec import Codec
from gradwire.core.errors import GradwireWarning
from gradwire.core.exchange import Column
from gradwire.core.metering import (
    ADD,
    DECODE,
    DECODE_MEAN,
    ENCODE,
    ENCODE_FEEDBACK,
    MERGE,
    VECTOR,
    Clock,
    Work,
    is_new,
)
from gradwire.core.node import Call
from gradwire.core.notation import Expression, notation_name
from gradwire.core.payload import Payload
from gradwire.core.payload_rows import PiecePayload

# Operations whose costs replace those of an operation without an entry.
_INSTEAD = {ENCODE_FEEDBACK: (ENCODE, DECODE), DECODE_MEAN: (DECODE,), ADD: (DECODE,)}


class Cost(NamedTuple):
    """The cost of one operation."""

    fixed_s: float
    per_element_s: float
    per_byte_s: float

    def seconds(self, elements: int, nbytes: int) -> float:
        return self.fixed_s + self.per_element_s * elements + self.per_byte_s * nbytes


@dataclass(frozen=True)
class CostTable:
    """The costs of operations on some machine."""

    codecs: Mapping[str, Mapping[str, Cost]]  # by name or as written with arguments, by operation
    functions: Mapping[str, Cost]  # by module and name: besides codecs, per report and byte
    others: Mapping[str, Cost]  # vector, pack, unpack
    default: Mapping[str, Cost]  # of codecs that are not in the table, by operation


class CodingTime(ABC):
    """The virtual time of a call."""

    meters: bool  # whether it needs the reports of codecs
    clock: Clock = staticmethod(time.perf_counter)  # by which calls are timed here
    times_codecs = False  # whether codecs report seconds of that clock

    @property
    def program_slowdown(self) -> float | None:
        """Where nodes share cores: how many times as long as here programs take themselves,
        between two effects. None: no time."""
        return None

    @abstractmethod
    def seconds(self, call: Call[Any], result: Any, work: Sequence[Work], taken_s: float) -> float:
        """Given the result of the call, the reports of codecs and the time it took here."""


@dataclass(frozen=True)
class MeasuredCoding(CodingTime):
    """The time that it took here, times a factor.

    With one thread it is the running time of that thread, so other processes count little.
    """

    slowdown: float = 1.0

    meters = False

    @property
    def clock(self) -> Clock:  # type: ignore[override]
        return time.thread_time if torch.get_num_threads() == 1 else time.perf_counter

    @property
    def program_slowdown(self) -> float:
        return self.slowdown

    def seconds(self, call: Call[Any], result: Any, work: Sequence[Work], taken_s: float) -> float:
        return self.slowdown * taken_s


@dataclass(frozen=True, eq=False)
class ModelledCoding(CodingTime):
    """The time by a table of costs, times a factor."""

    table: CostTable
    slowdown: float = 1.0
    _unknown: set[str] = field(default_factory=set)  # codecs that were warned about
    # The last codec that was asked for, and its costs: mostly all workers have the same.
    _last: list[Any] = field(default_factory=lambda: [None, None])

    meters = True

    def seconds(self, call: Call[Any], result: Any, work: Sequence[Work], taken_s: float) -> float:
        seconds = sum(map(self._priced, work))
        nbytes = touched_nbytes((call.function, call.args), result)
        if nbytes is not None:
            own = self.table.functions.get(call_name(call))
            if own is None and not any(one.codec is not None for one in work):
                own = self.table.others[VECTOR]
            seconds += own.seconds(len(work), nbytes) if own is not None else 0.0
        return self.slowdown * seconds

    def reported_seconds(self, work: Sequence[Work]) -> float:
        """What reports of codecs amount to, without what a call takes besides."""
        return self.slowdown * sum(map(self._priced, work))

    def _priced(self, work: Work) -> float:
        if work.codec is None:
            return self.table.others[work.operation].seconds(0, work.nbytes)
        costs = self._costs(work.codec)
        if work.operation in costs:
            return costs[work.operation].seconds(work.elements, work.nbytes)
        if work.operation == MERGE:
            return self.table.others[VECTOR].seconds(0, work.nbytes)
        operations = _INSTEAD[work.operation]
        return sum(costs[one].seconds(work.elements, work.nbytes) for one in operations)

    def _costs(self, codec: Any) -> Mapping[str, Cost]:
        if self._last[0] is not codec:
            self._last[:] = codec, self._find_costs(codec)
        found: Mapping[str, Cost] = self._last[1]
        return found

    def _find_costs(self, codec: Any) -> Mapping[str, Cost]:
        name, text = _names(codec)
        codecs = self.table.codecs
        found = codecs.get(text) or codecs.get(name)
        if found is not None:
            return found
        if name not in self._unknown:
            self._unknown.add(name)
            warnings.warn(
                f"the table of coding costs has no entry for {name}: it is charged like one of "
                f'the slower codecs. Measure it: gradwire codecs --costs FILE --only "{text}", '
                "then --coding-costs FILE",
                GradwireWarning,
                stacklevel=2,
            )
        return self.table.default


@functools.lru_cache(maxsize=1024)
def _names(codec: Any) -> tuple[str, str]:
    return notation_name(type(codec)), repr(codec)


def call_name(call: Call[Any]) -> str:
    """The name of a call in the table: an optimizer's update depends on the optimizer."""
    name, first = function_name(call.function), next(iter(call.args), None)
    if isinstance(first, Expression) and not isinstance(first, Codec):
        return f"{name}({notation_name(type(first))})"
    return name


def function_name(function: Callable[..., Any]) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    module = getattr(function, "__module__", None) or type(function).__module__
    name = getattr(function, "__qualname__", type(function).__name__)
    return f"{module}.{name}".removeprefix("gradwire.")


def touched_nbytes(called: tuple[Callable[..., Any], tuple[Any, ...]], result: Any) -> int | None:
    """Bytes of the tensors that a call, a function and its arguments, reads and makes; None if it
    only returns arguments."""
    if result is None:
        return None
    found: list[Found] = []
    _gather(called, found)
    read = {id(tensor): tensor for tensor in found}
    memory = set[int]()
    if not is_new(called[0]):
        memory = set(map(_memory, read.values()))
    results: list[Found] = []
    _gather(result, results)
    made = [x for x in results if _memory(x) not in memory] if memory else results
    if results and not made:
        return None
    return sum(map(_nbytes, read.values())) + sum(map(_nbytes, made))


# A payload stands for parts that nobody has asked for.
Found: TypeAlias = Tensor | PiecePayload


def _memory(x: Found) -> int:
    return (x.buffer if isinstance(x, PiecePayload) else x).untyped_storage().data_ptr()


def _nbytes(x: Found) -> int:
    return x.parts_nbytes if isinstance(x, PiecePayload) else x.numel() * x.element_size()


def _gather(value: Any, found: list[Found]) -> None:
    """Appends the tensors in a value."""
    kind = type(value)
    try:
        way = _WAYS[kind]
    except KeyError:
        way = _WAYS[kind] = _way(value)
    if way is _ITEMS:
        for item in value:
            if _WAYS.get(type(item)) is not _NONE:
                _gather(item, found)
    elif way is _TENSOR or (kind is PiecePayload and not value.has_views):
        found.append(value)
    elif way is _PAYLOAD:
        _gather(tuple(value.parts.values()), found)
    elif way is _PARTIAL:
        _gather((value.args, value.keywords), found)
    elif way is _VALUES:
        _gather(tuple(value.values()), found)


# How tensors are found in a value. That depends on its class only, and the tests take long.
_NONE, _TENSOR, _ITEMS, _PAYLOAD, _PARTIAL, _VALUES = (object() for _ in range(6))
_WAYS: dict[type, object] = {}  # known so far


def _way(value: Any) -> object:
    kinds = {
        Tensor: _TENSOR,
        tuple: _ITEMS,
        list: _ITEMS,
        Column: _ITEMS,
        Payload: _PAYLOAD,
        functools.partial: _PARTIAL,
        Mapping: _VALUES,
    }
    return next((way for kind, way in kinds.items() if isinstance(value, kind)), _NONE)
