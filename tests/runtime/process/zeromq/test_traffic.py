"""What is said on links when the sockets take nothing."""

from typing import Any

from gradwire.runtime.process.frames import Headers
from gradwire.runtime.process.zeromq import messages as msg
from gradwire.runtime.process.zeromq.arrivals import Arrivals
from gradwire.runtime.process.zeromq.inbox import Inbox
from gradwire.runtime.process.zeromq.messages import Header
from gradwire.runtime.process.zeromq.place import Place
from gradwire.runtime.process.zeromq.traffic import Traffic
from gradwire.runtime.process.zeromq.wire import FULL, SENT


class Wire:
    def __init__(self) -> None:
        self.is_full = False
        self.said: list[int] = []
        self.connected: set[int] = set()

    def put(self, identity: Any, peer: int, head: bytes, *parts: Any) -> int:
        if self.is_full:
            return FULL
        self.said.append(msg.unpack_header(head).kind)
        return SENT


def test_that_something_is_missing_is_said_until_it_can_be() -> None:
    """Otherwise all that comes later would be dropped, and nobody would send it again."""
    wire: Any = Wire()
    place = Place(msg.SERVER, 1, 1, b"\x01" * 16, bytes(8), rank=1)
    traffic = Traffic(
        place,
        wire,
        Inbox(),
        Arrivals(3, Headers(), 1 << 20, None),
        is_asked=False,
        before={},
        max_bytes=1 << 20,
        max_nbytes=1 << 20,
        max_large=1,
        resume_s=1.0,
        on_event=lambda event: None,
        on_goodbye=lambda rank: None,
        on_problem=lambda rank, problem: None,
    )
    link = traffic.add(0, b"\x02" * 16, 0.0)
    assert link.resumed(0, 1, 0.0, True) is None
    wire.is_full = True
    traffic.take(link, Header(msg.DATA, place.job, 0, 1, number=2), [None, None])
    traffic.tick()
    assert wire.said == []
    wire.is_full = False
    traffic.tick()
    assert wire.said == [msg.AGAIN]
    traffic.tick()
    assert wire.said == [msg.AGAIN]
