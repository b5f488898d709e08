"""Whose connections give way when strangers open many, and which ones are taken for strangers'."""

import logging
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest
import zmq

from gradwire.runtime.zeromq import make_keys
from gradwire.runtime.zeromq import messages as msg
from gradwire.runtime.zeromq.connections import connection_limits
from gradwire.runtime.zeromq.connections.connection_limits import (
    MAX_UNDELIVERED_NBYTES,
    ConnectionLimits,
)
from gradwire.runtime.zeromq.keys import JobKeys
from gradwire.runtime.zeromq.transport import _MAX_CONNECTIONS_PER_NODE, _MAX_OTHERS
from runtime.process.zeromq.jobs import ANY, Job, wait_until

MEMBER = b"\x01" + b"m" * 15


def has_ended(one: socket.socket) -> bool:
    """Waits until the other end closes the connection."""
    one.settimeout(30)
    with suppress(ConnectionResetError):
        while one.recv(64):  # the greeting, then the end
            pass
    return True


def is_open(one: socket.socket) -> bool:
    try:
        return bool(one.recv(64, socket.MSG_DONTWAIT))
    except BlockingIOError:
        return True


def ask_to_join(context: Any, address: str, keys: JobKeys | None) -> Any:
    """As a worker of a job with one server. It asks once, so it is in the job only if the
    connection over which it did that lasts."""
    worker = context.socket(zmq.DEALER)
    worker.routing_id = MEMBER
    if keys is not None:
        worker.curve_serverkey = keys.binding_public
        worker.curve_publickey, worker.curve_secretkey = (
            keys.connecting_public,
            keys.connecting_secret,
        )
    worker.connect(address)
    job = blake2b(b"", digest_size=8, person=b"gradwire").digest()
    request = msg.pack_body(msg.JoinRequest(MEMBER, msg.WORKER, msg.NOBODY, 1, 1, ""))
    worker.send_multipart([msg.Header(msg.JOIN, job).pack(), request])
    return worker


def next_kind(worker: Any) -> int:
    assert worker.poll(20_000), "no answer"
    return msg.unpack_header(worker.recv_multipart()[0]).kind


@pytest.mark.parametrize("has_keys", [True, False], ids=["with keys", "without keys"])
def test_a_node_that_waits_to_join_does_not_give_way(
    has_keys: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = make_keys(tmp_path / "keys") if has_keys else None
    made = Job(1, 1, keys=keys, heartbeat_s=60.0, close_s=0.1)
    limit = _MAX_OTHERS + _MAX_CONNECTIONS_PER_NODE * 3
    bound = threading.Event()

    def on_bound(address: str) -> None:
        made.reached_at = address
        bound.set()

    def start_scheduler() -> None:
        made.start("scheduler", scheduler=ANY, on_bound=on_bound, join_s=60.0)

    scheduler = threading.Thread(target=start_scheduler)
    scheduler.start()
    assert bound.wait(10)
    with ExitStack() as stack:
        context = stack.enter_context(zmq.Context())
        stack.callback(context.destroy, linger=0)
        worker = ask_to_join(context, made.reached_at, keys)
        assert next_kind(worker) == msg.WAIT
        address = ("127.0.0.1", int(made.reached_at.rpartition(":")[2]))
        idle = [stack.enter_context(socket.create_connection(address)) for _ in range(2 * limit)]
        assert all(has_ended(one) for one in idle[:limit])
        made.start("server")
        scheduler.join()
        while (kind := next_kind(worker)) == msg.WAIT:
            pass
        assert kind == msg.ACCEPTED
        made.close()
    logged = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]
    expected = f"dropped a connection from 127.0.0.1: more than {limit} connections"
    assert sum(expected in text for text in logged) == 1


class Frame:
    """Of a message that came over the connection with this file descriptor."""

    def __init__(self, number: int) -> None:
        self.number = number

    def get(self, name: int) -> int:
        assert name == zmq.SRCFD
        return self.number

    def __len__(self) -> int:
        return 10


class Limits:
    """With connections of our own, and events that the test invents."""

    def __init__(self, listener: socket.socket, **settings: Any) -> None:
        self.known = {MEMBER}
        self.cut: list[str] = []
        self.events: list[tuple[int, int]] = []
        self.port = listener.getsockname()[1]
        self.listener = listener
        self.stack = ExitStack()
        self.tested = ConnectionLimits(
            None,
            self.port,
            is_known=lambda node: node in self.known,
            on_change=lambda node, is_open: None,
            on_cut=lambda reason, host, text: self.cut.append(reason),
            **settings,
        )

    def next_event(self, *_: object) -> dict[str, int]:
        if not self.events:
            raise zmq.Again
        event, value = self.events.pop(0)
        return {"event": event, "value": value}

    def connect(self) -> tuple[socket.socket, int]:
        """The end of the peer, and the number of ours."""
        there = self.stack.enter_context(socket.create_connection(("127.0.0.1", self.port)))
        here = self.stack.enter_context(self.listener.accept()[0])
        self.tell(zmq.EVENT_ACCEPTED, here.fileno())
        return there, here.fileno()

    def tell(self, event: int, number: int) -> None:
        self.events.append((event, number))
        self.tested.read_events()

    def deliver(self, identity: bytes, number: int) -> None:
        self.tested.delivered(identity, [Frame(number)])
        if identity in self.known:
            self.tested.is_member(identity, Frame(number))

    def is_cut(self, reason: str) -> bool:
        self.tested.check()
        return reason in self.cut


@pytest.fixture
def limits(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Limits]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        made = Limits(listener, max_others=2, has_keys=request.param)
        monkeypatch.setattr(connection_limits, "recv_monitor_message", made.next_event)
        with made.stack:
            yield made


def stranger_with_the_number_of_a_member(limits: Limits) -> socket.socket:
    """The member's last message is read when its number is that of a stranger already."""
    stranger, number = limits.connect()
    limits.tell(zmq.EVENT_DISCONNECTED, number)  # that was the member's
    limits.tell(zmq.EVENT_ACCEPTED, number)
    limits.deliver(MEMBER, number)
    return stranger


@pytest.mark.skipif(not hasattr(socket, "TCP_INFO"), reason="memory is bounded on Linux only")
@pytest.mark.parametrize("limits", [False], indirect=True)
@pytest.mark.parametrize("end", ["connects anew", "is lost"])
def test_memory_of_a_stranger_with_the_number_of_a_member(limits: Limits, end: str) -> None:
    stranger = stranger_with_the_number_of_a_member(limits)
    assert not limits.tested.has_to_check
    if end == "connects anew":
        limits.deliver(MEMBER, limits.connect()[1])
    else:
        limits.known.clear()
        limits.connect()
    assert limits.tested.has_to_check
    stranger.sendall(bytes(MAX_UNDELIVERED_NBYTES + 1))
    wait_until(lambda: limits.is_cut("endless message"))
    assert has_ended(stranger)


@pytest.mark.parametrize("limits", [True, False], indirect=True)
def test_number_of_strangers_with_the_number_of_a_member(limits: Limits) -> None:
    stranger = stranger_with_the_number_of_a_member(limits)
    member, number = limits.connect()
    limits.deliver(MEMBER, number)
    for _ in range(2):
        assert not limits.is_cut("too many connections")
        limits.connect()
    assert limits.is_cut("too many connections")
    assert limits.cut == ["too many connections"]
    assert has_ended(stranger)
    assert is_open(member)


@pytest.mark.parametrize("limits", [True, False], indirect=True)
def test_a_connection_is_not_cut_for_an_older_one_with_its_number(limits: Limits) -> None:
    """The system has closed the older one, and we have not been told yet."""
    older = limits.connect()[1]
    limits.connect()
    newer = limits.stack.enter_context(socket.create_connection(("127.0.0.1", limits.port)))
    accepted, _ = limits.listener.accept()
    os.dup2(accepted.fileno(), older)
    accepted.close()
    limits.connect()
    assert not limits.is_cut("too many connections")
    assert is_open(newer)
