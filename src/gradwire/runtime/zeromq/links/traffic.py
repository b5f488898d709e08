"""Moves messages on all links of a node: sends, takes, grants, acknowledges and sends again.

Large messages between workers and servers are announced and go when they are granted (grants.py).
Of each peer at most `max_bytes` are posted and not acknowledged, and as many are unread: a message
is acknowledged when it is handed over. While the caller has waited in `send` for a second without
progress (`is_stuck`), messages of others are accepted without that limit, to avoid deadlock.
"""

import time
from collections.abc import Callable
from math import inf
from typing import Any

from gradwire.runtime.process.transport import ARRIVED, DONE, GOODBYE, Arrival, LinkCounts
from gradwire.runtime.zeromq import messages as msg
from gradwire.runtime.zeromq.connections.wire import GONE, SENT, Wire
from gradwire.runtime.zeromq.errors import Refusal
from gradwire.runtime.zeromq.links.arrival_decoder import ArrivalDecoder
from gradwire.runtime.zeromq.links.grants import Grants
from gradwire.runtime.zeromq.links.inbox import Delivery, Inbox
from gradwire.runtime.zeromq.links.link import DUPLICATE, GAP, Link, OutgoingMessage
from gradwire.runtime.zeromq.local_node import LocalNode
from gradwire.runtime.zeromq.messages import Header, Part

EAGER_NBYTES = 1 << 16  # larger messages are announced
_ACK_S = 0.003  # acknowledgements wait for others, or for a message to travel with, this long
_RETRY_S = 0.001  # when a queue was full


class Traffic:
    """All links of a node. Membership events, goodbyes and problems go to callbacks."""

    def __init__(
        self,
        local: LocalNode,
        wire: Wire,
        inbox: Inbox,
        decoder: ArrivalDecoder,
        *,
        caller_acknowledges: bool,
        before: LinkCounts | None,
        max_bytes: int,
        max_nbytes: int,
        max_large: int,
        resume_s: float,
        on_event: Callable[[msg.MembershipEvent], None],
        on_goodbye: Callable[[int], None],
        on_problem: Callable[[int, str], None],
    ) -> None:
        self.links: dict[int, Link] = {}
        self.by_identity: dict[bytes, int] = {}
        self.num_sent_again = 0
        # The caller has waited in `send` for long, where it cannot read. Two nodes that wait for
        # each other would wait forever, so what arrives now needs no room.
        self.is_stuck = False
        self.max_bytes = max_bytes  # posted to a peer; also of a peer, received and not read
        self._local, self._wire, self._inbox, self._decoder = local, wire, inbox, decoder
        self._caller_acknowledges = caller_acknowledges
        # The links of an earlier process of this node. None: this process does not send again what
        # that one has sent.
        self.before = before
        self._max_nbytes = max_nbytes  # of a message
        self._resume_s = resume_s  # how long an answer may take
        self._on_event, self._on_goodbye, self._on_problem = on_event, on_goodbye, on_problem
        self.clock: Callable[[], float] | None = None  # of the scheduler, set there
        # Large messages from and to others.
        self._incoming, self._outgoing = Grants(max_large, resume_s), Grants(max_large, resume_s)
        self._to_retry: dict[Link, None] = {}
        self._to_report: dict[Link, float] = {}  # peers that must learn how far we are, and when
        self._to_answer: dict[Link, None] = {}  # peers that wait for RESUMED: the queue was full

    # Links.

    def add(self, peer: int, identity: bytes | None, incarnation: float) -> Link:
        known = None
        if self.before is not None:
            whose, received, sent = self.before.get(peer, (incarnation, 0, 0))
            known = (received, sent) if whose == incarnation else (0, 0)
        link = self.links[peer] = Link(peer, identity, incarnation, known)
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
        self._to_report.pop(link, None)
        self._continue_sending()

    def replace(self, peer: int, identity: bytes) -> None:
        """Another process has taken this rank. It may still get what is kept for it."""
        link = self.links[peer]
        if link.identity is not None:
            self.by_identity.pop(link.identity, None)
        link.identity = identity
        self.by_identity[identity] = peer
        self.down(link)

    def down(self, link: Link) -> None:
        """Nothing is sent on this link until it is resumed."""
        link.down()
        self._to_answer.pop(link, None)
        self._outgoing.forget(link.peer)
        self._incoming.forget(link.peer)

    def resume(self, link: Link, kind: int = msg.RESUME) -> bool:
        """Reports how far we are, over a new connection; whether that could be sent."""
        there = -1.0 if link.peer_incarnation is None else link.peer_incarnation
        body = msg.pack_body(msg.Resume(self._local.incarnation, link.is_fresh, there))
        is_sent = self._send_control(link, kind, body, number=link.num_released + 1)
        link.resume_s = time.monotonic() + self._resume_s if is_sent else 0.0
        return is_sent

    # Sending.

    def post(self, link: Link, out: OutgoingMessage) -> None:
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
                if self._local.is_server:
                    self._outgoing.ask(link.peer, number, out.nbytes, out.priority)
                elif link.announced != number:
                    body = msg.pack_body(msg.Announcement(out.priority))
                    if self._send_control(link, msg.ANNOUNCE, body, number, out.nbytes):
                        link.announced = number
                return
            nbytes = 0 if out.payload is None else len(out.payload)
            ends = out.src, out.dst
            if not self._put(link, out.kind, number, nbytes, ends, out.body, out.payload):
                return
            link.num_sent = number

    def _is_paced(self, link: Link) -> bool:
        """Whether large messages need a grant: between workers and servers."""
        return self._local.scheduler not in (link.peer, self._local.rank)

    def _send_control(
        self, link: Link, kind: int, body: Part = b"", number: int = 0, nbytes: int = 0
    ) -> bool:
        """Sends a message that is not numbered; whether it could be sent."""
        return self._put(link, kind, number, nbytes, (self._local.rank, link.peer), body)

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
        """Sends a message that also reports how far we are; whether it could be sent."""
        counts = link.counts(self.is_stuck)
        head = Header(kind, self._local.job, *ends, number, nbytes, *counts).pack()
        result = self._wire.put(link.identity, link.peer, head, body, payload)
        if result == SENT:
            link.reported_counts = counts
            self._to_report.pop(link, None)
        elif result == GONE:
            self.down(link)
        else:
            self._to_retry[link] = None
        return result == SENT

    # Reporting how far we are.

    def schedule_report(self, link: Link, delay_s: float = _ACK_S) -> None:
        """Reports how far we are within this time."""
        due = time.monotonic() + delay_s
        if due < self._to_report.get(link, inf):
            self._to_report[link] = due

    def report_counts(self, link: Link) -> None:
        self._to_report.pop(link, None)
        is_news = link.is_up and link.reported_counts != link.counts(self.is_stuck)
        if is_news and not self._send_control(link, msg.ACK):
            self.schedule_report(link)

    def hand_over(self) -> Arrival | None:
        """The next arrival for the caller."""
        while (delivery := self._inbox.take()) is not None:
            arrival, link, number, nbytes, era, is_direct, _ = delivery
            if link is not None:
                is_message = arrival is not None and arrival.kind in (ARRIVED, DONE) and is_direct
                link.hand(number, nbytes, era, self._caller_acknowledges and is_message)
                if self.links.get(link.peer) is link:
                    if nbytes > EAGER_NBYTES:
                        self.report_counts(link)
                        self._grant()
                    else:
                        self.schedule_report(link)
            if arrival is not None:
                return arrival
        return None

    # Time.

    def run_due(self, now: float) -> float:
        """Does what is due; returns when something is due again."""
        due = inf
        if self._to_answer:
            for link in list(self._to_answer):
                self._answer(link)
            if self._to_answer:
                due = now + _RETRY_S
        if self._to_report:
            for link, when in list(self._to_report.items()):
                if when <= now:
                    self.report_counts(link)
                else:
                    due = min(due, when)
        if self._to_retry:
            for link in list(self._to_retry):
                self.pump(link)
            if self._to_retry:
                due = min(due, now + _RETRY_S)
        return due

    def tick(self) -> None:
        """Tries again what failed because there was no room."""
        self._continue_sending()
        now = time.monotonic()
        for link in list(self.links.values()):
            if not link.is_up:
                is_ours = link.identity is None and link.peer in self._wire.connected
                if is_ours and now >= link.resume_s:
                    self.resume(link)
            elif link.was_full and link.unread_bytes <= self.max_bytes:
                link.was_full = not self._send_control(link, msg.RESEND)

    def _continue_sending(self) -> None:
        self._grant()
        for link in list(self.links.values()):
            self.pump(link)

    # Receiving.

    def take(self, link: Link, header: Header, parts: list[Any]) -> None:
        kind, peer = header.kind, link.peer
        if kind in (msg.RESUME, msg.RESUMED):
            self._take_resume(link, header, msg.unpack_body(parts[1].bytes, msg.Resume))
            return
        if not link.is_up:
            return  # it waited in a queue while the connection broke; it is sent again
        if not link.take_counts(header.acknowledged, header.room, header.taken):
            raise Refusal("state", "it acknowledges what it was not sent")
        if self._outgoing.arrived(peer, link.num_taken_there):
            self.pump(link)
        if kind in msg.NUMBERED:
            self._take_numbered(link, header, parts)
        elif kind == msg.RESEND:
            self.num_sent_again += max(0, link.num_sent - header.taken)
            link.again(header.taken)
            self._outgoing.forget(peer)
            self.pump(link)
        elif kind == msg.ANNOUNCE and self._local.is_server and self._is_paced(link):
            announcement = msg.unpack_body(parts[1].bytes, msg.Announcement)
            self._take_announcement(link, header, announcement.priority)
        elif kind == msg.GRANT and link.identity is None:
            if header.number == link.announced:
                link.granted = header.number
                self.pump(link)
        elif kind != msg.ACK:
            raise Refusal("state", f"kind {kind} is not for a {self._local.role_name}")

    def _take_announcement(self, link: Link, header: Header, priority: float) -> None:
        number = header.number
        if priority != priority:  # NaN cannot be ordered
            raise Refusal("malformed", "a priority is not a number")
        if header.nbytes > self._max_nbytes:
            raise Refusal("oversized", f"a message of {header.nbytes} bytes is announced")
        if self._incoming.holds(link.peer, number):
            self._send_control(link, msg.GRANT, number=number)
        elif number > link.num_taken:
            self._incoming.ask(link.peer, number, header.nbytes, priority)
            self._grant()

    def _grant(self) -> None:
        """Grants the next large messages, but not of peers that have much unread here."""

        def may(peer: int) -> bool:
            return self.is_stuck or self.links[peer].unread_bytes <= self.max_bytes

        while (granted := self._incoming.grant(may)) is not None:
            peer, number = granted
            if not self._send_control(self.links[peer], msg.GRANT, number=number):
                # It asks again when it has a new connection, or gets RESEND.
                self._incoming.forget(peer)
                self.links[peer].was_full = True

    def _take_numbered(self, link: Link, header: Header, parts: list[Any]) -> None:
        verdict = link.judge(header.number)
        if verdict == DUPLICATE:
            self.schedule_report(link)
            return
        if verdict == GAP:
            if not link.misses:
                link.misses = True
                link.was_full = not self._send_control(link, msg.RESEND)  # or later
            return
        body, payload = parts[1].buffer, parts[2].buffer if len(parts) == 3 else None
        nbytes = len(body) + (0 if payload is None else len(payload))
        is_mine = header.dst == self._local.rank
        target = None if is_mine else self.links.get(header.dst)
        is_full = link.unread_bytes > 2 * self.max_bytes and not self.is_stuck
        if is_full or (target is not None and target.bytes_posted > self.max_bytes):
            link.misses = link.was_full = True
            return
        self.schedule_report(link)
        number, era = link.take(nbytes), link.era
        is_direct = header.src == link.peer
        arrival = None
        try:
            if target is not None:
                self.post(
                    target, OutgoingMessage(msg.DATA, header.src, header.dst, body, payload, 0.0)
                )
            elif is_mine and header.kind == msg.MEMBERSHIP:
                self._take_event(link, msg.unpack_body(bytes(body), msg.MembershipEvent))
            elif is_mine:
                arrival = self._decoder.decode(header, body, payload, number if is_direct else 0)
                if arrival.kind == GOODBYE and self.clock is not None:
                    arrival = arrival._replace(time_s=self.clock())
        finally:  # an invalid message has a number, too
            self._inbox.put(Delivery(arrival, link, number, nbytes, era, is_direct))
            if self._incoming.arrived(link.peer, number):
                self._grant()
            if nbytes > EAGER_NBYTES or (arrival is not None and arrival.kind == GOODBYE):
                self.report_counts(link)
        if arrival is not None and arrival.kind == GOODBYE:
            self._on_goodbye(arrival.src)

    def _take_event(self, link: Link, event: msg.MembershipEvent) -> None:
        if link.peer != self._local.scheduler:
            raise Refusal("source", f"rank {link.peer} sends a membership event")
        if not 0 <= event.rank < self._local.size or event.rank == self._local.rank:
            raise Refusal("malformed", f"an event about rank {event.rank}")
        self._on_event(event)

    def _take_resume(self, link: Link, header: Header, resume: msg.Resume) -> None:
        is_first = header.kind == msg.RESUME
        if is_first != (link.identity is not None):
            raise Refusal("state", "the one that connects resumes, the other one answers")
        self.down(link)
        before = link.num_sent
        knows_us = not is_first or resume.last_peer_incarnation in (-1.0, self._local.incarnation)
        problem = link.resumed(
            header.taken,
            header.number,
            resume.incarnation,
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
        """The peer drops everything before the answer, so nothing is sent before."""
        link.is_up = False
        self._to_answer[link] = None
        if self.resume(link, msg.RESUMED):
            del self._to_answer[link]
            link.is_up = True
            self._resumed(link)

    def _resumed(self, link: Link) -> None:
        self.schedule_report(link)  # what has changed since the report over the new connection
        self._continue_sending()
