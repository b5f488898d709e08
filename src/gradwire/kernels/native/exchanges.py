"""Exchanges under way, in C: messages that no program observes one by one.

There is no reference: without the library the simulator sends messages one by one.
"""

import ctypes
from array import array
from collections.abc import Sequence
from typing import NamedTuple

from gradwire.kernels.native._library import load

_ROOM = 1024  # completions that a call returns


class _Completion(ctypes.Structure):
    _fields_ = (
        ("at", ctypes.c_double),
        ("number", ctypes.c_int64),
        ("exchange", ctypes.c_int32),
        ("rank", ctypes.c_int32),
    )


class Completion(NamedTuple):
    """A member of an exchange gets the last message."""

    at: float
    number: int  # of that event
    exchange: int
    rank: int


class Heads:
    """The first bits of messages under way, on NICs whose state is in these arrays.

    `delivered`: when the last message of each pair has come, by receiver and sender.
    """

    def __init__(
        self,
        egress_free: "array[float]",
        ingress_free: "array[float]",
        delivered: "array[float]",
        bandwidth: Sequence[float],
        latency_s: Sequence[float],
    ) -> None:
        self._library = load()
        self._kept = (
            egress_free,
            ingress_free,
            delivered,
            array("d", bandwidth),
            array("d", latency_s),
        )
        places = [own.buffer_info()[0] for own in self._kept]
        self._handle: int | None = self._library.gw_exchanges_new(len(bandwidth), *places)
        self._completions = (_Completion * _ROOM)()
        self._at, self._number = ctypes.c_double(), ctypes.c_int64()
        self._references = ctypes.byref(self._at), ctypes.byref(self._number)
        _check(self._handle is not None)

    def __del__(self) -> None:
        if getattr(self, "_handle", None) is not None:
            self._library.gw_exchanges_free(self._handle)

    def begin(self, size: int) -> int:
        """A new exchange of so many members; its number."""
        number: int = self._library.gw_exchanges_begin(self._handle, size)
        _check(number >= 0)
        return number

    def post(
        self,
        exchange: int,
        rank: int,
        members: "array[int]",
        nbytes: "int | array[int]",
        now: float,
        number: int,
        bytes_to: "array[int]",
        messages_to: "array[int]",
    ) -> None:
        """What a member sends now. Its messages have the numbers from `number` on; the last two
        count them, by receiver."""
        same, each = (nbytes, None) if isinstance(nbytes, int) else (0, nbytes.buffer_info()[0])
        code = self._library.gw_exchanges_post(
            self._handle,
            exchange,
            rank,
            members.buffer_info()[0],
            same,
            each,
            now,
            number,
            bytes_to.buffer_info()[0],
            messages_to.buffer_info()[0],
        )
        _check(code == 0)

    def next(self) -> tuple[float, int] | None:
        """Time and number of the next head."""
        if not self._library.gw_exchanges_next(self._handle, *self._references):
            return None
        return self._at.value, self._number.value

    def run(self, limit: tuple[float, int], next_number: int) -> tuple[list[Completion], int]:
        """Lets heads arrive before an event that has this time and number, and before a member that
        gets all can go on. `next_number`: of the next event; returned as well."""
        self._number.value = next_number
        found = self._library.gw_exchanges_run(
            self._handle, *limit, self._references[1], self._completions, _ROOM
        )
        done = [
            Completion(one.at, one.number, one.exchange, one.rank)
            for one in self._completions[:found]
        ]
        return done, self._number.value

    def clear(self) -> None:
        """Forgets what is under way."""
        self._library.gw_exchanges_clear(self._handle)


def _check(is_good: bool) -> None:
    if not is_good:
        raise MemoryError("no memory for the messages of an exchange")
