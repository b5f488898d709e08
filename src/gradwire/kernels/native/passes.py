"""Messages that go around rings, in C: what programs would do with them, and their events.

There is no reference: without the library the simulator sends messages one by one.
"""

import ctypes
from array import array
from collections.abc import Sequence
from typing import NamedTuple

from gradwire.kernels.native._library import load


class Completion(NamedTuple):
    """A member of a pass has all messages."""

    at: float
    number: int  # of the pass
    rank: int


class Rings:
    """Passes under way, on NICs and nodes whose state is in these arrays.

    `delivered`: when the last message of each pair has come, by receiver and sender. `calls_free`:
    when each node has finished its calls.
    """

    def __init__(
        self,
        egress_free: "array[float]",
        ingress_free: "array[float]",
        delivered: "array[float]",
        bandwidth: Sequence[float],
        latency_s: Sequence[float],
        calls_free: "array[float]",
    ) -> None:
        self._library = load()
        self._kept = (
            egress_free,
            ingress_free,
            delivered,
            array("d", bandwidth),
            array("d", latency_s),
            calls_free,
        )
        places = [own.buffer_info()[0] for own in self._kept]
        self._handle: int | None = self._library.gw_passes_new(len(bandwidth), *places)
        self._at, self._number = ctypes.c_double(), ctypes.c_int64()
        self._pass, self._rank = ctypes.c_int64(), ctypes.c_int32()
        results = self._number, self._at, self._pass, self._rank
        self._references = tuple([ctypes.byref(own) for own in results])
        _check(self._handle is not None)

    def __del__(self) -> None:
        if getattr(self, "_handle", None) is not None:
            self._library.gw_passes_free(self._handle)

    def begin(self, members: "array[int]", first: int) -> int:
        """A new pass among these nodes, the first of which starts with this message; its number."""
        place, size = members.buffer_info()
        number: int = self._library.gw_passes_begin(self._handle, size, place, first)
        _check(number >= 0)
        return number

    def post(
        self,
        number: int,
        rank: int,
        nbytes: int,
        seconds: float,
        now: float,
        next_number: int,
        bytes_to: int,
        messages_to: int,
    ) -> tuple[bool, int]:
        """A member starts with a message, for which each receiver makes a call of so many seconds.

        `next_number`: of the next event; returned as well, after whether the member has all
        messages at once. The last two are the places of what is counted for its right neighbour.
        """
        self._number.value = next_number
        code = self._library.gw_passes_post(
            self._handle,
            number,
            rank,
            nbytes,
            seconds,
            now,
            self._references[0],
            bytes_to,
            messages_to,
        )
        _check(code >= 0)
        return code == 1, self._number.value

    def next(self) -> tuple[float, int] | None:
        """Time and number of the next event."""
        number, at = self._references[:2]
        if not self._library.gw_passes_next(self._handle, at, number):
            return None
        return self._at.value, self._number.value

    def run(self, limit: tuple[float, int], next_number: int) -> tuple[Completion | None, int]:
        """Lets events happen before one that has this time and number, and until a member has all
        messages. `next_number`: of the next event; returned as well."""
        self._number.value = next_number
        code = self._library.gw_passes_run(self._handle, *limit, *self._references)
        _check(code >= 0)
        done = Completion(self._at.value, self._pass.value, self._rank.value) if code else None
        return done, self._number.value

    def end(self, number: int) -> int:
        """A pass is over; how many bytes were sent."""
        nbytes: int = self._library.gw_passes_end(self._handle, number)
        return nbytes

    def clear(self) -> None:
        """Forgets what is under way."""
        self._library.gw_passes_clear(self._handle)


def _check(is_good: bool) -> None:
    if not is_good:
        raise MemoryError("no memory for messages that go around a ring")
