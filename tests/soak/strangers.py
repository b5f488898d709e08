"""Connections from processes that are not in the job: garbage, and requests that must be refused.

Everything goes to ports on the loopback interface, a bounded number of connections and bytes.
"""

import random
import socket
import struct
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path

import zmq

from gradwire.experiment.processes.headers import HEADERS
from gradwire.experiment.run.config import Config, common_settings
from gradwire.runtime.zeromq import messages as msg
from gradwire.runtime.zeromq.identities import heartbeat_identity, make_identity

_HOST = "127.0.0.1"
_NUM_CONNECTIONS = 12
_LISTEN_S = 0.5
_CONNECT_S = 2.0
_NUM_HELLOS = 12  # of a node that insists: longer than `silence`
NO_ANSWERS, WAITS = "no answers", "wait"


# Bytes over TCP.


def random_bytes(rng: random.Random) -> bytes:
    return rng.randbytes(rng.randrange(1, 4096))


def handshake(rng: random.Random) -> bytes:
    """Of ZMTP 3, complete: greeting, READY and a request."""
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
    identity = make_identity()
    ready = b"\x05READY" + _property(b"Socket-Type", b"DEALER") + _property(b"Identity", identity)
    header = msg.Header(msg.JOIN, rng.randbytes(8)).pack()
    body = msg.pack_body(msg.JoinRequest(identity, msg.WORKER, 0, 2, 2, ""))
    return greeting + _frame(4, ready) + _frame(1, header) + _frame(0, body)


def mutated_handshake(rng: random.Random) -> bytes:
    """With some bytes changed, cut out or doubled."""
    data = bytearray(handshake(rng))
    for _ in range(rng.randrange(1, 8)):
        at = rng.randrange(len(data))
        match rng.randrange(3):
            case 0:
                data[at] = rng.randrange(256)
            case 1:
                del data[at : at + rng.randrange(1, 16)]
                data += b"\0"
            case 2:
                data[at:at] = data[at : at + rng.randrange(1, 16)]
    return bytes(data)


def large_announcement(rng: random.Random) -> bytes:
    """A handshake command that says it is 1 GiB long, and some of it."""
    greeting = handshake(rng)[:64]
    return greeting + b"\x06" + struct.pack(">Q", 1 << 30) + rng.randbytes(1 << 16)


def endless_parts(rng: random.Random) -> bytes:
    """A message of very many parts that does not end."""
    start = handshake(rng)
    return start[: 64 + 2 + start[65]] + _frame(1, b"x" * 100) * 2000


_GARBAGE: tuple[Callable[[random.Random], bytes], ...] = (
    random_bytes,
    mutated_handshake,
    large_announcement,
    endless_parts,
)


def send_garbage(rng: random.Random, ports: list[int]) -> str:
    """Several connections to each of the ports; some stay open until all were made."""
    count = 0
    with ExitStack() as stack:
        for port in ports:
            for _ in range(_NUM_CONNECTIONS):
                with suppress(OSError):  # it may hang up
                    connection = socket.create_connection((_HOST, port), _CONNECT_S)
                    stack.enter_context(connection)
                    count += 1
                    connection.sendall(rng.choice(_GARBAGE)(rng))
                    if rng.random() < 0.5:
                        connection.close()
        time.sleep(rng.uniform(0.0, _LISTEN_S))  # connections that say no more
    return f"{count} connections to {len(ports)} ports"


def _property(name: bytes, value: bytes) -> bytes:
    return bytes([len(name)]) + name + struct.pack(">I", len(value)) + value


def _frame(flags: int, body: bytes) -> bytes:
    return bytes([flags, len(body)]) + body


# Nodes that do not belong to the job.


def job_of(folder: Path) -> bytes:
    """The hash that messages of this run carry: everybody who knows the settings can compute it."""
    config = replace(Config.from_toml(folder / "config.toml"), engine="process")
    text = "\n".join(common_settings(config.to_toml()))
    fingerprint = blake2b(text.encode() + HEADERS.digest, digest_size=16).digest()
    return blake2b(fingerprint, digest_size=8, person=b"gradwire").digest()


def send_hellos(rng: random.Random, ports: list[int], folder: Path, public_key: bytes = b"") -> str:
    """Nodes of other jobs, with other keys, or that ask for ranks that are taken.

    With the public key of those who listen, the handshake comes to the key of the one who asks.
    """
    own = job_of(folder) if (folder / "config.toml").exists() else rng.randbytes(8)
    answers = []
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        for port in ports:
            for number in range(rng.randrange(1, 4)):
                has_keys = rng.random() < (0.6 if public_key else 0.3)
                wrong_key, _ = zmq.curve_keypair()
                server_key = rng.choice((public_key, public_key, wrong_key)) or wrong_key
                job = rng.choice((own, own, rng.randbytes(8)))
                with context.socket(zmq.DEALER) as dealer:
                    key = server_key if has_keys else b""
                    if number == 0 and not public_key:  # it may reach the membership
                        request = _request(rng, port, is_twin=True)
                        answers += _add_member(rng, dealer, request, port, own, b"")
                    else:
                        request = _request(rng, port, is_twin=False)
                        answers += _add_member(rng, dealer, request, port, job, key)
    finally:
        context.destroy(linger=0)
    kinds = sorted({_kind(parts) for parts in answers})
    return (
        f"requests to {len(ports)} ports, {'answers: ' + ', '.join(kinds) if kinds else NO_ANSWERS}"
    )


def _request(rng: random.Random, port: int, *, is_twin: bool) -> msg.JoinRequest:
    """A twin asks for a rank that another node has, and all else is right."""
    identity, num_servers = make_identity(), 2
    role = rng.choice((msg.WORKER, msg.SERVER))
    ranks = [0, 1] if role == msg.WORKER else [2, 3]
    if not is_twin:
        identity = heartbeat_identity(identity) if rng.random() < 0.2 else identity
        num_servers = rng.choice((2, 2, 7))
        ranks += [99, msg.NOBODY] if role == msg.WORKER else [99]
    address = f"tcp://{_HOST}:{port}"
    return msg.JoinRequest(identity, role, rng.choice(ranks), 2, num_servers, address)


def _add_member(
    rng: random.Random,
    dealer: "zmq.Socket[bytes]",
    request: msg.JoinRequest,
    port: int,
    job: bytes,
    server_key: bytes,
) -> list[list[bytes]]:
    dealer.setsockopt(zmq.IDENTITY, request.identity)
    dealer.setsockopt(zmq.LINGER, 0)
    dealer.setsockopt(zmq.SNDTIMEO, int(1000 * _CONNECT_S))  # it may be hung up on
    if server_key:
        public, secret = zmq.curve_keypair()
        dealer.curve_publickey, dealer.curve_secretkey = public, secret
        dealer.curve_serverkey = server_key
    dealer.connect(f"tcp://{_HOST}:{port}")
    request = [msg.Header(msg.JOIN, job).pack(), msg.pack_body(request)]
    dealer.send_multipart(request)
    answers = []
    for _ in range(_NUM_HELLOS):
        found = _listen(dealer)
        answers += found
        if not found or _kind(found[-1]) != WAITS:
            break
        dealer.send_multipart(request)  # it is refused only when the rank's holder was heard since
    for _ in range(rng.randrange(8)):  # what only members may say
        kind = rng.choice((msg.HEARTBEAT, msg.DATA, msg.MEMBERSHIP, msg.RESUME, msg.GRANT, 77))
        header = msg.Header(kind, job, rng.randrange(-1, 5), rng.randrange(-1, 5), 1).pack()
        with suppress(zmq.Again):
            dealer.send_multipart([header, *(rng.randbytes(40) for _ in range(rng.randrange(3)))])
    return answers + _listen(dealer)


def _listen(dealer: "zmq.Socket[bytes]") -> list[list[bytes]]:
    answers = []
    until = time.monotonic() + _LISTEN_S
    while (left := until - time.monotonic()) > 0 and dealer.poll(int(1000 * left)):
        answers.append(dealer.recv_multipart())
    return answers


def _kind(parts: list[bytes]) -> str:
    names = {msg.WAIT: WAITS, msg.ACCEPTED: "welcome", msg.ERROR: "error"}
    return names.get(msg.unpack_header(parts[0]).kind, "other")
