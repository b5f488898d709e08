"""A durable transport: it writes arrivals into the journal before it hands them over.

Below it is a transport that numbers messages, takes each number once, and keeps what it sent until
it is acknowledged. Above it is a program that sends the same messages if it gets the same arrivals
in the same order. So a server that crashed continues from its last state: it gets again what had
arrived since, in the order of the journal, and sends the same answers with the same numbers, of
which its peers drop those they have. Then it gets new arrivals. Nothing that was acknowledged is
lost, nothing counts twice.

- With `is_durable` the journal holds messages and is synced, many at a time, before they are
  acknowledged and handed over. Senders may drop them at once, and the machine may lose its power.
- Otherwise it holds only their order (and small messages), and is written but not synced. Senders
  keep their messages until a state that has them is on disk, and send them again. That survives
  the end of the process, not of the machine. If a worker is lost meanwhile, its messages that no
  state has are lost, too, and a method in which others wait for it may have to stop.

A state is saved when all programs wait and none has an unread message: `snapshot` returns it, or
None if this is not such a moment. Arrivals are handed over one at a time, so that programs wait
again after each: then what is sent depends on their order only, not on how many were there at once.
That takes one program per node, which may look at a clock only by waiting for a message with a
timeout (`recorded` writes down which of these waits timed out).

What is sent to a worker before the program knows that it came back is dropped: it was for the
earlier incarnation, and its numbers are not those of the new one. The resend queue is part of a
state, and sent again after a restart.
"""

import time
from collections import defaultdict, deque
from collections.abc import Callable, Coroutine
from math import inf
from typing import Any, Protocol, TypeVar

import torch

from gradwire.core.node import RecvAny
from gradwire.runtime.durable import journal
from gradwire.runtime.durable.checkpoint import Store
from gradwire.runtime.durable.journal import LINKS, NOT_STORED, TIMED_OUT
from gradwire.runtime.durable.peers import Peers
from gradwire.runtime.durable.recovery import JournalReplay
from gradwire.runtime.durable.resend_queue import ResendQueue
from gradwire.runtime.durable.write_ahead import NUMBERED, WriteAhead
from gradwire.runtime.process.frames import Headers
from gradwire.runtime.process.transport import (
    GOODBYE,
    JOINED,
    LOST,
    Arrival,
    LinkCounts,
    Transport,
    message_nbytes,
)

R = TypeVar("R")
_MAX_GROUP, _MAX_GROUP_NBYTES = 256, 64 << 20  # committed at once
_RETRY_S = 0.25  # after a snapshot was not possible


class NumberedTransport(Transport, Protocol):
    """The transport below. It may be started with the links of an earlier process."""

    @property
    def num_bytes_sent(self) -> int: ...

    def acknowledge(self, src: int, number: int) -> None:
        """A sender need not keep its messages up to this number any more."""
        ...

    def links(self) -> LinkCounts:
        """As of now: messages that were acknowledged count as received."""
        ...

    def outstanding(self) -> dict[int, int]:
        """By peer: how many of the messages to it may not have arrived."""
        ...


def links_of(store: Store) -> LinkCounts:
    """The links as of the end of the journal, with which the transport below is started.

    A number counts as received if the journal holds the message. One that only its sender has must
    be sent again, and so must all after it.
    """
    links: LinkCounts = {} if store.state is None else dict(store.state["links"])
    is_missing: set[int] = set()  # ranks that must send again
    for body in store.bodies:
        arrival = journal.peek(body)
        if arrival.kind == LINKS:
            for rank, (incarnation, received) in arrival.message.items():
                before = links.get(rank)
                if before is None or before[0] != incarnation:  # another one
                    links[rank] = (incarnation, received, 0)
                    is_missing.discard(rank)
                elif rank not in is_missing:
                    links[rank] = (incarnation, max(before[1], received), before[2])
        elif arrival.kind == JOINED and arrival.time_s is not None:
            # What is before it in the journal was sent by its earlier incarnation.
            links[arrival.src] = (arrival.time_s, 0, 0)
            is_missing.discard(arrival.src)
        elif arrival.message is NOT_STORED:
            is_missing.add(arrival.src)
        elif arrival.kind in NUMBERED and arrival.number and arrival.src not in is_missing:
            # If it was gone before its first message was read, nothing else is known of it.
            incarnation, _, sent = links.get(arrival.src, (0.0, 0, 0))
            links[arrival.src] = (incarnation, arrival.number, sent)
    return links


def count_arrivals(store: Store) -> int:
    """The number of arrivals in state and journal."""
    kinds = [journal.peek(body).kind for body in store.bodies]
    before: int = 0 if store.state is None else store.state["num_handed"]
    return before + sum(kind not in (LINKS, TIMED_OUT) for kind in kinds)


class DurableTransport:
    """Between engine and transport. `inner` was started with `links_of(store)`.

    Programs continue from `store.state["state"]`, if there is a state. `is_alone`: no peer will
    send again what the journal does not hold.
    """

    def __init__(
        self,
        inner: NumberedTransport,
        store: Store,
        snapshot: Callable[[], Any],
        *,
        headers: Headers,
        is_durable: bool = True,
        is_alone: bool = False,
        checkpoint_every_s: float = 60.0,
        max_journal_nbytes: int = 1 << 30,
        max_unacknowledged_nbytes: int = 16 << 20,
        device: torch.device | None = None,
    ) -> None:
        self.rank, self.size = inner.rank, inner.size
        self._inner = inner
        self._store = store
        self._snapshot = snapshot
        self._deferred: defaultdict[int, list[Arrival]] = defaultdict(list)
        self._has_handed = False  # an arrival, and `next` was not called since
        self._num_new = 0  # handed over that are not from the journal
        self._ready: deque[Arrival] = deque()  # written down, to be handed over
        before = store.state or {
            "num_handed": 0,
            "incarnations": {},
            "peers": [],
            "resend_queue": [],
        }
        self._peers = Peers(before["incarnations"], before["peers"])
        for body in store.bodies:
            arrival = journal.peek(body)
            if arrival.kind == JOINED:
                self._peers.note_join(arrival)
        self._replay = JournalReplay(
            store.bodies,
            self._from_inner,
            rank=self.rank,
            num_handed=before["num_handed"],
            headers=headers,
            device=device,
            gone=range(self.size) if is_alone else (),
        )
        self._write_ahead = WriteAhead(
            store,
            inner.acknowledge,
            {
                rank: (incarnation, received)
                for rank, (incarnation, received, _) in links_of(store).items()
            },
            rank=self.rank,
            headers=headers,
            is_durable=is_durable,
            every_s=checkpoint_every_s,
            max_nbytes=max_journal_nbytes if is_durable else max_unacknowledged_nbytes,
        )
        store.forget()
        self._resend_queue = ResendQueue(headers, inner.outstanding)
        for message in self._resend_queue.unpacked(before["resend_queue"]):
            self.send(*message)

    @property
    def notices_silence(self) -> bool:
        return bool(getattr(self._inner, "notices_silence", False))

    @property
    def num_bytes_sent(self) -> int:
        return self._inner.num_bytes_sent

    @property
    def is_recovering(self) -> bool:
        """Whether the programs still get what the process before this one had got."""
        return not self._replay.is_over

    # Transport.

    def send(self, dst: int, job: int, tag: int, message: Any) -> None:
        link = self._inner.links().get(dst)
        if self._peers.is_meant(dst, None if link is None else link[0]):
            self._write_ahead.commit()
            self._inner.send(dst, job, tag, message)
            self._resend_queue.add(dst, job, tag, message)

    def send_done(self, dst: int, job: int, number: int) -> None:
        raise NotImplementedError("a durable node is a server, whose runs end with the workers'")

    def defer(self, arrival: Arrival) -> None:
        self._deferred[arrival.job].append(arrival)

    def deferred(self, job: int) -> list[Arrival]:
        return [*self._deferred.pop(job, []), *self._peers.endings]

    def next(self, timeout_s: float | None) -> Arrival | None:
        if self._has_handed:
            self._has_handed = False
            if timeout_s == 0:
                return None
        arrival = self._next_replayed(timeout_s) if self.is_recovering else None
        if arrival is None and not self.is_recovering and self._take(timeout_s):
            arrival = self._ready.popleft()
            self._num_new += 1
        if arrival is None:
            return None
        self._has_handed = True
        self._peers.note_handed(arrival)
        if arrival.kind in (JOINED, LOST, GOODBYE):
            self._resend_queue.drop(arrival.src)  # for its earlier incarnation
        return arrival

    def close(self) -> None:
        """Saves a last state, if that is possible now, and closes the store."""
        try:
            self.checkpoint()
        finally:
            self._store.close()

    # Recovery.

    def _next_replayed(self, timeout_s: float | None) -> Arrival | None:
        replayed = self._replay.next(timeout_s)
        if replayed is None:
            return None
        if replayed.is_sent_again:
            self._write_ahead.owe(replayed.arrival)
        return replayed.arrival

    @property
    def num_handed(self) -> int:
        """How many arrivals were handed over, by this process and those before it."""
        return self._replay.num_handed + self._num_new

    async def recorded(self, program: Coroutine[Any, Any, R]) -> R:
        """Runs a program, and writes its waits that time out into the journal."""
        value: Any = None
        failure: Exception | None = None
        try:
            while True:
                try:
                    effect = program.send(value) if failure is None else program.throw(failure)
                except StopIteration as end:
                    result: R = end.value
                    return result
                value = failure = None
                try:
                    if isinstance(effect, RecvAny) and effect.timeout_s is not None:
                        value = await self._wait(effect)
                    else:
                        value = await effect
                except Exception as error:
                    failure = error
        finally:
            program.close()

    async def _wait(self, effect: RecvAny[Any]) -> Any:
        found: Any
        while self.is_recovering:
            found = await RecvAny(effect.tag, 0.0)
            if found is not None:
                return found
            if self._replay.times_out():
                return None
            if self.is_recovering:  # for a message that must be sent again
                found = await RecvAny(effect.tag, 0.01)
                if found is not None:
                    return found
        found = await effect
        if found is None:
            # It is in the journal before anything is sent because of it.
            self._write_ahead.write_timeout(self.num_handed)
        return found

    # New arrivals.

    def _take(self, timeout_s: float | None) -> bool:
        """Writes down what has arrived; whether there is something to hand over."""
        if self._ready:
            return True
        limit = inf if timeout_s is None else time.monotonic() + timeout_s
        while True:
            was_saved = not self._write_ahead.is_due(self._peers.ended) or self.checkpoint()
            if not was_saved and timeout_s == 0:
                return False  # so that programs wait again
            left = max(0.0, limit - time.monotonic())
            pause = self._write_ahead.due_in_s if was_saved else _RETRY_S
            first = self._new(min(left, pause))
            if first is not None:
                break
            if left <= pause:
                return False
        group, nbytes = [first], message_nbytes(first.message)
        while len(group) < _MAX_GROUP and nbytes < _MAX_GROUP_NBYTES:
            more = self._new(0.0)
            if more is None:
                break
            group.append(more)
            nbytes += message_nbytes(more.message)
        for arrival in group:
            if arrival.kind == JOINED:
                self._peers.note_join(arrival)
        incarnations = {
            rank: incarnation for rank, (incarnation, _, _) in self._inner.links().items()
        }
        self._write_ahead.write(group, incarnations)
        self._ready.extend(group)
        return True

    def _new(self, timeout_s: float) -> Arrival | None:
        early = self._replay.take_early()
        if early is not None:
            return early
        return self._from_inner(None if timeout_s == inf else timeout_s)

    def _from_inner(self, timeout_s: float | None) -> Arrival | None:
        while True:
            arrival = self._inner.next(timeout_s)
            # A transport that is started again reports once more that a peer has joined.
            if arrival is None or not self._peers.is_known(arrival):
                return arrival

    # States.

    def checkpoint(self) -> bool:
        """Saves a state if that is possible now, and starts a new journal; whether it was."""
        is_busy = self.is_recovering or self._ready or self._replay.has_early
        if is_busy or any(self._deferred.values()):
            return False
        state = self._snapshot()
        if state is None:
            return False
        began_s = time.monotonic()
        links = self._inner.links()
        self._resend_queue.forget_received()
        links = {
            rank: (
                incarnation,
                self._write_ahead.last_number(rank, received),
                sent - self._resend_queue.num_to(rank),
            )
            for rank, (incarnation, received, sent) in links.items()
        }
        self._store.save(
            {
                "state": state,
                "links": links,
                "incarnations": self._peers.incarnations,
                "peers": [tuple(ending) for ending in self._peers.endings],
                "resend_queue": self._resend_queue.packed(sorted(links)),
                "num_handed": self.num_handed,
            }
        )
        acknowledged = {
            rank: (incarnation, received) for rank, (incarnation, received, _) in links.items()
        }
        self._write_ahead.note_saved(acknowledged, time.monotonic() - began_s)
        return True
