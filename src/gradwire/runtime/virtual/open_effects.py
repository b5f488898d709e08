"""Effects of a group that are under way in C: who takes part in which, and when C goes on.

Both kinds, exchanges and passes, are found by members and tag. A tag may come again when some have
done with it, so each member takes part in the first one that it has not.
"""

from array import array
from collections import deque
from collections.abc import Callable
from heapq import heappop
from math import inf
from typing import Any

from gradwire.core.node import Exchange, Pass, Tag
from gradwire.runtime.interpreter.interpreter import Task
from gradwire.runtime.virtual.events import Events

_NO_LIMIT = inf, 0


class Open:
    """An effect that not all members have asked for, or not all have the answer of."""

    __slots__ = ("have_all", "left", "number", "outgoing", "tasks")

    def __init__(self, number: int, size: int) -> None:
        self.number = number  # in C
        self.outgoing: list[Any] = [None] * size
        self.tasks: list[Task | None] = [None] * size  # those that wait
        self.have_all = [False] * size
        self.left = size  # members that have not gone on

    def received(self, rank: int) -> Any:
        return self.outgoing[rank].received(self.outgoing, rank)


class OpenEffects:
    """Those under way, by members and tag and by their number in C."""

    def __init__(self) -> None:
        self.by_number: dict[int, Open] = {}
        self._by_key: dict[tuple[tuple[int, ...], Tag], deque[Open]] = {}
        self._members: dict[tuple[int, ...], array[int]] = {}

    def take_part(self, effect: Exchange | Pass[Any], begin: "Callable[[array[int]], int]") -> Open:
        """The one that a member takes part in now; perhaps a new one, with a number of C."""
        found = self._by_key.setdefault((effect.members, effect.tag), deque())
        for one in found:
            if one.outgoing[effect.rank] is None:
                break
        else:
            members = self.members(effect.members)
            one = Open(begin(members), len(members))
            self.by_number[one.number] = one
            found.append(one)
        one.outgoing[effect.rank] = effect.outgoing
        return one

    def members(self, members: tuple[int, ...]) -> "array[int]":
        """As C reads them."""
        found = self._members.get(members)
        if found is None:
            found = self._members[members] = array("i", members)
        return found

    def go_on(self, effect: Exchange | Pass[Any], one: Open) -> bool:
        """A member goes on; whether it was the last one."""
        one.left -= 1
        if one.left:
            return False
        key = effect.members, effect.tag
        self._by_key[key].remove(one)
        if not self._by_key[key]:
            del self._by_key[key]
        if self.by_number.get(one.number) is one:  # C gives numbers again
            del self.by_number[one.number]
        return True

    def clear(self) -> None:
        self._by_key.clear()
        self.by_number.clear()


class NextEvent:
    """The event in the heap that stands for the next one in C, with its time and number.

    It is added again when there is an earlier one. Those that are outdated by that do nothing.
    """

    def __init__(self, events: Events, kind: int) -> None:
        self._events, self._kind = events, kind
        self._scheduled: tuple[float, int] | None = None

    def limit(self, at: float, number: int) -> tuple[float, int] | None:
        """The event of this time and number is due: time and number of the next one of another
        kind. None if it is outdated."""
        if (at, number) != self._scheduled:
            return None
        self._scheduled = None
        heap = self._events.heap
        while heap and heap[0][2] == self._kind:  # outdated
            heappop(heap)
        return heap[0][:2] if heap else _NO_LIMIT

    def schedule(self, following: tuple[float, int] | None) -> None:
        """The next event in C is this one."""
        if following is not None and (self._scheduled is None or following < self._scheduled):
            self._scheduled = following
            self._events.push_numbered(*following, self._kind, following)

    def clear(self) -> None:
        self._scheduled = None
