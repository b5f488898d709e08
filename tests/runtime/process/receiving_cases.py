"""Messages are received while a program is busy with a call: large ones, by both transports."""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from gradwire.core.node import Node
from gradwire.runtime.process import expected
from gradwire.runtime.process.engine import ProcessEngine
from gradwire.runtime.process.gloo import GlooTransport
from runtime.process.parity_cases import connect

NUMEL = 1_000_000
LENGTHS = (10, 600_000, 700_000, 5, 1_500_000, 1_600_000, 600_000, 3_000_000, 2_000_000, 0, 900_000)


def run(rank: int, folder: Path) -> dict[str, int]:
    """How many messages came while rank 0 was busy, by transport. On the second one rank 1 is a
    server, and rank 2 the scheduler."""
    gloo, zeromq = GlooTransport(), connect(rank, 1, 1, folder)
    found = {
        "gloo": _received(ProcessEngine(gloo, 3, timeout_s=20), gloo._arrivals.qsize),
        "zeromq": _received(
            ProcessEngine(zeromq, 1, timeout_s=20), lambda: len(zeromq._inbox._deliveries)
        ),
    }
    zeromq.close()
    gloo.close()
    return found


def _received(engine: ProcessEngine, num_there: Callable[[], int]) -> int:
    programs = [partial(_busy, num_there=num_there), _talks, _waits]
    return engine.run(programs[engine.rank], serves=False) or 0


async def _busy(node: Node, num_there: Callable[[], int]) -> int:
    await node.send(1, "go", torch.ones(1))
    number = await node.call(_until, num_there, 2)
    for value in range(2):
        assert torch.equal(await node.recv(1, "data"), torch.full((NUMEL,), float(value)))
    await node.send(2, "end", torch.ones(1))
    return number


async def _talks(node: Node) -> None:
    await node.recv(0, "go")
    for value in range(2):
        await node.send(0, "data", torch.full((NUMEL,), float(value)))


async def _waits(node: Node) -> None:
    await node.recv(0, "end")


def _until(num_there: Callable[[], int], number: int) -> int:
    """Nobody asks the transport for messages meanwhile."""
    until = time.monotonic() + 15
    while num_there() < number and time.monotonic() < until:
        time.sleep(0.01)
    return num_there()


def lengths(rank: int, folder: Path) -> int:
    """Payloads of all lengths go both ways at once, longer than what is expected and shorter, and
    longer than what ever will be."""
    expected.MAX_NBYTES = 1 << 21
    transport = GlooTransport()

    async def exchange(node: Node) -> int:
        for number, nbytes in enumerate(LENGTHS):
            await node.send(1 - rank, "data", _filled(nbytes, number + rank))
        for number, nbytes in enumerate(LENGTHS):
            received = await node.recv(1 - rank, "data")
            assert torch.equal(received, _filled(nbytes, number + 1 - rank)), number
        return len(LENGTHS)

    number = ProcessEngine(transport, timeout_s=20).run(exchange)
    tags = [one.tag for one in transport._expected]
    transport.close()
    assert number == len(LENGTHS)
    return tags[1 - rank]


def _filled(nbytes: int, value: int) -> torch.Tensor:
    return torch.full((nbytes,), value % 251, dtype=torch.uint8)
