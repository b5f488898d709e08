"""Future events: a heap ordered by time, then by the order in which they were added."""

from collections.abc import Container
from heapq import heapify, heappush
from itertools import count
from typing import Any

# A message's first and last bit arrive; a program continues; a gradient is due; a wait times out; a
# worker crashes or comes back; a parcel is sent again; its first and last bit arrive; the last bit
# of a message leaves for a network with a topology; the backward pass leaves a layer; a NIC that
# serves by priority is free; cores that nodes share have done a job; a call evaluated late is due;
# first bits of messages of exchanges arrive; a member of one has all its messages; calls that were
# held are evaluated; messages that go around rings move on.
HEAD, TAIL, WAKE, COMPUTED, TIMEOUT, FAULT, SEND, PARCEL_HEAD, PARCEL_TAIL = range(9)
FLOW, REACHED, FREE, WORK, CALLED, HEADS, EXCHANGED, HELD, PASSES = range(9, 18)

Event = tuple[float, int, int, Any]  # time, sequence, kind, what
_LAST = 1 << 62


class Events:
    """The events to come. Of those at the same time `push_first` puts some before all others.

    Idle events, faults and timeouts, are counted: a run does not continue because of them.
    """

    __slots__ = ("heap", "now", "num_idle", "numbers")

    def __init__(self) -> None:
        self.heap: list[Event] = []  # always the same list
        self.now = 0.0  # virtual time: that of the event which happens
        self.numbers = count(1)  # in the order in which events are added
        self.num_idle = 0  # the user counts down when it takes one

    def push(self, at: float, kind: int, what: Any) -> None:
        heappush(self.heap, (at, next(self.numbers), kind, what))

    def push_numbered(self, at: float, number: int, kind: int, what: Any) -> None:
        """An event whose number has been taken already."""
        heappush(self.heap, (at, number, kind, what))

    def push_first(self, at: float, kind: int, what: Any) -> None:
        """An idle event before all others of its time."""
        self.num_idle += 1
        heappush(self.heap, (at, next(self.numbers) - _LAST, kind, what))

    def push_last(self, at: float, kind: int, what: Any) -> None:
        """An idle event after all others of its time."""
        self.num_idle += 1
        heappush(self.heap, (at, next(self.numbers) + _LAST, kind, what))

    def push_after(self, at: float, kind: int, what: Any) -> None:
        """An event after those that are decided at its time, timeouts excepted."""
        heappush(self.heap, (at, next(self.numbers) + (_LAST >> 1), kind, what))

    @property
    def only_idle(self) -> bool:
        return len(self.heap) == self.num_idle

    def forget(self, rank: int, dropped: Container[Any]) -> None:
        """A node crashed: nothing happens to its programs, nor to the parcels that were dropped."""

        def remains(kind: int, what: Any) -> bool:
            if kind in (WAKE, TIMEOUT, REACHED, CALLED):
                return bool(what[0].rank != rank)
            if kind == COMPUTED:
                return bool(what.task.rank != rank)
            if kind == TAIL:
                return bool(what[1] != rank)  # of what it sent itself
            return kind in (FAULT, FLOW, FREE, WORK) or what not in dropped

        self.heap[:] = [entry for entry in self.heap if remains(entry[2], entry[3])]
        self.num_idle = sum(entry[2] in (TIMEOUT, FAULT) for entry in self.heap)
        heapify(self.heap)

    def clear(self) -> None:
        self.heap.clear()
        self.num_idle = 0
