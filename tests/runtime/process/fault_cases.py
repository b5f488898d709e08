"""What the ranks of the tests with real processes run, besides training."""

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gradwire.core.errors import PeerLost
from gradwire.core.group import Group
from gradwire.core.node import Framed, Membership, Node
from gradwire.runtime.process.engine import ProcessEngine, StuckError
from gradwire.runtime.process.frames import BLOCK_NBYTES, Headers
from gradwire.runtime.process.gloo import GlooTransport

_HEADERS = Headers(Membership)


def killed(rank: int, folder: Path) -> dict[str, Any]:
    """Rank 1 is killed by a signal while all form means; the others tell what they see."""
    if rank == 1:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()

    async def program(node: Node) -> None:
        await node.watch("changes")
        group = Group(node, "x")
        while True:
            await group.mean(torch.ones(300_000))

    # Rank 2 may post one message at a time: it is waiting in a send when the other is killed.
    transport = GlooTransport(close_s=2.0, max_bytes_posted=1 if rank == 2 else 64 << 20)
    engine = ProcessEngine(transport, timeout_s=20)
    try:
        engine.run(program)
    except PeerLost as error:
        lost = error
    noticed_s = engine.now

    async def members(node: Node) -> tuple[list[int], bool]:
        try:
            await node.recv(1, "anything")
        except PeerLost:
            await node.send(1, "x", torch.ones(3))  # goes nowhere
            return sorted(await node.members()), True
        return [], False

    there, raises = engine.run(members) or ([], False)
    transport.close(lost.rank)
    return {
        "lost": lost.rank,
        "notes": lost.__notes__,
        "noticed_s": noticed_s,
        "members": there,
        "raises": raises,
        "unread_by": [t.name for t in threading.enumerate() if t.name == "gradwire-recv-1"],
    }


def messages(rank: int, folder: Path) -> dict[str, Any]:
    """All kinds of messages; then rank 3 leaves, rank 2 sends rubbish, rank 1 says nothing."""
    # No more than one of the larger messages below is under way.
    transport = GlooTransport(headers=_HEADERS, max_bytes_posted=400_000)
    seen: dict[str, Any] = {}
    engine = ProcessEngine(transport, timeout_s=20, job=1)
    seen["kinds"] = engine.run(_kinds)
    seen["ledger"] = engine.ledger.link_bytes[rank]
    dist.barrier()
    if rank == 3:
        transport.close()
        return seen
    seen["left"] = _outcome(transport, 2, 3)
    dist.barrier(dist.new_group([0, 1, 2]))
    if rank == 2:
        for peer in (0, 1):
            rubbish = torch.arange(BLOCK_NBYTES).to(torch.uint8)
            transport._group.send([rubbish], peer, 0).wait()
        time.sleep(0.5)
        return seen
    seen["rubbish"] = _outcome(transport, 3, 2)
    if rank == 0:
        seen["silent"] = _outcome(transport, 4, 1, timeout_s=0.3)
        (folder / "seen").touch()
    else:
        until = time.monotonic() + 20
        while not (folder / "seen").exists() and time.monotonic() < until:
            time.sleep(0.01)
    return seen


def _outcome(transport: GlooTransport, job: int, src: int, timeout_s: float = 20) -> list[str]:
    async def program(node: Node) -> None:
        await node.recv(src, "never")

    try:
        ProcessEngine(transport, timeout_s=timeout_s, job=job).run(program)
    except (PeerLost, StuckError) as error:
        return [type(error).__name__, str(error), *getattr(error, "__notes__", [])]
    return []


_LENGTHS = (0, 1, 1_000, 40_000, 0, 90_000)


async def _kinds(node: Node) -> str:
    """Everyone sends to everyone, itself as well, in sizes that differ between ranks."""
    sent = 0
    for number, length in enumerate(_LENGTHS):
        for dst in range(node.size):
            data = torch.arange(length + node.rank, dtype=torch.int32).reshape(1, -1)
            await node.send(dst, ("x", number), data)
            sent += data.numel() * 4 * (dst != node.rank)
    header = Framed(Membership(node.rank, True))
    for dst in range(node.size):
        await node.send_framed(dst, "news", header, 4)
    for number, length in reversed(list(enumerate(_LENGTHS))):
        for src in range(node.size):
            got = await node.recv(src, ("x", number))
            assert torch.equal(got, torch.arange(length + src, dtype=torch.int32).reshape(1, -1))
    heard = [await node.recv_any("news") for _ in range(node.size)]
    assert sorted(src for src, _ in heard) == list(range(node.size))
    assert all(message == Framed(Membership(src, True)) for src, message in heard)
    assert await node.recv_within("news", 0.0) is None
    return "as sent"
