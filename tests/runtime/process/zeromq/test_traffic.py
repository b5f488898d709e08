"""What is said on links when the sockets take nothing, and when connections break."""

from time import monotonic
from typing import Any

import pytest
import zmq

from gradwire.core.layout import NodeLayout
from gradwire.runtime.process.frames import Headers
from gradwire.runtime.zeromq import messages as msg
from gradwire.runtime.zeromq.connections.wire import FULL, SENT
from gradwire.runtime.zeromq.links.arrival_decoder import ArrivalDecoder
from gradwire.runtime.zeromq.links.inbox import Inbox
from gradwire.runtime.zeromq.links.link import Link, OutgoingMessage
from gradwire.runtime.zeromq.links.traffic import Traffic
from gradwire.runtime.zeromq.local_node import LocalNode
from gradwire.runtime.zeromq.messages import Header

WORKER, SERVER = 0, 1


class Wire:
    def __init__(self) -> None:
        self.is_full = False
        self.headers: list[Header] = []
        self.connected: set[int] = set()

    @property
    def said(self) -> list[int]:
        return [header.kind for header in self.headers]

    def put(self, identity: Any, peer: int, head: bytes, *parts: Any) -> int:
        if self.is_full:
            return FULL
        self.headers.append(msg.unpack_header(head))
        return SENT


def make(rank: int) -> tuple[Traffic, Link, Wire]:
    """A worker, or a server, and its link to the other one."""
    wire: Any = Wire()
    role = msg.WORKER if rank == WORKER else msg.SERVER
    traffic = Traffic(
        LocalNode(role, NodeLayout(1, 1, 1), b"\x01" * 16, bytes(8), rank=rank),
        wire,
        Inbox(),
        ArrivalDecoder(3, Headers(), 1 << 20, None),
        caller_acknowledges=False,
        before={},
        max_bytes=1 << 20,
        max_nbytes=1 << 20,
        max_large=1,
        resume_s=1.0,
        on_event=lambda event: None,
        on_goodbye=lambda rank: None,
        on_problem=lambda rank, problem: None,
    )
    link = traffic.add(1 - rank, b"\x02" * 16 if rank == SERVER else None, 0.0)
    return traffic, link, wire


def resume(traffic: Traffic, link: Link, **counts: int) -> None:
    """The peer resumes, or answers."""
    kind = msg.RESUMED if link.identity is None else msg.RESUME
    header = Header(kind, bytes(8), link.peer, 1 - link.peer, number=1, **counts)
    body = msg.pack_body(msg.Resume(0.0, False, 0.0))
    traffic.take(link, header, [zmq.Frame(header.pack()), zmq.Frame(body)])


def post(traffic: Traffic, link: Link, nbytes: int = 1) -> None:
    traffic.post(
        link, OutgoingMessage(msg.DATA, 1 - link.peer, link.peer, bytes(nbytes), None, 0.0)
    )


def read(traffic: Traffic, link: Link) -> None:
    """A message comes, and the caller has it."""
    link.hand(link.take(1), 1, link.era, False)
    traffic.schedule_report(link)


def wait(traffic: Traffic) -> None:
    """Until all is due."""
    traffic.run_due(monotonic() + 1.0)


def test_that_something_is_missing_is_said_until_it_can_be() -> None:
    """Otherwise all that comes later would be dropped, and nobody would send it again."""
    traffic, link, wire = make(SERVER)
    assert link.resumed(0, 1, 0.0, True) is None
    wire.is_full = True
    traffic.take(link, Header(msg.DATA, bytes(8), WORKER, SERVER, number=2), [None, None])
    traffic.tick()
    assert wire.said == []
    wire.is_full = False
    traffic.tick()
    assert wire.said == [msg.RESEND]
    traffic.tick()
    assert wire.said == [msg.RESEND]


@pytest.mark.parametrize("rank", [WORKER, SERVER])
def test_what_was_acknowledged_when_the_connection_broke(rank: int) -> None:
    """It is said once more only by who resumes, or answers; otherwise senders wait for room."""
    traffic, link, _ = make(rank)
    resume(traffic, link)
    for _ in range(3):
        post(traffic, link, 1000)
    size = link.bytes_posted // 3
    traffic.down(link)
    resume(traffic, link, acknowledged=1, room=2, taken=3)
    assert (len(link.resend_queue), link.bytes_posted, link.num_sent) == (2, size, 3)
    resume(traffic, link, acknowledged=3, room=3, taken=3)
    assert (len(link.resend_queue), link.bytes_posted) == (0, 0)


def test_what_is_read_while_the_connection_is_broken_is_acknowledged() -> None:
    traffic, link, wire = make(WORKER)
    resume(traffic, link)
    read(traffic, link)
    traffic.down(link)
    traffic.resume(link)
    read(traffic, link)
    wait(traffic)  # it cannot be said now
    assert wire.said == [msg.RESUME]
    resume(traffic, link)
    wait(traffic)
    assert wire.said == [msg.RESUME, msg.ACK]
    assert [header.acknowledged for header in wire.headers] == [1, 2]


def test_what_found_no_room_was_not_said() -> None:
    traffic, link, wire = make(WORKER)
    resume(traffic, link)
    read(traffic, link)
    wire.is_full = True
    wait(traffic)
    wire.is_full = False
    assert wire.said == []
    wait(traffic)
    assert wire.said == [msg.ACK]
    assert wire.headers[0].acknowledged == 1


def test_nothing_is_sent_before_the_answer_to_who_resumes() -> None:
    """It would be thrown away there, and sent all over again."""
    traffic, link, wire = make(SERVER)
    for _ in range(2):
        post(traffic, link)
    wire.is_full = True
    resume(traffic, link)
    wire.is_full = False
    assert not link.is_up
    traffic.tick()
    post(traffic, link)
    assert wire.said == []
    wait(traffic)
    assert link.is_up
    assert wire.said == [msg.RESUMED, msg.DATA, msg.DATA, msg.DATA]
    wait(traffic)
    assert wire.said.count(msg.RESUMED) == 1


def test_who_is_gone_again_is_not_answered() -> None:
    traffic, link, wire = make(SERVER)
    wire.is_full = True
    resume(traffic, link)
    traffic.down(link)
    wire.is_full = False
    wait(traffic)
    assert not link.is_up
    assert wire.said == []
