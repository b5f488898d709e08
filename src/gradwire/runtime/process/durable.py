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
"""

import logging
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Coroutine
from itertools import count
from math import inf
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from gradwire.core.node import Framed, RecvAny
from gradwire.runtime.process import journal
from gradwire.runtime.process.checkpoint import Store
from gradwire.runtime.process.frames import Headers
from gradwire.runtime.process.journal import LINKS, NOT_KEPT, TIMED_OUT
from gradwire.runtime.process.transport import (
    ARRIVED,
    DONE,
    GOODBYE,
    JOINED,
    LOST,
    Arrival,
    Transport,
)

R = TypeVar("R")
Links = dict[int, tuple[float, int, int]]  # rank -> its life, numbers received and sent
# Job, tag, is it framed, header, data. The header's bytes are text, as weights_only has no bytes.
Sent = tuple[int, int, bool, str, Tensor | None]
_NUMBERED = (ARRIVED, DONE)
_SMALL_NBYTES = 256  # what the journal holds in any case
_MAX_GROUP, _MAX_GROUP_NBYTES = 256, 64 << 20  # committed at once
_MIN_SENT = 16  # remembered before it is asked which were received
_IDLE_S = 0.5  # after which what is not acknowledged is saved
_RETRY_S = 0.25  # after a moment that was no good for a snapshot

_log = logging.getLogger(__name__)


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
        elif arrival.kind in _NUMBERED and arrival.number and arrival.src not in is_missing:
            life, _, sent = links[arrival.src]
            links[arrival.src] = (life, arrival.number, sent)
    return links


class DurableTransport:
    """Between engine and transport. `inner` was begun with `links_of(store)`.

    What the programs are to go on from is `store.state["state"]`, if there is a state.
    """

    def __init__(
        self,
        inner: NumberedTransport,
        store: Store,
        snapshot: Callable[[], Any],
        *,
        headers: Headers,
        is_durable: bool = True,
        checkpoint_every_s: float = 60.0,
        max_journal_nbytes: int = 1 << 30,
        max_unacknowledged_nbytes: int = 16 << 20,
        device: torch.device | None = None,
    ) -> None:
        self.rank, self.size = inner.rank, inner.size
        self._inner = inner
        self._store = store
        self._snapshot = snapshot
        self._headers = headers
        self._is_durable = is_durable
        self._every_s = checkpoint_every_s
        self._max_nbytes = max_journal_nbytes if is_durable else max_unacknowledged_nbytes
        self._device = device
        self._saved_s = self._came_s = time.monotonic()
        self._save_s = 0.0  # how long it took
        # What is not acknowledged, as only its sender has it: the last number of each, all bytes.
        self._unacknowledged: dict[int, int] = {}
        self._nbytes = 0
        self._is_urgent = False  # a state is due at the next good moment
        # Of each peer that has left or is lost, and that is done: told to every new engine.
        self._ended: dict[int, Arrival] = {}
        self._done: dict[int, Arrival] = {}
        self._kept: defaultdict[int, list[Arrival]] = defaultdict(list)
        self._has_handed = False  # one, and nobody has asked since
        self._num_handed = 0  # by this process and those before
        self._lives: dict[int, float] = {}  # of those that came (back); of others 0
        self._sent: defaultdict[int, deque[Sent]] = defaultdict(deque)  # perhaps not received
        self._num_outstanding: Counter[int] = Counter()  # when last asked
        self._ready: deque[Arrival] = deque()  # written down, to be handed over
        self._joining: Counter[int] = Counter()  # how often each comes in what is to be handed over
        # What an earlier process had been told.
        self._script: deque[memoryview] = deque()
        self._timeouts: deque[int] = deque()  # after how many arrivals a wait had timed out
        self._early: dict[tuple[int, int], Arrival] = {}  # what came while it is told again
        self._count = count()  # of those among them that have no number
        self._gone: set[int] = set()  # who will not send again
        outbox: list[tuple[int, Sent]] = []
        if store.state is not None:
            self._num_handed = store.state["num_handed"]
            self._lives = dict(store.state["lives"])
            outbox = store.state["outbox"]
            for fields in store.state["peers"]:
                self._note(Arrival(*fields))
        # Of each peer: its life, and up to which number all is acknowledged; in the journal.
        self._noted: dict[int, tuple[float, int]] = {
            rank: (life, received) for rank, (life, received, _) in links_of(store).items()
        }
        self._last_joined: dict[int, int] = {}  # place in the script
        for body in store.bodies:
            arrival = journal.glance(body)
            if arrival.kind == TIMED_OUT:
                self._timeouts.append(arrival.number)
            elif arrival.kind != LINKS:
                if arrival.kind == JOINED:
                    self._comes(arrival)
                    self._last_joined[arrival.src] = len(self._script)
                self._script.append(body)
        self._place = 0
        if store.bodies:
            _log.info("rank %d: told again %d arrivals", self.rank, len(self._script))
        store.forget()
        for dst, (job, tag, is_framed, header, data) in outbox:
            message = Framed(headers.decode(header.encode("latin-1")), data) if is_framed else data
            self.send(dst, job, tag, message)

    @property
    def num_bytes_sent(self) -> int:
        return self._inner.num_bytes_sent

    @property
    def is_told_again(self) -> bool:
        """Whether the programs hear what they, or those before them, have heard already."""
        return bool(self._script or self._timeouts)

    # Transport.

    def send(self, dst: int, job: int, tag: int, message: Any) -> None:
        if self._may_send(dst):
            self._inner.send(dst, job, tag, message)
            self._remember(dst, job, tag, message)

    def send_done(self, dst: int, job: int, number: int) -> None:
        raise NotImplementedError("a durable node is a server, whose runs end with the workers'")

    def keep(self, arrival: Arrival) -> None:
        self._kept[arrival.job].append(arrival)

    def kept(self, job: int) -> list[Arrival]:
        return [*self._kept.pop(job, []), *self._done.values(), *self._ended.values()]

    def next(self, timeout_s: float | None) -> Arrival | None:
        if self._has_handed:
            self._has_handed = False
            if timeout_s == 0:
                return None
        arrival = self._told_again(timeout_s) if self.is_told_again else None
        if arrival is None and not self.is_told_again and self._take(timeout_s):
            arrival = self._ready.popleft()
        if arrival is None:
            return None
        self._has_handed = True
        self._num_handed += 1
        self._note(arrival)
        if arrival.kind == JOINED:
            self._joining[arrival.src] -= 1
        return arrival

    def close(self) -> None:
        """Saves a last state, if the moment is good, and closes the store."""
        self.checkpoint()
        self._store.close()

    # What is told again.

    def _told_again(self, timeout_s: float | None) -> Arrival | None:
        """The next arrival of the journal; None also where a wait timed out at this point."""
        limit = None if timeout_s is None else time.monotonic() + timeout_s
        while self._script and not self._times_out:
            body = self._script[0]
            arrival = journal.glance(body)
            if arrival.message is not NOT_KEPT:
                self._turn()
                return journal.decode(body, self._headers, self._device)
            is_before = self._place < self._last_joined.get(arrival.src, -1)
            key = (arrival.src, arrival.number)
            if not is_before and key in self._early:
                self._turn()
                again = self._early.pop(key)
                self._owe(again)
                return again
            if is_before or arrival.src in self._gone:
                _log.warning("rank %d: message %d of %d is gone with it", self.rank, *key[::-1])
                self._turn()
                self._num_handed += 1
                continue
            left = None if limit is None else max(0.0, limit - time.monotonic())
            came = self._from_inner(left)
            if came is None:
                return None
            if came.kind in _NUMBERED and came.number:
                self._early[came.src, came.number] = came
            else:
                self._early[-1, next(self._count)] = came
                if came.kind in (LOST, GOODBYE, JOINED):
                    self._gone.add(came.src)
        return None

    @property
    def _times_out(self) -> bool:
        """Whether the program has heard all that it had before a wait timed out."""
        return bool(self._timeouts) and self._timeouts[0] <= self._num_handed

    def _turn(self) -> None:
        self._script.popleft()
        self._place += 1

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
            if self._times_out:
                self._timeouts.popleft()
                return None
            if self.is_told_again:  # for what must be sent again
                found = await RecvAny(effect.tag, 0.01)
                if found is not None:
                    return found
        found = await effect
        if found is None:
            # It is in the journal before anything is sent because of it.
            self._append(Arrival(TIMED_OUT, self.rank, number=self._num_handed))
        return found

    # What is new.

    def _take(self, timeout_s: float | None) -> bool:
        """Whether there is something to hand over; takes what has arrived and writes it down."""
        if self._ready:
            return True
        limit = inf if timeout_s is None else time.monotonic() + timeout_s
        while True:
            was_saved = not self._is_due or self.checkpoint()
            if not was_saved and timeout_s == 0:
                return False  # so that programs come to rest
            left = max(0.0, limit - time.monotonic())
            pause = self._due_in_s if was_saved else _RETRY_S
            first = self._new(min(left, pause))
            if first is not None:
                break
            if left <= pause:
                return False
        group, nbytes = [first], _nbytes(first)
        while len(group) < _MAX_GROUP and nbytes < _MAX_GROUP_NBYTES:
            more = self._new(0.0)
            if more is None:
                break
            group.append(more)
            nbytes += _nbytes(more)
        self._write(group)
        self._came_s = time.monotonic()
        self._ready.extend(group)
        return True

    def _new(self, timeout_s: float) -> Arrival | None:
        if self._early:
            return self._early.pop(next(iter(self._early)))
        return self._from_inner(None if timeout_s == inf else timeout_s)

    def _from_inner(self, timeout_s: float | None) -> Arrival | None:
        while True:
            arrival = self._inner.next(timeout_s)
            # That somebody is there is told again to a transport that begins again.
            is_known = (
                arrival is not None
                and arrival.kind == JOINED
                and arrival.time_s is not None
                and self._lives.get(arrival.src) == arrival.time_s
            )
            if not is_known:
                return arrival

    def _comes(self, arrival: Arrival) -> None:
        self._joining[arrival.src] += 1
        if self._unacknowledged.pop(arrival.src, None) is not None:
            self._is_urgent = True  # who it was before will not send again; its numbers are over
        if arrival.time_s is not None:
            self._lives[arrival.src] = arrival.time_s

    def _write(self, group: list[Arrival]) -> None:
        links = self._inner.links()
        # Before the first message of a new life, of which nothing has been received.
        fresh = {
            rank: (life, 0)
            for rank, (life, _, _) in links.items()
            if self._noted.get(rank, (None, 0))[0] != life
        }
        if fresh:
            self._note_links(fresh)
        for arrival in group:
            is_small = _nbytes(arrival) <= _SMALL_NBYTES and arrival.src not in self._unacknowledged
            is_whole = self._is_durable or is_small or arrival.kind not in _NUMBERED
            self._append(arrival, is_whole)
            if arrival.kind == JOINED:
                self._comes(arrival)
            if not is_whole:
                self._owe(arrival)
        self._commit()
        for arrival in group:
            numbers = self._unacknowledged.get(arrival.src)
            if arrival.kind in _NUMBERED and arrival.number and numbers is None:
                self._inner.acknowledge(arrival.src, arrival.number)

    def _note_links(self, links: dict[int, tuple[float, int]]) -> None:
        self._noted |= links
        self._append(Arrival(LINKS, self.rank, message=links))

    def _append(self, arrival: Arrival, is_whole: bool = True) -> None:
        self._store.journal.append(journal.encode(arrival, self._headers, is_whole))

    def _commit(self) -> None:
        if self._is_durable:
            self._store.journal.commit()
        else:
            self._store.journal.write()

    def _owe(self, arrival: Arrival) -> None:
        """It is to be acknowledged when a state has it."""
        self._unacknowledged[arrival.src] = arrival.number
        self._nbytes += _nbytes(arrival)

    def _may_send(self, dst: int) -> bool:
        link = self._inner.links().get(dst)
        if self._joining[dst] or (link is not None and link[0] != self._lives.get(dst, 0.0)):
            return False
        self._commit()
        return True

    def _remember(self, dst: int, job: int, tag: int, message: Any) -> None:
        is_framed = isinstance(message, Framed)
        data = message.data if is_framed else message
        header = self._headers.encode(message.header) if is_framed else b""
        self._sent[dst].append((job, tag, is_framed, header.decode("latin-1"), data))
        if len(self._sent[dst]) >= 2 * max(_MIN_SENT, self._num_outstanding[dst]):
            self._forget_received()

    def _forget_received(self) -> None:
        self._num_outstanding = Counter(self._inner.outstanding())
        for dst, sent in self._sent.items():
            while len(sent) > self._num_outstanding[dst]:
                sent.popleft()

    # States.

    def checkpoint(self) -> bool:
        """Saves a state if this is a good moment, and begins a new journal; whether it was."""
        is_telling = self.is_told_again or self._ready or self._early
        if is_telling or any(self._kept.values()):
            return False
        state = self._snapshot()
        if state is None:
            return False
        began_s = time.monotonic()
        links = self._inner.links()
        self._forget_received()
        links = {
            rank: (life, self._unacknowledged.get(rank, received), sent - len(self._sent[rank]))
            for rank, (life, received, sent) in links.items()
        }
        peers = [tuple(a) for a in (*self._done.values(), *self._ended.values())]
        self._store.save(
            {
                "state": state,
                "links": links,
                "lives": self._lives,
                "peers": peers,
                "outbox": [(dst, one) for dst in sorted(links) for one in self._sent[dst]],
                "num_handed": self._num_handed,
            }
        )
        self._noted = {rank: (life, received) for rank, (life, received, _) in links.items()}
        self._saved_s = time.monotonic()
        self._save_s = self._saved_s - began_s
        for src, last in self._unacknowledged.items():
            self._inner.acknowledge(src, last)
        self._unacknowledged.clear()
        self._nbytes = 0
        self._is_urgent = False
        return True

    @property
    def _is_due(self) -> bool:
        nbytes = self._store.journal.nbytes
        if not nbytes:
            return False
        if self._is_urgent or not self._unacknowledged.keys().isdisjoint(self._ended):
            return True  # it will not send again
        return self._due_in_s <= 0 or max(self._nbytes, nbytes) > self._max_nbytes

    @property
    def _due_in_s(self) -> float:
        if not self._store.journal.nbytes:
            return inf
        due_s = self._saved_s + self._every_s
        if self._unacknowledged:  # senders may wait until they may forget something
            due_s = min(due_s, max(self._came_s + _IDLE_S, self._saved_s + 10 * self._save_s))
        return max(0.0, due_s - time.monotonic())

    def _note(self, arrival: Arrival) -> None:
        """Keeps what an engine must know that begins later."""
        kind, src = arrival.kind, arrival.src
        if kind in (JOINED, LOST, GOODBYE):
            self._sent.pop(src, None)  # what was for who it was before
        if kind == JOINED:
            self._ended.pop(src, None)
            self._done.pop(src, None)
        elif kind in (LOST, GOODBYE):
            self._ended[src] = arrival
        elif kind == DONE:
            self._done[src] = arrival


def _nbytes(arrival: Arrival) -> int:
    message = arrival.message
    data = message.data if isinstance(message, Framed) else message
    return data.numel() * data.element_size() if isinstance(data, Tensor) else 0
