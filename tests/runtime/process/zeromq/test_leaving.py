"""A node that leaves, and does not reach everybody any more."""

import threading
import time
from typing import Any

import pytest
import torch
import zmq

from gradwire.runtime.process import frames
from gradwire.runtime.process.transport import GOODBYE, LOST
from gradwire.runtime.zeromq import messages as msg
from gradwire.runtime.zeromq.connections import sockets as socket_module
from gradwire.runtime.zeromq.connections.sockets import Connection, Sockets
from gradwire.runtime.zeromq.connections.wire import SENT
from gradwire.runtime.zeromq.links.link import OutgoingMessage
from runtime.process.zeromq.jobs import Proxy, crash, job, next_of, wait_until

SERVER, SCHEDULER = 2, 3


def test_a_goodbye_that_only_the_scheduler_heard() -> None:
    """Who has not heard it is told after a while, and does not wait forever."""
    with job(2, heartbeat_s=0.5, server_s=1.0) as made:
        leaving = made.nodes[1]
        body = bytes(frames.pack_control(frames.GOODBYE).block.numpy())
        with leaving._turns:
            link = leaving._traffic.links[SCHEDULER]
            leaving._traffic.post(link, OutgoingMessage(msg.DATA, 1, SCHEDULER, body, None, 0.0))
        assert next_of(made.nodes[SCHEDULER], GOODBYE).src == 1
        crash(leaving)
        made.all.remove(leaving)
        lost = next_of(made.nodes[SERVER], LOST, GOODBYE)
        assert (lost.kind, lost.src) == (LOST, 1)
        assert "left" in lost.message


@pytest.mark.parametrize("rank", [SERVER, SCHEDULER])
def test_a_goodbye_whose_acknowledgement_is_lost(
    rank: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Who leaves connects again and is told, although it is forgotten already."""
    near, far = Proxy(), Proxy()
    server = {"on_bound": near.to, "advertise": near.address}
    try:
        with job(2, proxy=far, server=server, close_s=10) as made:
            leaving, node = made.nodes[1], made.nodes[rank]
            wait_until(lambda: leaving._traffic.links[rank].is_up)
            wire: Any = node._wire
            with node._turns:
                wire.put = lambda *parts: SENT  # nothing arrives
            closer = threading.Thread(target=leaving.close)
            began = time.monotonic()
            closer.start()
            assert next_of(node, GOODBYE).src == 1
            with node._turns:
                (near if rank == SERVER else far).cut()
                del wire.put
            closer.join()
            assert time.monotonic() - began < 5  # it does not wait for nothing
            assert not caplog.messages
            assert 1 not in node._traffic.links
    finally:
        near.close()
        far.close()


@pytest.mark.few
@pytest.mark.parametrize("has_sent", [False, True])
def test_who_is_gone_without_a_word_misses_what_was_sent_and_no_goodbye(
    has_sent: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with job(2, heartbeat_s=30, server_s=30, close_s=0.5) as made:
        server, gone = made.nodes[SERVER], made.nodes[1]
        wait_until(lambda: server._traffic.links[1].is_up)
        crash(gone)
        made.all.remove(gone)
        if has_sent:
            server.send(1, 0, 0, torch.zeros(8, dtype=torch.uint8))
        server.close()
        told = ["rank 2 leaves, and 1 messages to rank 1 may not have arrived"]
        assert caplog.messages == (told if has_sent else [])


def test_a_socket_that_was_being_made_when_a_signal_came(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody knows of it but its context, which would wait for it forever."""
    sockets = Sockets(b"somebody", None, 1 << 20, 1.0)

    def told(made: zmq.Socket[bytes]) -> Connection:
        raise KeyboardInterrupt

    monkeypatch.setattr(socket_module, "Connection", told)
    with pytest.raises(KeyboardInterrupt) as kept:
        sockets.connect("tcp://127.0.0.1:9")
    closer = threading.Thread(target=sockets.close, args=(0,), daemon=True)
    closer.start()
    closer.join(10)
    assert not closer.is_alive()
    assert kept.value.__traceback__ is not None  # has the socket, which nobody collects so
