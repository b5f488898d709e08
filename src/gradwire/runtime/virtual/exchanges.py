"""Exchanges as one effect: n(n - 1) messages that no program observes one by one.

Their first bits are kept in C (`kernels/native/exchanges.c`), which lets them arrive up to the next
event of another kind, and says which members then have all their messages: those events come into
the heap. Every message takes the same numbers among events as if it were sent by itself, and NICs
are used in the same order, so times and bytes are exactly those of messages one by one. That holds
on NICs that serve in order, without faults; where spans are recorded, each message is wanted.
"""

from collections.abc import Sequence
from itertools import count
from typing import Any

from torch import Tensor

from gradwire.core.node import Exchange
from gradwire.kernels.native.exchanges import Heads
from gradwire.runtime.interpreter.interpreter import WAITING, Task
from gradwire.runtime.ledger import Ledger
from gradwire.runtime.network.network import Nics
from gradwire.runtime.virtual.events import EXCHANGED, HEADS, Events
from gradwire.runtime.virtual.open_effects import NextEvent, Open, OpenEffects


class Exchanges:
    """The exchanges under way on these NICs."""

    def __init__(self, nics: Nics, ledger: Ledger, events: Events) -> None:
        self._ledger, self._events = ledger, events
        self._heads = Heads(
            nics.egress_free, nics.ingress_free, nics.delivered, nics.bandwidth, nics.latency_s
        )
        self._open = OpenEffects()
        self._next = NextEvent(events, HEADS)

    def post(self, task: Task, effect: Exchange) -> Any:
        """A member sends; answers at once if all its messages are there."""
        members, rank, events = effect.members, effect.rank, self._events
        one = self._open.take_part(effect, lambda nodes: self._heads.begin(len(nodes)))
        nbytes = effect.outgoing.nbytes
        first = next(events.numbers)
        events.numbers = count(first + len(members) - 1)
        own = members[rank]
        self._heads.post(
            one.number,
            rank,
            self._open.members(members),
            nbytes,
            events.now,
            first,
            self._ledger.bytes_to[own],
            self._ledger.messages_to[own],
        )
        total = nbytes * (len(members) - 1) if isinstance(nbytes, int) else sum(nbytes)
        total -= 0 if isinstance(nbytes, int) else nbytes[rank]
        self._ledger.tensor_bytes[effect.label] += total
        self._next.schedule(self._heads.next())
        if one.have_all[rank]:
            return self._take(effect, one)
        one.tasks[rank] = task
        task.waiting_for = effect
        return WAITING

    def run_heads(self, at: float, number: int) -> None:
        """Heads are due: those before the next event of another kind."""
        limit = self._next.limit(at, number)
        if limit is None:
            return
        events = self._events
        first = next(events.numbers)
        done, following = self._heads.run(limit, first)
        events.numbers = count(following)
        for at, number, exchange, rank in done:
            events.push_numbered(at, number, EXCHANGED, (self._open.by_number[exchange], rank))
        self._next.schedule(self._heads.next())

    def finish(self, one: Open, rank: int) -> tuple[Task, Sequence[Tensor]] | None:
        """A member has all messages: its program, if that waits for them, and these."""
        one.have_all[rank] = True
        task = one.tasks[rank]
        if task is None:
            return None
        return task, self._take(task.waiting_for, one)

    def clear(self) -> None:
        """The run is over: forgets what is under way."""
        self._heads.clear()
        self._open.clear()
        self._next.clear()

    def _take(self, effect: Exchange, one: Open) -> Sequence[Tensor]:
        received: Sequence[Tensor] = one.received(effect.rank)
        self._open.go_on(effect, one)
        return received
