"""Membership as a node sees it: it joins, shows that it is there, and learns who comes and goes.

The scheduler is one too, and keeps the list for the others.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from math import inf

from gradwire.runtime.process.transport import GOODBYE, JOINED, LOST, Arrival
from gradwire.runtime.zeromq import identities
from gradwire.runtime.zeromq import messages as msg
from gradwire.runtime.zeromq.errors import NoMemberError, NotAdmittedError
from gradwire.runtime.zeromq.inbox import Inbox, Letter
from gradwire.runtime.zeromq.link import Out
from gradwire.runtime.zeromq.membership import Registry
from gradwire.runtime.zeromq.place import Place
from gradwire.runtime.zeromq.refusals import Refusal
from gradwire.runtime.zeromq.sockets import check_target
from gradwire.runtime.zeromq.traffic import Traffic
from gradwire.runtime.zeromq.wire import Wire

_MAX_DEPARTED = 1024


class Members(ABC):
    """What both have in common: links to those that are there."""

    def __init__(self, place: Place, wire: Wire, inbox: Inbox) -> None:
        self.gone: set[int] = set()  # lost, or said goodbye
        # By identity: who said goodbye, and the number of that message.
        self.departed: dict[bytes, int] = {}
        self.traffic: Traffic  # made after this
        self._place, self._wire, self._inbox = place, wire, inbox

    def knows(self, node: bytes) -> bool:
        """Whether the node with this identity is a member that we have a link to, or waits to
        join."""
        return node in self.traffic.by_identity

    def change(self, event: msg.Event) -> None:
        """Somebody is lost, or has come."""
        kind, rank, time_s, identity, text = event
        if kind == msg.IS_LOST:
            self.lose(rank, text, time_s)
            return
        is_worker = rank < self._place.num_workers
        if is_worker:
            self.traffic.remove(rank)  # of before
        was_gone = rank in self.gone
        self.gone.discard(rank)
        self._introduce(rank, identity, time_s, text)
        if is_worker or was_gone:
            self._inbox.put(Letter(Arrival(JOINED, rank, time_s=time_s), is_successor=True))

    @abstractmethod
    def _introduce(self, rank: int, identity: bytes, life: float, address: str) -> None:
        """There is a member; we make a link to it if there is to be one."""

    def lose(self, rank: int, reason: str, time_s: float | None = None) -> None:
        if rank not in self.gone:
            self.gone.add(rank)
            self.traffic.remove(rank)
            self._wire.disconnect(rank)
            self._inbox.put(Letter(Arrival(LOST, rank, message=reason, time_s=time_s)))

    def left(self, rank: int) -> None:
        """It said goodbye."""
        link = self.traffic.links.get(rank)
        if rank == self._place.scheduler:  # others may still need it, and it waits for them
            if link is not None:
                link.has_left = True
            return
        self.gone.add(rank)
        if link is not None and link.identity is not None:
            self.departed[link.identity] = link.num_taken
            if len(self.departed) > _MAX_DEPARTED:
                del self.departed[next(iter(self.departed))]
        self.traffic.remove(rank)
        self._wire.disconnect(rank)


class Desk(Members):
    """The scheduler's."""

    def __init__(self, place: Place, wire: Wire, inbox: Inbox, registry: Registry) -> None:
        super().__init__(place, wire, inbox)
        self.registry = registry
        self._start_s = time.monotonic()

    @property
    def is_in(self) -> bool:
        return self.registry.is_complete

    @property
    def waits_for(self) -> str:
        """For whom the job waits until it is complete."""
        return self.registry.missing()

    def knows(self, node: bytes) -> bool:
        return super().knows(node) or self.registry.waits(node)

    def problem(self) -> str:
        return f"the job is not complete: {self.waits_for}"

    def tick(self, now: float) -> None:
        self.registry.check(self.now())
        self._settle()

    def take(self, identity: bytes | None, peer: int, kind: int) -> bool:
        """Whether a message from this member was for us alone."""
        self.registry.heard(peer, self.now())
        if kind == msg.BEAT:
            self._wire.put(identity, peer, self._place.header(msg.BEATEN, peer))
        return kind == msg.BEAT

    def take_hello(self, identity: bytes, hello: msg.Hello, origin: str) -> None:
        """From this host."""
        registry = self.registry
        if hello.identity != identity:
            raise Refusal("source", "a node says that it is another one", msg.CANNOT_JOIN)
        if identities.whose_beats(identity) is not None:  # or it would be taken for that node
            raise Refusal("source", "a hello over a connection for beats", msg.CANNOT_JOIN)
        if hello.role == msg.SERVER:
            try:
                check_target(hello.address)
            except ValueError as error:  # workers would fail over it
                raise Refusal("hello", str(error), msg.CANNOT_JOIN) from None
        problem = registry.hello(hello, self.now(), origin)
        if problem is not None:
            raise Refusal("hello", problem, msg.CANNOT_JOIN)
        self._settle()
        if registry.rank(identity) is None:
            text = registry.waits_for(identity)
            head = self._place.header(msg.WAIT)
            self._wire.put(identity, msg.NOBODY, head, msg.pack_text(text))

    def left(self, rank: int) -> None:
        self.registry.left(rank, self.now())
        super().left(rank)

    def now(self) -> float:
        return time.monotonic() - self._start_s

    def _settle(self) -> None:
        """Tells what has changed."""
        registry, links = self.registry, self.traffic.links
        events, registry.events = registry.events, []
        welcomes, registry.welcomes = registry.welcomes, []
        changed = {event.rank for event in events}
        for rank in welcomes:
            if rank not in links and rank not in changed:
                self._introduce(rank, registry.identity(rank), registry.life(rank), "")
        for event in events:
            self.change(event)
            body = msg.pack_event(event)
            for peer, link in list(links.items()):
                if peer != event.rank:
                    out = Out(msg.EVENT, self._place.rank, peer, body, None, 0.0)
                    self.traffic.post(link, out)
        for rank in welcomes:
            body = msg.pack_welcome(registry.welcome(rank))
            identity = registry.identity(rank)
            self._wire.put(identity, rank, self._place.header(msg.WELCOME), body)

    def _introduce(self, rank: int, identity: bytes, life: float, address: str) -> None:
        if rank in self.traffic.links:  # a server, begun again: it tells what it still knows
            self.traffic.replace(rank, identity)
        else:
            self.traffic.add(rank, identity, life)


class Member(Members):
    """A worker's or a server's. `connect(peer, address)` connects. When it is in it has a rank and
    a `welcome`, and sends beats; it has links to others after `enter`."""

    def __init__(
        self,
        place: Place,
        wire: Wire,
        inbox: Inbox,
        hello: msg.Hello,
        *,
        heartbeat_s: float,
        server_s: float,
        connect: Callable[[int, str], None],
    ) -> None:
        super().__init__(place, wire, inbox)
        self.failure: Exception | None = None
        self.heard = ""  # about why it takes so long to join
        self.welcome: msg.Welcome  # when it is in
        self._hello = hello
        self._heartbeat_s, self._server_s = heartbeat_s, server_s
        self._connect = connect
        self._news_s = -1.0  # events up to this time are known
        self._heard_s = self._tick_s = time.monotonic()
        self._beat_s, self._beaten_s = -inf, inf  # when the last one was sent, and answered

    @property
    def is_in(self) -> bool:
        return self._place.rank >= 0

    @property
    def waits_for(self) -> str:
        """For what, as the scheduler says."""
        return self.heard

    def problem(self) -> str:
        said = self.heard or (
            "it does not answer. Is it running, is this its address, and are the keys the same?"
        )
        return f"this {self._place.role_name} could not join at the scheduler: {said}"

    def say_hello(self) -> None:
        head = self._place.header(msg.HELLO)
        self._wire.put(None, self._place.scheduler, head, msg.pack_hello(self._hello))

    def tick(self, now: float) -> None:
        place = self._place
        if now - self._tick_s > self._heartbeat_s / 2:
            self._heard_s += now - self._tick_s  # it was we who slept
        self._tick_s = now
        if not self.is_in:
            self.say_hello()
            return
        if now - self._beat_s >= self._heartbeat_s / 5 and not place.is_closed:
            self._beat_s, self._beaten_s = now, min(self._beaten_s, now)
            is_answered = now - self._beaten_s < 2 / 5 * self._heartbeat_s
            head = place.header(msg.BEAT, place.scheduler)
            self._wire.beat(place.scheduler, head, is_answered=is_answered)
        if now - self._heard_s > self._server_s:
            reason = f"nothing was heard of the scheduler for {self._server_s:g} s"
            self.lose(place.scheduler, reason)

    def take(self, kind: int, body: bytes) -> bool:
        """Whether a message from the scheduler was for us alone."""
        self._heard_s = time.monotonic()
        if kind == msg.WELCOME:
            self._take_welcome(msg.unpack_welcome(body))
        elif kind == msg.WAIT:
            self.heard = msg.unpack_text(body)
        elif kind == msg.BEATEN:
            self._beaten_s = self._heard_s
        return kind in (msg.WELCOME, msg.WAIT, msg.BEATEN)

    def take_error(self, code: int, text: str) -> bool:
        """The scheduler refuses something; whether that is the end."""
        if code == msg.CANNOT_JOIN and not self.is_in:
            text = f"the scheduler refuses this {self._place.role_name}: {text}"
            self.failure = NotAdmittedError(text)
        elif code == msg.DECLARED_LOST and self.is_in and not self._place.is_closed:
            self.failure = NoMemberError(
                f"rank {self._place.rank} is not in the job any more ({text}). What it does now is "
                "lost; start it again, and it joins as a new one."
            )
        return self.failure is not None

    def take_event(self, event: msg.Event) -> None:
        if event.time_s > self._news_s:
            self._news_s = event.time_s
            self.change(event)

    def _take_welcome(self, welcome: msg.Welcome) -> None:
        place = self._place
        if self.is_in:
            return
        self.welcome = welcome
        place.rank, place.life, self._news_s = welcome.rank, welcome.life, welcome.time_s
        if welcome.heartbeat_s > 0:
            self._heartbeat_s = min(self._heartbeat_s, welcome.heartbeat_s)

    def enter(self) -> None:
        """Makes links to those that were there when it got its rank. Of changes since then it is
        told over the link to the scheduler."""
        place = self._place
        for rank, is_there, has_left, life, time_s, identity, address in self.welcome.entries:
            if rank == place.rank or rank in self.gone:  # the scheduler, lost since then
                continue
            if is_there:
                self._introduce(rank, identity, life, address)
                if place.life > 0 and life > 0 and rank < place.num_workers:
                    self._inbox.put(Letter(Arrival(JOINED, rank, time_s=life)))
                continue
            self.gone.add(rank)
            gone = Arrival(GOODBYE, rank)
            if not has_left:
                reason = "it was lost before this node came"
                gone = Arrival(LOST, rank, message=reason, time_s=time_s)
            self._inbox.put(Letter(gone))

    def _introduce(self, rank: int, identity: bytes, life: float, address: str) -> None:
        place, traffic = self._place, self.traffic
        if rank == place.scheduler:
            traffic.resume(traffic.add(rank, None, 0.0))
        elif place.is_worker and rank >= place.num_workers:
            if rank not in traffic.links:
                traffic.add(rank, None, place.life)
            self._connect(rank, address)
        elif place.is_server and rank < place.num_workers:
            traffic.add(rank, identity, life)
