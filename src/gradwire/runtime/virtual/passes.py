"""Passes as one effect: messages around a ring that no program observes one by one.

What a member's program would do in n - 1 turns is done in C (`kernels/native/passes.c`): send,
receive, and add to what came, which occupies its node for as long as the call would. C handles
these events up to the next one of another kind, or until a member has all its messages; then its
program goes on in that same event. Numbers of events, NICs, bytes and lanes of calls are those of
effects one by one. The sums themselves are formed when the first member has one.
"""

from array import array
from collections.abc import Callable, Hashable
from itertools import count
from typing import Any

import torch
from torch import Tensor

from gradwire.core.exchange import Passed
from gradwire.core.node import Call, Pass
from gradwire.kernels.native.passes import Rings
from gradwire.runtime.interpreter.interpreter import WAITING, Task
from gradwire.runtime.ledger import Ledger
from gradwire.runtime.virtual.events import PASSES, Events
from gradwire.runtime.virtual.open_effects import NextEvent, Open, OpenEffects

# What a call takes in virtual time, known before it is made; None: it is not.
Price = Callable[[Call[Tensor]], float | None]


class Passes:
    """The passes under way on these NICs and nodes.

    `release` evaluates the calls that are held: the lanes of their nodes are taken.
    """

    def __init__(
        self,
        rings: Rings,
        ledger: Ledger,
        events: Events,
        price: Price,
        release: Callable[[], None],
    ) -> None:
        self._rings, self._ledger, self._events = rings, ledger, events
        self._price, self._release = price, release
        self._prices: dict[Hashable, float | None] = {}  # by what a call reads
        self._open = OpenEffects()
        self._next = NextEvent(events, PASSES)
        self._labels: dict[int, str] = {}  # by number in C
        self._adding: set[int] = set()  # those in which calls take time

    def post(self, task: Task, effect: Pass[Any]) -> Any:
        """A member starts; answers at once if all its messages are there."""
        if effect.seconds is None:
            effect.seconds = self._seconds(effect.outgoing)
            if effect.seconds is None:
                return None
        members, rank, events = effect.members, effect.rank, self._events
        shift = (effect.first - rank) % len(members)
        one = self._open.take_part(effect, lambda nodes: self._rings.begin(nodes, shift))
        self._labels[one.number] = effect.label
        if effect.seconds > 0.0:
            self._adding.add(one.number)
            self._release()
        src, dst = members[rank], members[(rank + 1) % len(members)]
        has_all, following = self._rings.post(
            one.number,
            rank,
            effect.outgoing.nbytes,
            effect.seconds,
            events.now,
            next(events.numbers),
            _place(self._ledger.bytes_to[src], dst),
            _place(self._ledger.messages_to[src], dst),
        )
        events.numbers = count(following)
        self._next.schedule(self._rings.next())
        if has_all:
            return self._take(effect, one)
        one.tasks[rank] = task
        task.waiting_for = effect
        return WAITING

    def run(self, at: float, number: int) -> tuple[Task, Any] | None:
        """Events of passes are due: a program that goes on now, and its answer."""
        if self._adding:
            self._release()
        limit = self._next.limit(at, number)
        if limit is None:
            return None
        events = self._events
        done, following = self._rings.run(limit, next(events.numbers))
        events.numbers = count(following)
        self._next.schedule(self._rings.next())
        if done is None:
            return None
        events.now = done.at
        one = self._open.by_number[done.number]
        task = one.tasks[done.rank]
        assert task is not None
        return task, self._take(task.waiting_for, one)

    def clear(self) -> None:
        """The run is over: forgets what is under way."""
        for number in list(self._labels):
            self._end(number)
        self._rings.clear()
        self._open.clear()
        self._next.clear()

    def _seconds(self, outgoing: Passed[Any]) -> float | None:
        """How long each receiver calls `torch.add` for a message."""
        if not outgoing.is_added:
            return 0.0
        own = outgoing.message
        kind = own.shape, own.dtype, own.device
        if kind not in self._prices:
            # Two tensors, of memory that the result does not share.
            self._prices[kind] = self._price(Call(torch.add, (own[:], own[:]), False))
        return self._prices[kind]

    def _take(self, effect: Pass[Any], one: Open) -> Any:
        received = one.received(effect.rank)
        if self._open.go_on(effect, one):
            self._end(one.number)
        return received

    def _end(self, number: int) -> None:
        self._adding.discard(number)
        self._ledger.tensor_bytes[self._labels.pop(number)] += self._rings.end(number)


def _place(row: "array[int]", index: int) -> int:
    """Where an entry of a row is in memory."""
    return row.buffer_info()[0] + row.itemsize * index
