"""What the ranks of test_posting.py run: memory that is written again after an exchange."""

import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.core.group import Group
from gradwire.core.node import Node
from gradwire.runtime.process.gloo import GlooTransport
from gradwire.runtime.process.posting import PostingEngine

STEPS = 4
LARGE = 1 << 23  # elements: they do not leave at once


def run(rank: int, folder: Path) -> Any:
    transport = GlooTransport()
    engine = PostingEngine(transport, timeout_s=60)
    thread = threading.Thread(target=engine.serve, daemon=True)
    thread.start()
    found = {"next": _next_step(engine), "large": _large(engine), "both": _both(engine)}
    dist.barrier()
    engine.close()
    thread.join()
    transport.close()
    return found


def _next_step(engine: PostingEngine) -> list[list[float]]:
    """Rank 0 has its messages unread before it sends, so that it takes all steps at a stretch."""
    x, means = torch.zeros(4), []
    ended: Future[None] = Future()

    async def wait(node: Node) -> None:
        if node.rank == 0:
            await node.recv(1, "all sent")

    async def exchange(node: Node) -> Tensor:
        group = Group(node, "steps")
        gathered = await group.all_gather(x)
        return torch.stack(gathered).mean(0)

    async def send_all(node: Node) -> list[Tensor]:
        for step in range(STEPS):
            await node.send(0, ("steps", 1), torch.full((4,), float(step)))
        await node.send(0, "all sent", x)
        return [await node.recv(0, ("steps", 1)) for _ in range(STEPS)]

    if engine.rank == 1:
        return [received.tolist() for received in engine.post(send_all).result()]
    engine.post(wait).result()

    def take_step(done: "Future[Tensor] | None") -> None:
        if done is not None:
            means.append(done.result().tolist())
        if len(means) == STEPS:
            ended.set_result(None)
            return
        x.fill_(10.0 * len(means))
        engine.post(exchange, borrowed=x).add_done_callback(take_step)

    take_step(None)
    ended.result()
    return means


def _large(engine: PostingEngine) -> float:
    """A vector that is written again as soon as its program has ended."""
    if engine.rank == 0:

        async def send(node: Node) -> None:
            await node.send(1, "large", x)

        x = torch.ones(LARGE)
        done = engine.post(send, borrowed=x)
        done.add_done_callback(lambda _: x.fill_(-1))
        done.result()
        return 1.0

    async def receive(node: Node) -> Tensor:
        return await node.recv(0, "large")

    return float(engine.post(receive).result().min())


def _both(engine: PostingEngine) -> list[int]:
    """Parts of one vector under way at once; what is no part of it is not copied."""
    x, other = torch.arange(8.0), torch.ones(4)

    async def exchange(node: Node, part: int) -> Tensor:
        own = x[4 * part : 4 * part + 4]
        gathered = await Group(node, f"part {part}").all_gather(own)
        await Group(node, f"other {part}").all_gather(other)
        return gathered[1 - node.rank]

    futures = [
        engine.post(lambda node, part=part: exchange(node, part), borrowed=x) for part in range(2)
    ]
    received = torch.cat([future.result() for future in futures])
    assert not engine._borrowed._copies
    return [int(value) for value in received]
