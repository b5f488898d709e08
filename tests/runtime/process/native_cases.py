"""What ranks run to test native collectives, limits of what is unread, and payloads apart."""

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gradwire.architecture.allreduce.allreduce import AllReduce
from gradwire.core.errors import PeerLost
from gradwire.core.node import Framed, Membership, Node
from gradwire.runtime.process.accelerator import PayloadGroups
from gradwire.runtime.process.engine import ProcessEngine
from gradwire.runtime.process.frames import Headers
from gradwire.runtime.process.gloo import GlooTransport
from gradwire.runtime.process.spans import ProcessSpans
from gradwire.runtime.spans import SpanLog
from gradwire.testing import quadratics
from gradwire.testing.quadratics import Trained
from gradwire.training import program

SIZES = (1, 2, 7, 300_001)
STEPS = 10
_EXPECTED: dict[str, Trained] = {}


def prepare(size: int) -> None:
    """What the simulator says."""
    for case in ("identity", "fp16", "powersgd(1)"):
        _EXPECTED[case] = quadratics.train("bsp", "allreduce", case, workers=size, steps=STEPS)


def natively(rank: int, folder: Path) -> dict[str, Any]:
    transport = GlooTransport(headers=Headers(Membership))
    seen: dict[str, Any] = {}
    found = {}
    for job, native in enumerate((False, True)):
        engine = ProcessEngine(transport, timeout_s=20, job=job, native=native)
        found[native] = engine.run(_means), engine.ledger.snapshot()
        seen[f"num_native {native}"] = transport.num_native_means
    (theirs, counted), (ours, also_counted) = found[False], found[True]
    assert theirs is not None
    assert ours is not None
    seen["counted alike"] = counted == also_counted
    seen["close"] = [
        torch.allclose(a, b, rtol=1e-6, atol=1e-6) for a, b in zip(theirs, ours, strict=True)
    ]
    halves = [i for i, mean in enumerate(theirs) if mean.dtype in (torch.float16, torch.bfloat16)]
    seen["halves"] = [torch.equal(theirs[i], ours[i]) for i in halves]

    before = transport.num_native_means
    engine = ProcessEngine(transport, timeout_s=20, job=2, native=True)
    engine.spans = ProcessSpans(rank, SpanLog(transport.size, transport.size))
    seen["side by side"] = engine.run(_side_by_side)
    seen["collectives drawn"] = list(engine.spans.collectives.values())
    seen["num_native of those"] = transport.num_native_means - before

    seen["trained"] = [
        _differs(transport, 3 + i, *case) for i, case in enumerate(_EXPECTED.items())
    ]
    seen["unread"] = _unread(transport, rank)
    seen["arrived before"] = _arrived_before(transport, rank)
    transport.close()
    seen["both send"] = _both_send(rank)
    seen["apart"] = _apart()
    seen["copied before"] = _copied_before()
    return seen


async def _means(node: Node) -> list[torch.Tensor]:
    means = []
    for architecture in (AllReduce(), AllReduce(algorithm="gather")):
        for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
            for length in SIZES:
                x = (torch.arange(length) % 97 + node.rank / 3).to(dtype)
                means.append(await architecture.group(node, "x").mean(x))
    pair = AllReduce().group(node, "y", (0, 1)) if node.rank < 2 else None
    if pair is not None:  # others are elsewhere meanwhile
        means.append(await pair.mean(torch.ones(5) * node.rank))
    means.append(await AllReduce().group(node, "z").mean(torch.ones(5) * node.rank))
    return means


async def _side_by_side(node: Node) -> bool:
    """Programs of one rank that form means at the same time, in an order of their own."""

    async def other(number: int) -> list[float]:
        found = []
        for i in range(5):
            await node.sleep(0.001 * ((node.rank + number) % 3))
            group = AllReduce().group(node, f"other {number}")
            found.append(float((await group.mean(torch.full((9,), number + 10.0 * i)))[0]))
        return found

    tasks = [await node.spawn(other(number)) for number in range(3)]
    own = [float((await AllReduce().group(node, "own").mean(torch.ones(9)))[0]) for _ in range(5)]
    others = [await node.join(task) for task in tasks]
    last = await AllReduce().group(node, "own").mean(torch.ones(9))  # nobody is left: native
    expected = [[number + 10.0 * i for i in range(5)] for number in range(3)]
    return own == [1.0] * 5 and others == expected and bool((last == 1).all())


def _arrived_before(transport: GlooTransport, rank: int) -> bool:
    """Whether a message ends in the timeline when it arrives, also if rank 0 looks later."""
    spans = ProcessSpans(rank, SpanLog(transport.size, transport.size))
    looked_s = 0.0

    def wait_for_arrivals() -> None:
        nonlocal looked_s
        limit_s = time.monotonic() + 20
        while not all(transport._unread._nbytes[1:]):
            assert time.monotonic() < limit_s
            time.sleep(0.001)
        looked_s = time.monotonic()

    async def program(node: Node) -> None:
        if node.rank:
            await node.send(0, "x", torch.ones(9))
        else:
            await node.call(wait_for_arrivals)
            for src in range(1, node.size):
                await node.recv(src, "x")

    dist.barrier()  # or rank 0 takes them in an earlier run
    engine = ProcessEngine(transport, timeout_s=20, job=11)
    engine.spans = spans
    engine.run(program)
    ends = [span.end_s for span in spans.log.spans if span.lane == "receive"]
    return len(ends) == (transport.size - 1) * (rank == 0) and all(s < looked_s for s in ends)


def _differs(transport: GlooTransport, job: int, case: str, expected: Trained) -> float:
    plan = expected.plan
    engine = ProcessEngine(
        transport, evaluate=plan.task.gradients, timeout_s=20, job=job, native=True
    )
    rank = transport.rank
    replica = plan.initial_replicas()[rank]
    result = engine.run(lambda node: program.train(plan, node, replica, 0, STEPS))
    assert result is not None
    ledger = expected.engine.ledger
    assert engine.ledger.link_bytes[rank] == ledger.link_bytes[rank]
    assert engine.ledger.link_messages[rank] == ledger.link_messages[rank]
    return float((result.params - expected.replicas[rank].params).abs().max())


MEGABYTE = torch.ones(1 << 18)
NUM_EARLY = 40


def _unread(transport: GlooTransport, rank: int) -> dict[str, Any]:
    """Rank 1 sends much that rank 0 does not read yet, then what it waits for."""
    limit = 3 << 20
    transport._unread._max_nbytes = limit
    engine = ProcessEngine(transport, timeout_s=20, job=10, max_unread_nbytes=limit)
    seen: dict[str, Any] = {"most": 0, "in inbox": 0}

    async def program(node: Node) -> None:
        if node.rank == 1:
            for _ in range(NUM_EARLY):
                await node.send(0, "early", MEGABYTE)
            await node.send(0, "late", torch.ones(1))
        elif node.rank == 0:
            for _ in range(20):  # gradients are under way meanwhile
                await node.call(time.sleep, 0.01)
                await node.recv_within("nothing", 0.0)
                seen["most"] = max(seen["most"], *transport._unread._nbytes)
            seen["in inbox"] = engine.unread.nbytes
            await node.recv(1, "late")
            for _ in range(NUM_EARLY):
                await node.recv(1, "early")
            seen["in inbox, at last"] = engine.unread.nbytes

    engine.run(program)
    transport._unread._max_nbytes = 64 << 20
    return seen


def _both_send(rank: int) -> bool:
    """All send more than anyone may hold before they read anything."""
    transport = GlooTransport(max_bytes_posted=1 << 20, max_bytes_unread=1 << 20)
    engine = ProcessEngine(transport, timeout_s=20, max_unread_nbytes=1 << 20)

    async def program(node: Node) -> bool:
        for i in range(8):
            for peer in range(node.size):
                await node.send(peer, i, MEGABYTE)
        return all(
            [
                torch.equal(await node.recv(peer, i), MEGABYTE)
                for i in reversed(range(8))
                for peer in range(node.size)
            ]
        )

    result = engine.run(program)
    transport.close()
    return bool(result)


def _apart() -> bool:
    """Payloads go through two groups of their own, as over nccl."""
    groups = PayloadGroups(dist.new_group(), dist.new_group(), "cpu")
    transport = GlooTransport(headers=Headers(Membership), payloads=groups)

    async def program(node: Node) -> bool:
        for i in range(10):
            for peer in range(node.size):
                await node.send(peer, i, torch.full((1 + 1_000 * i * node.rank,), float(i)))
        await node.send_framed(0, "framed", Framed(Membership(node.rank, True), torch.ones(3)), 4)
        good = True
        for i in reversed(range(10)):
            for peer in range(node.size):
                got = await node.recv(peer, i)
                good &= torch.equal(got, torch.full((1 + 1_000 * i * peer,), float(i)))
        if node.rank == 0:
            framed = [await node.recv_each("framed") for _ in range(node.size)]
            good &= all(message.header.rank == src for src, message in framed)
        return good

    result = ProcessEngine(transport, timeout_s=20).run(program)
    transport.close()
    return bool(result)


class _Late:
    """Stands for a copy from an accelerator: its bytes are there when they are asked for."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.copy = torch.full_like(tensor, -1)

    def wait(self) -> torch.Tensor:
        return self.copy.copy_(self.tensor)


class Copying(GlooTransport):
    """Takes vectors of integers for tensors on an accelerator."""

    num_copies = 0

    def _needs_copy(self, data: torch.Tensor) -> bool:
        return data.dtype == torch.int64

    def _copy_to_host(self, data: torch.Tensor) -> Any:
        last = self._outgoing[-1].copy if self._outgoing else None
        if last is not None and last.tensor is data:
            return last
        self.num_copies += 1
        return _Late(data)


def _copied_before() -> tuple[bool, int]:
    """Messages stay in order where some wait for their copies, and one serves several peers."""
    transport = Copying()

    async def program(node: Node) -> bool:
        others = [peer for peer in range(node.size) if peer != node.rank]
        for i in range(6):
            x = torch.full((100_000 * (i % 2) + 1,), i + 10 * node.rank)
            for peer in others:
                await node.send(peer, "x", x if i % 3 else x.double())
        return all(
            [
                bool(((await node.recv(peer, "x")) == i + 10 * peer).all())
                for i in range(6)
                for peer in others
            ]
        )

    result = ProcessEngine(transport, timeout_s=20).run(program)
    transport.close()
    return bool(result), transport.num_copies


def killed(rank: int, folder: Path) -> dict[str, Any]:
    """Rank 1 is killed by a signal in the middle of native means."""
    transport = GlooTransport(close_s=2.0)
    if rank == 1:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()

    async def program(node: Node) -> None:
        while True:
            await AllReduce().group(node, "x").mean(torch.ones(300_000))

    engine = ProcessEngine(transport, timeout_s=30, native=True)
    began = time.monotonic()
    lost: PeerLost | None = None
    try:
        engine.run(program)
    except PeerLost as error:
        lost = error
    assert lost is not None
    took_s = time.monotonic() - began
    transport.close(lost.rank)
    return {"lost": lost.rank, "took_s": took_s}
