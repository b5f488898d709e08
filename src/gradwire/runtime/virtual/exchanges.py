"""Exchanges as one effect: n(n - 1) messages that no program observes one by one.

Their first bits are kept in C (`kernels/native/exchanges.c`), which lets them arrive up to the next
event of another kind, and says which members then have all their messages: those events come into
the heap. Every message takes the same numbers among events as if it were sent by itself, and NICs
are used in the same order, so times and bytes are exactly those of messages one by one. That holds
on NICs that serve in order, without faults; where spans are recorded, each message is wanted.
"""

from array import array
from collections import deque
from collections.abc import Sequence
from heapq import heappop
from itertools import count
from math import inf
from typing import Any

from torch import Tensor

from gradwire.core.exchange import Outgoing
from gradwire.core.node import Exchange, Tag
from gradwire.kernels.native.exchanges import Heads
from gradwire.runtime.interpreter.interpreter import WAITING, Task
from gradwire.runtime.ledger import Ledger
from gradwire.runtime.network.network import Nics
from gradwire.runtime.virtual.events import EXCHANGED, HEADS, Events

_NO_LIMIT = inf, 0


class _Open:
    """An exchange that not all members have taken part in, or not all have all messages of."""

    __slots__ = ("have_all", "left", "number", "outgoing", "tasks")

    def __init__(self, number: int, size: int) -> None:
        self.number = number
        self.outgoing: list[Outgoing | None] = [None] * size
        self.tasks: list[Task | None] = [None] * size  # those that wait
        self.have_all = [False] * size
        self.left = size  # members that have not gone on

    def received(self, rank: int) -> Sequence[Tensor]:
        own: Any = self.outgoing[rank]
        found: Sequence[Tensor] = own.received(self.outgoing, rank)
        return found


class Exchanges:
    """The exchanges under way on these NICs."""

    def __init__(self, nics: Nics, ledger: Ledger, events: Events) -> None:
        self._ledger, self._events = ledger, events
        self._heads = Heads(
            nics.egress_free, nics.ingress_free, nics.delivered, nics.bandwidth, nics.latency_s
        )
        # By members and tag; a tag may come again when some have done with it.
        self._open: dict[tuple[tuple[int, ...], Tag], deque[_Open]] = {}
        self._by_number: dict[int, _Open] = {}
        self._members: dict[tuple[int, ...], array[int]] = {}
        self._scheduled: tuple[float, int] | None = None  # the event of the next heads

    def post(self, task: Task, effect: Exchange) -> Any:
        """A member sends; answers at once if all its messages are there."""
        members, rank, events = effect.members, effect.rank, self._events
        key = members, effect.tag
        one = self._find(key, rank)
        one.outgoing[rank] = effect.outgoing
        nbytes = effect.outgoing.nbytes
        first = next(events.numbers)
        events.numbers = count(first + len(members) - 1)
        own = members[rank]
        self._heads.post(
            one.number,
            rank,
            self._members[members],
            nbytes,
            events.now,
            first,
            self._ledger.bytes_to[own],
            self._ledger.messages_to[own],
        )
        total = nbytes * (len(members) - 1) if isinstance(nbytes, int) else sum(nbytes)
        total -= 0 if isinstance(nbytes, int) else nbytes[rank]
        self._ledger.tensor_bytes[effect.label] += total
        self._schedule()
        if one.have_all[rank]:
            return self._take(key, one, rank)
        one.tasks[rank] = task
        task.waiting_for = effect
        return WAITING

    def run_heads(self, at: float, number: int) -> None:
        """Heads are due: those before the next event of another kind."""
        if (at, number) != self._scheduled:
            return
        self._scheduled = None
        events = self._events
        heap = events.heap
        while heap and heap[0][2] == HEADS:  # of heads that others have overtaken since
            heappop(heap)
        limit = heap[0][:2] if heap else _NO_LIMIT
        first = next(events.numbers)
        done, following = self._heads.run(limit, first)
        events.numbers = count(following)
        for at, number, exchange, rank in done:
            events.push_numbered(at, number, EXCHANGED, (self._by_number[exchange], rank))
        self._schedule()

    def finish(self, one: _Open, rank: int) -> tuple[Task, Sequence[Tensor]] | None:
        """A member has all messages: its program, if that waits for them, and these."""
        one.have_all[rank] = True
        task = one.tasks[rank]
        if task is None:
            return None
        effect = task.waiting_for
        return task, self._take((effect.members, effect.tag), one, rank)

    def clear(self) -> None:
        """The run is over: forgets what is under way."""
        self._heads.clear()
        self._open.clear()
        self._by_number.clear()
        self._scheduled = None

    def _find(self, key: tuple[tuple[int, ...], Tag], rank: int) -> _Open:
        """The exchange that a member takes part in now: the first one that it has not."""
        found = self._open.setdefault(key, deque())
        for one in found:
            if one.outgoing[rank] is None:
                return one
        members = key[0]
        if members not in self._members:
            self._members[members] = array("i", members)
        one = _Open(self._heads.begin(len(members)), len(members))
        self._by_number[one.number] = one
        found.append(one)
        return one

    def _take(self, key: tuple[tuple[int, ...], Tag], one: _Open, rank: int) -> Sequence[Tensor]:
        received = one.received(rank)
        one.left -= 1
        if not one.left:
            self._open[key].remove(one)
            if not self._open[key]:
                del self._open[key]
            if self._by_number.get(one.number) is one:  # C gives numbers again
                del self._by_number[one.number]
        return received

    def _schedule(self) -> None:
        """Adds an event for the next head, if that comes before the one there is."""
        following = self._heads.next()
        if following is not None and (self._scheduled is None or following < self._scheduled):
            self._scheduled = following
            self._events.push_numbered(*following, HEADS, following)
