"""Messages on links: what is sent when, taken in, granted, acknowledged and sent again."""

import time
from collections.abc import Callable, Mapping
from math import inf
from typing import Any

from gradwire.runtime.process.transport import ARRIVED, DONE, GOODBYE, Arrival
from gradwire.runtime.zeromq import messages as msg
from gradwire.runtime.zeromq.arrivals import Arrivals
from gradwire.runtime.zeromq.grants import Grants
from gradwire.runtime.zeromq.inbox import Inbox, Letter
from gradwire.runtime.zeromq.link import DUPLICATE, GAP, Link, Out, Part
from gradwire.runtime.zeromq.messages import Header
from gradwire.runtime.zeromq.place import Place
from gradwire.runtime.zeromq.refusals import Refusal
from gradwire.runtime.zeromq.wire import GONE, SENT, Wire

EAGER_NBYTES = 1 << 16  # larger messages are announced
_ACK_S = 0.003  # acknowledgements wait for others, or for a message to travel with, this long
_RETRY_S = 0.001  # when a queue was full


class Traffic:
    """All links of a node. Of events, goodbyes and problems others are told."""

    def __init__(
        self,
        place: Place,
        wire: Wire,
        inbox: Inbox,
        arrivals: Arrivals,
        *,
        is_asked: bool,
        before: Mapping[int, tuple[float, int, int]] | None,
        max_bytes: int,
        max_nbytes: int,
        max_large: int,
        resume_s: float,
        on_event: Callable[[msg.Event], None],
        on_goodbye: Callable[[int], None],
        on_problem: Callable[[int, str], None],
    ) -> None:
        self.links: dict[int, Link] = {}
        self.by_identity: dict[bytes, int] = {}
        self.num_sent_again = 0
        # Whether the caller has waited in `send` for long, where it cannot read: two that wait for
        # each other would wait forever, so what comes now needs no room.
        self.is_stuck = False
        self.max_bytes = max_bytes  # posted to a peer; or come from one and not read
        self._place, self._wire, self._inbox, self._arrivals = place, wire, inbox, arrivals
        self._is_asked = is_asked  # whether the caller says what is acknowledged
        # Of links of which this node had an earlier process. None: it would not say again what
        # that one has said.
        self.before = before
        self._max_nbytes = max_nbytes  # of a message
        self._resume_s = resume_s  # how long an answer may take
        self._on_event, self._on_goodbye, self._on_problem = on_event, on_goodbye, on_problem
        self.clock: Callable[[], float] | None = None  # of who keeps the membership
        # Large messages from and to others.
        self._incoming, self._outgoing = Grants(max_large, resume_s), Grants(max_large, resume_s)
        self._to_retry: dict[Link, None] = {}
        self._to_tell: dict[Link, float] = {}  # who is to be told how far we are, and when
        self._to_answer: dict[Link, None] = {}  # who has resumed, and there was no room to say so

    # Links.

    def add(self, peer: int, identity: bytes | None, life: float) -> Link:
        known = None
        if self.before is not None:
            whose, received, sent = self.before.get(peer, (life, 0, 0))
            known = (received, sent) if whose == life else (0, 0)
        link = self.links[peer] = Link(peer, identity, life, known)
        if identity is not None:
            self.by_identity[identity] = peer
        return link

    def remove(self, peer: int) -> None:
        link = self.links.pop(peer, None)
        if link is None:
            return
        self.down(link)
        link.clear()
        if link.identity is not None:
            self.by_identity.pop(link.identity, None)
        self._to_retry.pop(link, None)
        self._to_tell.pop(link, None)
        self._go_on()

    def replace(self, peer: int, identity: bytes) -> None:
        """Another process is there. What is kept for it, it may still get."""
        link = self.links[peer]
        if link.identity is not None:
            self.by_identity.pop(link.identity, None)
        link.identity = identity
        self.by_identity[identity] = peer
        self.down(link)

    def down(self, link: Link) -> None:
        """Until it is resumed."""
        link.down()
        self._to_answer.pop(link, None)
        self._outgoing.forget(link.peer)
        self._incoming.forget(link.peer)

    def resume(self, link: Link, kind: int = msg.RESUME) -> bool:
        """Tells the peer how far we are, over a new connection; whether that could be sent."""
        there = -1.0 if link.peer_life is None else link.peer_life
        body = msg.pack_resume(msg.Resume(self._place.life, link.is_fresh, there))
        is_said = self._say(link, kind, body, number=link.num_released + 1)
        link.resume_s = time.monotonic() + self._resume_s if is_said else 0.0
        return is_said

    # Out.

    def post(self, link: Link, out: Out) -> None:
        link.post(out)
        self.pump(link)

    def pump(self, link: Link) -> None:
        """Sends what can be sent."""
        self._push(link)
        while (granted := self._outgoing.grant()) is not None:
            peer, number = granted
            self.links[peer].granted = number
            self._push(self.links[peer])

    def _push(self, link: Link) -> None:
        self._to_retry.pop(link, None)
        while link.is_up and (todo := link.to_send) is not None:
            number, out = todo
            if out.nbytes > EAGER_NBYTES and link.granted != number and self._is_paced(link):
                if self._place.is_server:
                    self._outgoing.ask(link.peer, number, out.nbytes, out.priority)
                elif link.announced != number and self._say(
                    link, msg.ANNOUNCE, msg.pack_announce(out.priority), number, out.nbytes
                ):
                    link.announced = number
                return
            nbytes = 0 if out.payload is None else len(out.payload)
            ends = out.src, out.dst
            if not self._put(link, out.kind, number, nbytes, ends, out.body, out.payload):
                return
            link.num_sent = number

    def _is_paced(self, link: Link) -> bool:
        """Between workers and servers."""
        return self._place.scheduler not in (link.peer, self._place.rank)

    def _say(
        self, link: Link, kind: int, body: Part = b"", number: int = 0, nbytes: int = 0
    ) -> bool:
        """A message that is not sent again; whether it could be sent."""
        return self._put(link, kind, number, nbytes, (self._place.rank, link.peer), body)

    def _put(
        self,
        link: Link,
        kind: int,
        number: int,
        nbytes: int,
        ends: tuple[int, int],
        body: Part,
        payload: Part | None = None,
    ) -> bool:
        """With how far we are; whether it could be sent. Otherwise the peer has not been told."""
        counts = link.counts(self.is_stuck)
        head = Header(kind, self._place.job, *ends, number, nbytes, *counts).pack()
        result = self._wire.put(link.identity, link.peer, head, body, payload)
        if result == SENT:
            link.told = counts
            self._to_tell.pop(link, None)
        elif result == GONE:
            self.down(link)
        else:
            self._to_retry[link] = None
        return result == SENT

    # How far we are.

    def owe(self, link: Link, delay_s: float = _ACK_S) -> None:
        """The peer is to be told within this time."""
        due = time.monotonic() + delay_s
        if due < self._to_tell.get(link, inf):
            self._to_tell[link] = due

    def tell(self, link: Link) -> None:
        self._to_tell.pop(link, None)
        if link.is_up and link.told != link.counts(self.is_stuck) and not self._say(link, msg.ACK):
            self.owe(link)

    def hand_over(self) -> Arrival | None:
        """To the caller."""
        while (letter := self._inbox.take()) is not None:
            arrival, link, number, nbytes, era, is_direct, _ = letter
            if link is not None:
                is_message = arrival is not None and arrival.kind in (ARRIVED, DONE)
                link.hand(number, nbytes, era, self._is_asked and is_message and is_direct)
                if self.links.get(link.peer) is link:
                    if nbytes > EAGER_NBYTES:
                        self.tell(link)
                        self._grant()
                    else:
                        self.owe(link)
            if arrival is not None:
                return arrival
        return None

    # Time.

    def do_what_is_due(self, now: float) -> float:
        """When something is due again."""
        due = inf
        if self._to_answer:
            for link in list(self._to_answer):
                self._answer(link)
            if self._to_answer:
                due = now + _RETRY_S
        if self._to_tell:
            for link, when in list(self._to_tell.items()):
                if when <= now:
                    self.tell(link)
                else:
                    due = min(due, when)
        if self._to_retry:
            for link in list(self._to_retry):
                self.pump(link)
            if self._to_retry:
                due = min(due, now + _RETRY_S)
        return due

    def tick(self) -> None:
        """Now and then: whatever was given up because there was no room."""
        self._go_on()
        now = time.monotonic()
        for link in list(self.links.values()):
            if not link.is_up:
                is_ours = link.identity is None and link.peer in self._wire.connected
                if is_ours and now >= link.resume_s:
                    self.resume(link)
            elif link.was_full and link.unread_bytes <= self.max_bytes:
                link.was_full = not self._say(link, msg.AGAIN)

    def _go_on(self) -> None:
        self._grant()
        for link in list(self.links.values()):
            self.pump(link)

    # In.

    def take(self, link: Link, header: Header, parts: list[Any]) -> None:
        kind, peer = header.kind, link.peer
        if kind in (msg.RESUME, msg.RESUMED):
            self._take_resume(link, header, msg.unpack_resume(parts[1].bytes))
            return
        if not link.is_up:
            return  # it waited in a queue while the connection broke; all is said anew
        if not link.heard(header.acknowledged, header.room, header.taken):
            raise Refusal("state", "it acknowledges what it was not sent")
        if self._outgoing.arrived(peer, link.num_taken_there):
            self.pump(link)
        if kind in msg.NUMBERED:
            self._take_numbered(link, header, parts)
        elif kind == msg.AGAIN:
            self.num_sent_again += max(0, link.num_sent - header.taken)
            link.again(header.taken)
            self._outgoing.forget(peer)
            self.pump(link)
        elif kind == msg.ANNOUNCE and self._place.is_server and self._is_paced(link):
            self._take_announce(link, header, msg.unpack_announce(parts[1].bytes))
        elif kind == msg.GRANT and link.identity is None:
            if header.number == link.announced:
                link.granted = header.number
                self.pump(link)
        elif kind != msg.ACK:
            raise Refusal("state", f"kind {kind} is not for a {self._place.role_name}")

    def _take_announce(self, link: Link, header: Header, priority: float) -> None:
        number = header.number
        if header.nbytes > self._max_nbytes:
            raise Refusal("oversized", f"a message of {header.nbytes} bytes is announced")
        if self._incoming.holds(link.peer, number):
            self._say(link, msg.GRANT, number=number)
        elif number > link.num_taken:
            self._incoming.ask(link.peer, number, header.nbytes, priority)
            self._grant()

    def _grant(self) -> None:
        """Lets the next large messages come, but not of who has sent much that nobody has read."""

        def may(peer: int) -> bool:
            return self.is_stuck or self.links[peer].unread_bytes <= self.max_bytes

        while (granted := self._incoming.grant(may)) is not None:
            peer, number = granted
            if not self._say(self.links[peer], msg.GRANT, number=number):
                # It asks again when it is connected again, or told that there is room.
                self._incoming.forget(peer)
                self.links[peer].was_full = True

    def _take_numbered(self, link: Link, header: Header, parts: list[Any]) -> None:
        verdict = link.judge(header.number)
        if verdict == DUPLICATE:
            self.owe(link)
            return
        if verdict == GAP:
            if not link.misses:
                link.misses = True
                link.was_full = not self._say(link, msg.AGAIN)  # then it is told later
            return
        body, payload = parts[1].buffer, parts[2].buffer if len(parts) == 3 else None
        nbytes = len(body) + (0 if payload is None else len(payload))
        is_mine = header.dst == self._place.rank
        target = None if is_mine else self.links.get(header.dst)
        is_full = link.unread_bytes > 2 * self.max_bytes and not self.is_stuck
        if is_full or (target is not None and target.bytes_posted > self.max_bytes):
            link.misses = link.was_full = True
            return
        self.owe(link)
        number, era = link.take(nbytes), link.era
        is_direct = header.src == link.peer
        arrival = None
        try:
            if target is not None:
                self.post(target, Out(msg.DATA, header.src, header.dst, body, payload, 0.0))
            elif is_mine and header.kind == msg.EVENT:
                self._take_event(link, msg.unpack_event(bytes(body)))
            elif is_mine:
                arrival = self._arrivals.make(header, body, payload, number if is_direct else 0)
                if arrival.kind == GOODBYE and self.clock is not None:
                    arrival = arrival._replace(time_s=self.clock())
        finally:  # what is no message has a number all the same
            self._inbox.put(Letter(arrival, link, number, nbytes, era, is_direct))
            if self._incoming.arrived(link.peer, number):
                self._grant()
            if nbytes > EAGER_NBYTES or (arrival is not None and arrival.kind == GOODBYE):
                self.tell(link)
        if arrival is not None and arrival.kind == GOODBYE:
            self._on_goodbye(arrival.src)

    def _take_event(self, link: Link, event: msg.Event) -> None:
        if link.peer != self._place.scheduler:
            raise Refusal("source", f"rank {link.peer} says who is a member")
        if not 0 <= event.rank < self._place.size or event.rank == self._place.rank:
            raise Refusal("malformed", f"an event of rank {event.rank}")
        self._on_event(event)

    def _take_resume(self, link: Link, header: Header, resume: msg.Resume) -> None:
        is_first = header.kind == msg.RESUME
        if is_first != (link.identity is not None):
            raise Refusal("state", "the one that connects resumes, the other one answers")
        self.down(link)
        before = link.num_sent
        knows_us = not is_first or resume.life_there in (-1.0, self._place.life)
        problem = link.resumed(
            header.taken,
            header.number,
            resume.life,
            resume.is_fresh,
            knows_us,
            acknowledged=header.acknowledged,
            room=header.room,
        )
        self.num_sent_again += max(0, before - link.num_sent)
        if problem is None and is_first:
            self._answer(link)
        elif problem is None:
            self._resumed(link)
        elif is_first:
            self.resume(link, msg.RESUMED)  # or it asks again
            raise Refusal("state", problem)
        else:
            self._on_problem(link.peer, problem)

    def _answer(self, link: Link) -> None:
        """Until the peer has the answer it throws away all else, so nothing is sent before."""
        link.is_up = False
        self._to_answer[link] = None
        if self.resume(link, msg.RESUMED):
            del self._to_answer[link]
            link.is_up = True
            self._resumed(link)

    def _resumed(self, link: Link) -> None:
        self.owe(link)  # what has changed since it was told over the new connection
        self._go_on()
