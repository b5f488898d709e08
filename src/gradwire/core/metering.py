"""Reports of coding work, for an engine that charges virtual time for it.

While a meter is open (`metered`), every codec reports what it does: the codec, the operation, how
many elements and how many bytes. `Codec.__init_subclass__` puts the reports around `split`, `join`,
`encode` and `decode` of every codec, so that an author need not know of them; functions of codecs,
such as those of core/fusion.py, are `reported`. The outermost codec reports, and what it does
inside is part of that; codecs that are made of codecs (core/composite.py) do not report, so that
each of their members does.

A report holds no price: `runtime/virtual/coding_time.py` turns reports into seconds. Without
an open meter a report costs one read of a variable.
"""

import functools
import inspect
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeVar, cast

from torch import Tensor

# The operations of codecs.
ENCODE, ENCODE_FEEDBACK = "encode", "encode_feedback"
DECODE, ADD, DECODE_MEAN, MERGE = "decode", "add", "decode_mean", "merge"
OPERATIONS = (ENCODE, ENCODE_FEEDBACK, DECODE, ADD, DECODE_MEAN, MERGE)
# Work that belongs to no codec.
VECTOR, PACK, UNPACK = "vector", "pack", "unpack"  # arithmetic on vectors; checksums


class Work(NamedTuple):
    """One operation."""

    codec: Any  # None if it belongs to no codec
    operation: str
    elements: int  # that go into encoding or come out of decoding
    nbytes: int  # of what encoding makes or decoding reads; of arithmetic, read and written
    seconds: float = 0.0  # of a codec, to measure costs


Clock = Callable[[], float]
_MAKES_NEW = "_makes_new"
F = TypeVar("F", bound=Callable[..., Any])


def makes_new(function: F) -> F:
    """Says that what a function returns counts as new, also where it could return an argument."""
    setattr(function, _MAKES_NEW, True)
    return function


def is_new(function: Callable[..., Any]) -> bool:
    """Whether what a function returns always counts as new."""
    return getattr(function, _MAKES_NEW, False)


class _Meter(NamedTuple):
    reports: list[Work]
    clock: Clock | None


_METER: ContextVar[_Meter | None] = ContextVar("gradwire_meter", default=None)


class metered:
    """Opens a meter: what is reported inside is in the list, with seconds if there is a clock."""

    __slots__ = ("_clock", "_token")

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock

    def __enter__(self) -> list[Work]:
        reports: list[Work] = []
        self._token = _METER.set(_Meter(reports, self._clock))
        return reports

    def __exit__(self, *error: object) -> None:
        _METER.reset(self._token)


def report(operation: str, nbytes: int) -> None:
    """Reports work that belongs to no codec."""
    meter = _METER.get()
    if meter is not None:
        meter.reports.append(Work(None, operation, 0, nbytes))


def reported(name: str) -> Callable[[F], F]:
    """Lets a function of a codec and other arguments, or a method of it, report what it did.

    `name` is its name in the table below.
    """

    def decorate(function: F) -> F:
        return cast(F, _reporting(name, function))

    return decorate


def _reporting(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    operation, sizes = _METHODS[name]

    @functools.wraps(method)
    def run(self: Any, *args: Any, **named: Any) -> Any:
        meter = _METER.get()
        if meter is None or not self._reports:
            return method(self, *args, **named)
        token, clock, seconds = _METER.set(None), meter.clock, 0.0
        try:
            if clock is None:
                result = method(self, *args, **named)
            else:
                start = clock()
                result = method(self, *args, **named)
                seconds = clock() - start
        finally:
            _METER.reset(token)
        if named:
            args = inspect.signature(method).bind(self, *args, **named).args[1:]
        elements, nbytes = sizes(args, result)
        meter.reports.append(Work(self, operation, elements, nbytes, seconds))
        return result

    return run


def tensor_nbytes(value: Any) -> int:
    """Of all tensors in a value: tensors, payloads and mappings, tuples and lists of them."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, tuple | list):
        return sum(map(tensor_nbytes, value))
    if hasattr(value, "values"):
        return sum(map(tensor_nbytes, value.values()))
    return value.nbytes if hasattr(value, "nbytes") else 0


def _encoded(args: tuple[Any, ...], result: Any) -> tuple[int, int]:
    return args[0].numel(), tensor_nbytes(result[0])


def _decoded(args: tuple[Any, ...], result: Any) -> tuple[int, int]:
    return result.numel(), tensor_nbytes(args[0])


def _added(args: tuple[Any, ...], result: Any) -> tuple[int, int]:
    return result.numel(), tensor_nbytes(args[1])


def _averaged(args: tuple[Any, ...], result: Any) -> tuple[int, int]:
    payloads = args[0]
    return len(payloads) * result.numel(), tensor_nbytes(list(payloads))


def _merged(args: tuple[Any, ...], result: Any) -> tuple[int, int]:
    return 0, tensor_nbytes(args[:2]) + tensor_nbytes(result)


# Method or function -> operation, and elements and bytes of its arguments and its result.
_METHODS: dict[str, tuple[str, Callable[[tuple[Any, ...], Any], tuple[int, int]]]] = {
    "encode": (ENCODE, _encoded),
    "split": (ENCODE, _encoded),
    "split_symbols": (ENCODE, _encoded),
    "encode_feedback": (ENCODE_FEEDBACK, _encoded),
    "split_feedback": (ENCODE_FEEDBACK, _encoded),
    "decode": (DECODE, _decoded),
    "join": (DECODE, _decoded),
    "add_joined": (ADD, _added),
    "decode_mean": (DECODE_MEAN, _averaged),
    "merge": (MERGE, _merged),
}


def report_methods(codec_class: type) -> None:
    """Lets the methods that a class of codecs defines report."""
    for name in _METHODS.keys() & vars(codec_class).keys():
        setattr(codec_class, name, _reporting(name, vars(codec_class)[name]))
