"""Servers that survive a crash: a transport that writes down what arrives before it hands it over.

Under it lies a transport that numbers messages, takes each number once, and keeps what it sent
until it is acknowledged. Above it is a program that does the same if it is told the same in the
same order. So a server that crashed goes on from its last state: it is told again what had arrived
since, in the order of the journal, sends the same answers with the same numbers, of which its peers
drop those they have, and then hears what is new. Nothing that was acknowledged is lost, nothing
counts twice.

- `is_durable`: the journal holds messages and is synced, many at a time, before they are
  acknowledged and handed over. Senders may forget them at once, and the machine may lose its power.
- Otherwise it holds only the order in which they came (and small ones), and is written but not
  synced. Senders keep their messages until a state that has them is on disk, and send them again.
  That survives the end of the process, not of the machine; and what a worker that is lost meanwhile
  had sent is lost with it.

A state is saved when all programs wait and none has a message unread: `snapshot` returns it, or
None if it is no good moment. Arrivals are handed over one at a time, so that programs come to rest
after each: then what is sent depends on their order only, not on how many were there at once. That
takes one program per node, whose only way to look at a clock is to wait for a message with a
timeout (`recorded` writes down which of these waits were in vain).

What is sent to a worker before the program hears that it came back is dropped: it was for who the
worker was before, and its numbers are not those of the new one. What was sent and may not have been
received when a state is saved is part of it, and sent again.

Its parts: what is told again (retelling.py), what is written down and acknowledged
(write_ahead.py), what may have to be sent again (outbox.py), who came and who is gone (peers.py).
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
from gradwire.runtime.durable.journal import LINKS, NOT_KEPT, TIMED_OUT
from gradwire.runtime.durable.outbox import Outbox
from gradwire.runtime.durable.peers import Peers
from gradwire.runtime.durable.recovery import Retelling
from gradwire.runtime.durable.write_ahead import NUMBERED, WriteAhead
from gradwire.runtime.process.frames import Headers
from gradwire.runtime.process.transport import (
    GOODBYE,
    JOINED,
    LOST,
    Arrival,
    Transport,
    message_nbytes,
)

R = TypeVar("R")
Links = dict[int, tuple[float, int, int]]  # rank -> its life, numbers received and sent
_MAX_GROUP, _MAX_GROUP_NBYTES = 256, 64 << 20  # committed at once
_RETRY_S = 0.25  # after a moment that was no good for a snapshot


class NumberedTransport(Transport, Protocol):
    """What lies under it. It may be begun with the links of an earlier process."""

    @property
    def num_bytes_sent(self) -> int: ...

    def acknowledge(self, src: int, number: int) -> None:
        """Tells a sender that it need not keep its messages up to this number."""
        ...

    def links(self) -> Links:
        """By peer: its life, how many messages of it are acknowledged, how many were sent to it."""
        ...

    def outstanding(self) -> dict[int, int]:
        """By peer: how many of the messages that were sent to it it may not have."""
        ...


def links_of(store: Store) -> Links:
    """What to begin the transport with: the links as of the end of the journal.

    A number counts as received if the journal holds the message. One that only its sender has must
    come again, and so must all after it.
    """
    links: Links = {} if store.state is None else dict(store.state["links"])
    is_missing: set[int] = set()  # of whom something must come again
    for body in store.bodies:
        arrival = journal.glance(body)
        if arrival.kind == LINKS:
            for rank, (life, received) in arrival.message.items():
                before = links.get(rank)
                if before is None or before[0] != life:  # another one
                    links[rank] = (life, received, 0)
                    is_missing.discard(rank)
                elif rank not in is_missing:
                    links[rank] = (life, max(before[1], received), before[2])
        elif arrival.kind == JOINED and arrival.time_s is not None:
            # What is before it in the journal was sent by who it was before.
            links[arrival.src] = (arrival.time_s, 0, 0)
            is_missing.discard(arrival.src)
        elif arrival.message is NOT_KEPT:
            is_missing.add(arrival.src)
        elif arrival.kind in NUMBERED and arrival.number and arrival.src not in is_missing:
            # Of one that was gone before its first message was read nothing else is known.
            life, _, sent = links.get(arrival.src, (0.0, 0, 0))
            links[arrival.src] = (life, arrival.number, sent)
    return links


def num_heard(store: Store) -> int:
    """How many arrivals state and journal have."""
    kinds = [journal.glance(body).kind for body in store.bodies]
    before: int = 0 if store.state is None else store.state["num_handed"]
    return before + sum(kind not in (LINKS, TIMED_OUT) for kind in kinds)


class DurableTransport:
    """Between engine and transport. `inner` was begun with `links_of(store)`.

    What the programs are to go on from is `store.state["state"]`, if there is a state. `is_alone`:
    nobody will send again what the journal does not hold.
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
        self._kept: defaultdict[int, list[Arrival]] = defaultdict(list)
        self._has_handed = False  # one, and nobody has asked since
        self._num_new = 0  # handed over that were not told again
        self._ready: deque[Arrival] = deque()  # written down, to be handed over
        before = store.state or {"num_handed": 0, "lives": {}, "peers": [], "outbox": []}
        self._peers = Peers(before["lives"], before["peers"])
        for body in store.bodies:
            arrival = journal.glance(body)
            if arrival.kind == JOINED:
                self._peers.comes(arrival)
        self._retelling = Retelling(
            store.bodies,
            self._from_inner,
            rank=self.rank,
            num_told=before["num_handed"],
            headers=headers,
            device=device,
            gone=range(self.size) if is_alone else (),
        )
        self._write_ahead = WriteAhead(
            store,
            inner.acknowledge,
            {rank: (life, received) for rank, (life, received, _) in links_of(store).items()},
            rank=self.rank,
            headers=headers,
            is_durable=is_durable,
            every_s=checkpoint_every_s,
            max_nbytes=max_journal_nbytes if is_durable else max_unacknowledged_nbytes,
        )
        store.forget()
        self._outbox = Outbox(headers, inner.outstanding)
        for message in self._outbox.unpacked(before["outbox"]):
            self.send(*message)

    @property
    def notices_silence(self) -> bool:
        return bool(getattr(self._inner, "notices_silence", False))

    @property
    def num_bytes_sent(self) -> int:
        return self._inner.num_bytes_sent

    @property
    def is_told_again(self) -> bool:
        """Whether the programs hear what they, or those before them, have heard already."""
        return not self._retelling.is_over

    # Transport.

    def send(self, dst: int, job: int, tag: int, message: Any) -> None:
        link = self._inner.links().get(dst)
        if self._peers.is_meant(dst, None if link is None else link[0]):
            self._write_ahead.commit()
            self._inner.send(dst, job, tag, message)
            self._outbox.add(dst, job, tag, message)

    def send_done(self, dst: int, job: int, number: int) -> None:
        raise NotImplementedError("a durable node is a server, whose runs end with the workers'")

    def keep(self, arrival: Arrival) -> None:
        self._kept[arrival.job].append(arrival)

    def kept(self, job: int) -> list[Arrival]:
        return [*self._kept.pop(job, []), *self._peers.endings]

    def next(self, timeout_s: float | None) -> Arrival | None:
        if self._has_handed:
            self._has_handed = False
            if timeout_s == 0:
                return None
        arrival = self._told_again(timeout_s) if self.is_told_again else None
        if arrival is None and not self.is_told_again and self._take(timeout_s):
            arrival = self._ready.popleft()
            self._num_new += 1
        if arrival is None:
            return None
        self._has_handed = True
        self._peers.told(arrival)
        if arrival.kind in (JOINED, LOST, GOODBYE):
            self._outbox.drop(arrival.src)  # what was for who it was before
        return arrival

    def close(self) -> None:
        """Saves a last state, if the moment is good, and closes the store."""
        try:
            self.checkpoint()
        finally:
            self._store.close()

    # What is told again.

    def _told_again(self, timeout_s: float | None) -> Arrival | None:
        told = self._retelling.next(timeout_s)
        if told is None:
            return None
        if told.is_sent_again:
            self._write_ahead.owe(told.arrival)
        return told.arrival

    @property
    def num_handed(self) -> int:
        """How many arrivals were handed over, by this process and those before."""
        return self._retelling.num_told + self._num_new

    async def recorded(self, program: Coroutine[Any, Any, R]) -> R:
        """Runs a program. Its waits that time out are in the journal as well."""
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
        while self.is_told_again:
            found = await RecvAny(effect.tag, 0.0)
            if found is not None:
                return found
            if self._retelling.times_out():
                return None
            if self.is_told_again:  # for what must be sent again
                found = await RecvAny(effect.tag, 0.01)
                if found is not None:
                    return found
        found = await effect
        if found is None:
            # It is in the journal before anything is sent because of it.
            self._write_ahead.write_timeout(self.num_handed)
        return found

    # What is new.

    def _take(self, timeout_s: float | None) -> bool:
        """Whether there is something to hand over; takes what has arrived and writes it down."""
        if self._ready:
            return True
        limit = inf if timeout_s is None else time.monotonic() + timeout_s
        while True:
            was_saved = not self._write_ahead.is_due(self._peers.ended) or self.checkpoint()
            if not was_saved and timeout_s == 0:
                return False  # so that programs come to rest
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
                self._peers.comes(arrival)
        lives = {rank: life for rank, (life, _, _) in self._inner.links().items()}
        self._write_ahead.write(group, lives)
        self._ready.extend(group)
        return True

    def _new(self, timeout_s: float) -> Arrival | None:
        early = self._retelling.take_early()
        if early is not None:
            return early
        return self._from_inner(None if timeout_s == inf else timeout_s)

    def _from_inner(self, timeout_s: float | None) -> Arrival | None:
        while True:
            arrival = self._inner.next(timeout_s)
            # That somebody is there is told again to a transport that begins again.
            if arrival is None or not self._peers.is_known(arrival):
                return arrival

    # States.

    def checkpoint(self) -> bool:
        """Saves a state if this is a good moment, and begins a new journal; whether it was."""
        is_telling = self.is_told_again or self._ready or self._retelling.has_early
        if is_telling or any(self._kept.values()):
            return False
        state = self._snapshot()
        if state is None:
            return False
        began_s = time.monotonic()
        links = self._inner.links()
        self._outbox.forget_received()
        links = {
            rank: (
                life,
                self._write_ahead.last_number(rank, received),
                sent - self._outbox.num_to(rank),
            )
            for rank, (life, received, sent) in links.items()
        }
        self._store.save(
            {
                "state": state,
                "links": links,
                "lives": self._peers.lives,
                "peers": [tuple(ending) for ending in self._peers.endings],
                "outbox": self._outbox.packed(sorted(links)),
                "num_handed": self.num_handed,
            }
        )
        noted = {rank: (life, received) for rank, (life, received, _) in links.items()}
        self._write_ahead.saved(noted, time.monotonic() - began_s)
        return True
