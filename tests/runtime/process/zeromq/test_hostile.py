"""Messages that should not be: counted, answered with an error, dropped. Nobody else notices."""

import random
import socket
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

import pytest
import torch
import zmq

from gradwire.runtime.process import frames
from gradwire.runtime.process.frames import Headers
from gradwire.runtime.process.transport import ARRIVED
from gradwire.runtime.zeromq import messages as msg
from gradwire.runtime.zeromq.messages import Header
from runtime.process.zeromq.jobs import Job, job, next_of, wait_until

SERVER, SCHEDULER = 1, 2


@pytest.fixture(scope="module")
def made() -> Iterator[Job]:
    with job(1, max_payload_nbytes=1 << 20) as one:
        yield one


class Peer:
    """A socket that says what it likes."""

    def __init__(self, address: str, identity: bytes = b"") -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        if identity:
            self.socket.routing_id = identity
        self.socket.connect(address)

    def __enter__(self) -> "Peer":
        return self

    def __exit__(self, *_: object) -> None:
        self.context.destroy(linger=0)

    def answers(self, *parts: bytes) -> list[bytes]:
        self.socket.send_multipart(parts)
        assert self.socket.poll(5000), "no answer"
        return self.socket.recv_multipart()


def is_alive(made: Job) -> bool:
    """Whether messages still come."""
    sent = torch.arange(30_000)
    made.nodes[0].send(SERVER, 0, 0, sent)
    made.nodes[SERVER].send(SCHEDULER, 0, 0, sent)
    return all(
        torch.equal(next_of(made.nodes[rank], ARRIVED).message, sent)
        for rank in (SERVER, SCHEDULER)
    )


def block(value: int = 1) -> bytes:
    return bytes(frames.pack(0, 0, torch.tensor([value]), Headers()).block.numpy())


def head(made: Job, kind: int, **fields: int) -> bytes:
    job_ = made.nodes[0]._local.job
    return Header(kind, job_, **{"src": 0, "dst": SERVER, **fields}).pack()


@pytest.mark.parametrize("rank", [SERVER, SCHEDULER])
def test_strangers(made: Job, rank: int) -> None:
    node = made.nodes[rank]
    good = head(made, msg.DATA, number=1, dst=rank)
    cases = {
        "malformed": [
            (b"",),
            (b"hello", b"world"),
            (good,),
            (good, b"", b"", b"", b""),
            (good[:-1], b""),
            (b"X" + good[1:], block()),
            (head(made, msg.JOIN), b"short"),
            (head(made, msg.JOIN), b"\xff" * 60),
        ],
        "version": [(good[:4] + b"\x63" + good[5:], block())],
        "kind": [(good[:5] + b"\x63" + good[6:], block())],
        "job": [(good[:8] + b"otherjob" + good[16:], block())],
        "unknown peer": [
            (head(made, kind, dst=rank), block())
            for kind in range(14)
            if kind not in (msg.JOIN, msg.ERROR)
        ],
    }
    if rank == SERVER:
        cases["malformed"] = cases["malformed"][:-2]
        cases["state"] = [(head(made, msg.JOIN), b"short")]
    for reason, messages in cases.items():
        for parts in messages:
            before = node.refused[reason]
            with Peer(node.address) as peer:
                answer = peer.answers(*parts)
            assert node.refused[reason] == before + 1
            header = msg.unpack_header(answer[0])
            assert header.kind == msg.ERROR
            assert msg.unpack_text(answer[1])
    assert is_alive(made)


def test_hellos_that_are_refused(made: Job) -> None:
    scheduler = made.nodes[SCHEDULER]
    own = b"\x01" * 16
    good = msg.JoinRequest(own, msg.WORKER, msg.NOBODY, 1, 1, "")
    cases = (
        ("it is another one", replace(good, identity=b"\x02" * 16)),
        ("5 workers", replace(good, num_workers=5)),
        ("asks for rank 2", replace(good, wanted=2)),
        ("asks for rank 0", replace(good, role=msg.SERVER, wanted=0, address="tcp://a:1")),
        ("no address", replace(good, role=msg.SERVER, wanted=1, address="10.0.0.5:9000")),
        ("nobody can connect", replace(good, role=msg.SERVER, wanted=1, address="tcp://a:x")),
        ("no role 2", replace(good, role=msg.SCHEDULER)),
    )
    for text, request in cases:
        with Peer(scheduler.address, own) as peer:
            answer = peer.answers(head(made, msg.JOIN), msg.pack_body(request))
        assert text in msg.unpack_text(answer[1])
    with Peer(scheduler.address, own) as peer:  # nothing is wrong with it, but there is no place
        answer = peer.answers(head(made, msg.JOIN), msg.pack_body(good))
        assert msg.unpack_header(answer[0]).kind == msg.WAIT
    assert is_alive(made)


def test_messages_that_are_too_large_end_the_connection(made: Job) -> None:
    """They are not read, so nobody can be answered."""
    with Peer(made.nodes[SERVER].address) as peer:
        peer.socket.send_multipart([head(made, msg.DATA, number=1), block(), bytes(2 << 20)])
        assert not peer.socket.poll(100)
    assert is_alive(made)


def test_bytes_that_are_not_even_of_zeromq(made: Job) -> None:
    for rank in (SERVER, SCHEDULER):
        port = int(made.nodes[rank].address.rpartition(":")[2])
        for sent in (b"GET / HTTP/1.1\r\n\r\n", bytes(1000), b"\xff" * 100_000):
            with socket.create_connection(("127.0.0.1", port)) as stranger, suppress(OSError):
                stranger.sendall(sent)
    assert is_alive(made)


def test_a_member_that_misbehaves() -> None:
    """Its link is spoilt, but nobody else's, and nothing that it invented arrives."""
    with job(2, heartbeat_s=30) as made:
        server, liar = made.nodes[2], made.nodes[1]
        server_rank = 2

        def lie(reason: str, kind: int, *parts: bytes, **fields: int) -> None:
            before = server.refused[reason]
            header = head(made, kind, **{"src": 1, "dst": server_rank, **fields})
            with liar._turns:
                liar._wire.put(None, server_rank, header, *parts)
            wait_until(lambda: server.refused[reason] == before + 1)

        huge = 1 << 40
        wait_until(lambda: server._traffic.links[1].is_up)
        lie("source", msg.DATA, block(), src=0, number=1)
        lie("destination", msg.DATA, block(), dst=0, number=1)
        lie("state", msg.DATA, block(), number=1, taken=7)
        lie("state", msg.DATA, block(), number=1, acknowledged=huge)
        server.send(1, 0, 0, torch.arange(3))
        next_of(liar)
        lie("state", msg.DATA, block(), number=1, acknowledged=1, room=0, taken=1)
        lie("state", msg.ACCEPTED, b"")
        lie("state", msg.HEARTBEAT, b"")
        lie("state", msg.GRANT, b"", number=1)
        lie("state", msg.RESUMED, msg.pack_body(msg.Resume(0.0, False, 0.0)))
        lie("malformed", msg.RESUME, b"short")
        lie("malformed", msg.ANNOUNCE, b"short", number=1)
        lie("malformed", msg.ANNOUNCE, msg.pack_body(msg.Announcement(float("nan"))), number=1)
        lie("oversized", msg.ANNOUNCE, msg.pack_body(msg.Announcement(0.0)), number=1, nbytes=huge)
        lie("malformed", msg.DATA, b"no frame", number=1)  # it is taken: the next has number 2
        lie(
            "source",
            msg.MEMBERSHIP,
            msg.pack_body(msg.MembershipEvent(False, 0, 1.0, bytes(16), "")),
            number=2,
        )
        lie("malformed", msg.MEMBERSHIP, b"", number=3)
        lie("malformed", msg.DATA, block(), block(), number=4, nbytes=7)
        lie("malformed", msg.DATA, block()[:-1], number=5)
        lie("oversized", msg.DATA, bytes((1 << 20) + 1), number=6)
        lie("state", msg.RESUME, msg.pack_body(msg.Resume(0.0, False, 0.0)), number=99)
        assert server.next(0.05) is None
        sent = torch.arange(20_000)
        made.nodes[0].send(2, 0, 0, sent)
        assert torch.equal(next_of(server).message, sent)
        assert sum(liar.refused.values()) > 10  # it was told


def test_random_bytes_from_a_member_and_a_stranger() -> None:
    rng = random.Random(7)
    with job(2, heartbeat_s=30) as made:
        server, fuzzer = made.nodes[2], made.nodes[1]
        fixed = head(made, msg.DATA, src=1, dst=2, number=1)
        with Peer(server.address) as stranger:
            refused = server.refused
            for number in range(1500):
                if number % 50 == 49:  # a connection with more unread than this may be cut
                    before = sum(refused.values())
                    wait_until(lambda before=before: sum(refused.values()) > before, 60)
                header = bytearray(fixed)
                header[5] = rng.randrange(14)
                for _ in range(rng.randrange(4)):
                    header[rng.randrange(len(header))] = rng.randrange(256)
                body = bytearray(rng.choice([block(), rng.randbytes(rng.randrange(80))]))
                if body and rng.random() < 0.7:
                    body[rng.randrange(len(body))] = rng.randrange(256)
                with fuzzer._turns:
                    fuzzer._wire.put(None, 2, bytes(header), bytes(body))
                stranger.socket.send_multipart([bytes(header), bytes(body)])
            made.nodes[0].send(2, 0, 0, torch.arange(9))
            while next_of(server).src != 0:
                pass

            def have_come() -> bool:  # worker 0 may be served before the others
                server.next(0.05)
                return sum(server.refused.values()) > 1000

            # The stranger stays: what its socket has not sent would be lost with it.
            wait_until(have_come, 60)


def test_a_member_that_asks_for_its_turn_and_does_not_take_it() -> None:
    """It holds up the others for a while, not for good."""
    with job(2, heartbeat_s=0.5) as made:
        server, idler = made.nodes[2], made.nodes[1]
        idler.send(2, 0, 0, torch.arange(3))
        next_of(server, ARRIVED)
        header = head(made, msg.ANNOUNCE, src=1, dst=2, number=9, nbytes=1 << 20)
        with idler._turns:
            idler._wire.put(None, 2, header, msg.pack_body(msg.Announcement(-1.0)))
        wait_until(lambda: server._traffic._incoming.holds(1, 9))
        sent = torch.arange(100_000)
        made.nodes[0].send(2, 0, 0, sent)
        assert torch.equal(next_of(server, ARRIVED).message, sent)


def test_what_is_too_large_is_not_sent() -> None:
    """The other end would close the connection over it, again and again."""
    with job(1, max_payload_nbytes=1 << 20) as made:
        with pytest.raises(ValueError, match="limit is 1048576"):
            made.nodes[0].send(SERVER, 0, 0, torch.zeros((1 << 20) + 1, dtype=torch.uint8))
        made.nodes[0].send(SERVER, 0, 0, torch.ones(1 << 20, dtype=torch.uint8))
        assert next_of(made.nodes[SERVER], ARRIVED).message.sum() == 1 << 20
