"""What strangers can make a scheduler or a server hold: little, however many they are."""

import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import zmq

from gradwire.runtime.process.transport import ARRIVED
from gradwire.runtime.zeromq import make_keys
from gradwire.runtime.zeromq.connections.splitting import FRAME_NBYTES, join, split
from gradwire.runtime.zeromq.transport import _MAX_CONNECTIONS_PER_NODE, _MAX_OTHERS
from runtime.process.zeromq.jobs import Job, job, next_of, wait_until

SERVER, SCHEDULER = 1, 2
MEBIBYTE = bytes(1 << 20)
COMMAND, MORE, LARGE = 4, 1, 2  # flags of a ZMTP frame


def greeting(mechanism: bytes) -> bytes:
    return b"\xff" + bytes(8) + b"\x7f\x03\x00" + mechanism.ljust(20, b"\0") + bytes(32)


def announcement(flags: int) -> bytes:
    return bytes([flags | LARGE]) + struct.pack(">Q", 1 << 30)


def ready() -> bytes:
    """The command that ends a handshake without keys."""
    body = b"\x05READY" + b"\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
    return bytes([COMMAND, len(body)]) + body


def resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def port_of(made: Job, rank: int) -> int:
    address = made.scheduler_address if rank == SCHEDULER else made.nodes[rank].address
    return int(address.rpartition(":")[2])


def knock(one: socket.socket, opening: bytes) -> None:
    """Sends it. What follows a handshake is a message only if the other end has ended it, too."""
    one.sendall(opening)
    heard = b""
    while opening.endswith(ready()) and b"READY" not in heard:
        got = one.recv(256)
        if not got:
            raise ConnectionError
        heard += got


def attack(
    ports: list[int], opening: bytes, body: bytes, num_connections: int, num_mb: int
) -> float:
    """Every connection sends the opening, then as much of the body as it can, and stays open. By
    how much the memory of this process has grown at most."""
    before, peak, is_over = resident_mb(), [resident_mb()], threading.Event()

    def measure() -> None:
        while not is_over.wait(0.002):
            peak[0] = max(peak[0], resident_mb())

    connections = []

    def send(port: int) -> None:
        with suppress(OSError):
            one = socket.create_connection(("127.0.0.1", port))
            connections.append(one)
            one.settimeout(30)
            knock(one, opening)
            for _ in range(num_mb * (1 << 20) // len(body)):
                one.sendall(body)

    targets = [ports[number % len(ports)] for number in range(num_connections)]
    threads = [threading.Thread(target=send, args=(port,)) for port in targets]
    measuring = threading.Thread(target=measure)
    measuring.start()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    settled = [0.0] * 6  # the system may hold much that libzmq has not read yet
    while settled[-1] - settled[0] > 0.5 or not settled[0]:
        time.sleep(0.05)
        settled = [*settled[1:], resident_mb()]
    is_over.set()
    measuring.join()
    for one in connections:
        one.close()
    return peak[0] - before


def is_alive(made: Job) -> bool:
    sent = torch.arange(30_000)
    made.nodes[0].send(SERVER, 0, 0, sent)
    return torch.equal(next_of(made.nodes[SERVER], ARRIVED).message, sent)


@pytest.fixture(scope="module", params=["with keys", "without keys"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    keys = None
    if request.param == "with keys":
        keys = make_keys(tmp_path_factory.mktemp("keys") / "keys")
    with job(1, keys=keys) as one:
        assert is_alive(one)
        yield one


@pytest.mark.few(2)
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize(
    ("opening", "body"),
    [
        (greeting(b"CURVE") + announcement(COMMAND), MEBIBYTE),
        (greeting(b"NULL") + announcement(COMMAND), MEBIBYTE),
        (greeting(b"NULL") + ready() + announcement(0), MEBIBYTE),
        (greeting(b"NULL") + ready(), (bytes([MORE, 10]) + bytes(10)) * 90_000),
        (greeting(b"NULL") + ready(), (bytes([MORE, 255]) + bytes(255)) * 4000),
        (greeting(b"CURVE"), bytes([COMMAND, 0]) * (1 << 19)),
        (greeting(b"CURVE"), (bytes([MORE, 255]) + bytes(255)) * 4000),
    ],
    ids=["curve", "null", "message", "short frames", "frames", "empty commands", "no commands"],
)
def test_memory(made: Job, opening: bytes, body: bytes) -> None:
    """32 connections send 16 MiB each, more than the system buffers, half a gigabyte together."""
    ports = [port_of(made, rank) for rank in (SERVER, SCHEDULER)]
    assert attack(ports, opening, body, num_connections=32, num_mb=16) < 64
    assert is_alive(made)


@pytest.mark.few
@pytest.mark.parametrize("rank", [SERVER, SCHEDULER])
def test_connections_that_say_nothing_give_way(made: Job, rank: int) -> None:
    limit = _MAX_OTHERS + _MAX_CONNECTIONS_PER_NODE * made.nodes[0].size
    limits, refused = made.nodes[rank]._wire._limits, made.nodes[rank].refused
    assert limits is not None
    before, port = refused["too many connections"], port_of(made, rank)
    idle = [socket.create_connection(("127.0.0.1", port)) for _ in range(limit + 40)]
    wait_until(lambda: refused["too many connections"] - before >= 40, seconds=30)
    idle[0].settimeout(30)
    with suppress(ConnectionResetError):
        while idle[0].recv(64):  # the greeting, then the end
            pass
    for one in idle:
        one.close()
    wait_until(lambda: not limits._others, seconds=30)
    assert is_alive(made)


def test_long_parts_come_in_short_frames() -> None:
    class Frame:
        def __init__(self, view: bytes | memoryview) -> None:
            self.buffer = memoryview(view)

        def __len__(self) -> int:
            return len(self.buffer)

    limit = 4 * FRAME_NBYTES
    sizes = (0, 5, FRAME_NBYTES - 1, FRAME_NBYTES, FRAME_NBYTES + 1, 3 * FRAME_NBYTES, limit)
    parts = [os.urandom(size) for size in sizes]
    frames = [Frame(frame) for part in parts for frame in split(part)]
    assert max(map(len, frames)) == FRAME_NBYTES
    assert [bytes(part.buffer) for part in join(frames, limit)] == parts
    too_long = [Frame(frame) for frame in split(bytes(limit + 1))]
    assert join(too_long, limit) == []
    endless = [Frame(bytes(FRAME_NBYTES)) for _ in range(3)]
    assert join(endless, limit) == []


def test_a_member_whose_parts_are_too_long(tmp_path: Path) -> None:
    """Its message is dropped, and the next one comes."""
    keys = make_keys(tmp_path / "keys")
    with job(1, keys=keys, max_payload_nbytes=1 << 20) as made:
        worker, server = made.nodes[0], made.nodes[SERVER]
        assert is_alive(made)
        with worker._turns:
            worker._wire.put(None, SERVER, b"head", b"body", bytes((1 << 20) + 1))
        wait_until(lambda: server.refused["oversized"] or server.next(0.01))
        assert is_alive(made)


@pytest.mark.parametrize("nbytes", [FRAME_NBYTES, 10 * FRAME_NBYTES + 3])
def test_large_messages_with_keys(tmp_path: Path, nbytes: int) -> None:
    keys = make_keys(tmp_path / "keys")
    with job(2, keys=keys) as made:
        sent = torch.frombuffer(bytearray(os.urandom(nbytes)), dtype=torch.uint8)
        for src, dst in ((0, 2), (2, 0), (0, 1)):  # the last by way of the scheduler
            made.nodes[src].send(dst, 0, 0, sent)
            assert torch.equal(next_of(made.nodes[dst], ARRIVED).message, sent)


def test_a_node_that_waits_to_join_for_long_without_keys() -> None:
    """What it sends meanwhile is read, so it is not cut off, however much that is."""
    with job(1) as made:
        context = zmq.Context()
        stranger = context.socket(zmq.DEALER)
        stranger.connect(made.scheduler_address)
        for _ in range(3000):
            stranger.send_multipart([b"hello", bytes(200)])
            assert stranger.poll(10_000)
            stranger.recv_multipart()
        context.destroy(linger=0)
        assert made.nodes[SCHEDULER].refused == {"malformed": 3000}
