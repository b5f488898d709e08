"""What the network between real ranks can do, measured with messages of the engine itself.

The model is the simulator's (`runtime/network.py`): a message takes a latency, plus its bytes over
the bandwidth of the cards it passes. Three measurements find its parameters:

- Pairs, one after the other, send a long message to and fro while the others are silent: the card
  of a rank is as fast as the fastest pair it is in.
- Then all exchange with all, as collectives do, once with short messages, once with long ones. The
  short ones take the latency. If the long ones take longer than the cards need (a switch or a
  machine that all share), the bandwidth of everyone is lower by that factor.

Programs here are effects like any algorithm's. So the probe can be tried on the simulator, where it
must find the network that it runs on, and does.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from gradwire.core.group import Group
from gradwire.core.node import Node

_SHORT = 64  # bytes
_ALIKE = 1.15  # cards whose speeds differ by less than this are the same


@dataclass(frozen=True)
class Measured:
    """Of the network: one value per rank."""

    latency_s: tuple[float, ...]
    bandwidth: tuple[float, ...]  # bytes per second, when all exchange with all
    alone: tuple[float, ...]  # bytes per second, when no other pair talks


async def measure_network(
    node: Node, long_nbytes: int, short_repeats: int = 30, long_repeats: int = 5
) -> Measured:
    """The program of every rank; all get the same result."""
    n = node.size
    assert n > 1, "a network has at least two ranks"
    short = torch.zeros(_SHORT, dtype=torch.uint8)
    long = torch.zeros(max(long_nbytes, 1024), dtype=torch.uint8)
    alone = [0.0] * n
    for a in range(n):
        for b in range(a + 1, n):
            quick = await _to_and_fro(node, a, b, short, short_repeats)
            slow = await _to_and_fro(node, a, b, long, long_repeats)
            if slow > quick:
                speed = (long.numel() - short.numel()) / (slow - quick)
                alone[a], alone[b] = max(alone[a], speed), max(alone[b], speed)
    # In a full exchange each rank sends and receives n - 1 messages.
    quick = await _exchange(node, short, short_repeats)
    slow = await _exchange(node, long, long_repeats)
    latency_s = max(0.0, quick - (n - 1) * short.numel() / max(alone))
    needed = (n - 1) * long.numel() / min(alone)
    share = min(1.0, needed / max(slow - latency_s, 1e-12))
    speeds = _alike([speed * share for speed in alone])
    return Measured((latency_s,) * n, speeds, tuple(alone))


async def _to_and_fro(node: Node, a: int, b: int, x: Tensor, repeats: int) -> float:
    """Seconds of one way between two ranks, while the others wait."""
    await _gather_times(node, "begin", 0.0)
    seconds = []
    for _ in range(repeats + 1):
        start = await node.now()
        if node.rank == a:
            await node.send(b, "to", x)
            await node.recv(b, "fro")
        elif node.rank == b:
            await node.recv(a, "to")
            await node.send(a, "fro", x)
        seconds.append(await node.now() - start)
    taken = median(seconds[1:]) / 2  # the first one pays for what is done once
    return (await _gather_times(node, "end", taken))[a]


async def _exchange(node: Node, x: Tensor, repeats: int) -> float:
    """Seconds of an exchange of all with all: of one in a row, so that it does not matter that
    ranks begin at slightly different times. The best of three rows: the least disturbed.
    """
    group = Group(node, "exchange")
    rows = []
    for _ in range(3):
        await group.all_to_all([x] * node.size)
        start = await node.now()
        for _ in range(repeats):
            await group.all_to_all([x] * node.size)
        taken = await _gather_times(node, "row", (await node.now() - start) / repeats)
        rows.append(sum(taken) / len(taken))
    return min(rows)


async def _gather_times(node: Node, name: str, own: float) -> list[float]:
    """Everyone's number; nobody goes on before all are here."""
    gathered = await Group(node, f"probe {name}").all_gather(torch.tensor(own, dtype=torch.float64))
    return [float(value) for value in gathered]


def _alike(speeds: Sequence[float]) -> tuple[float, ...]:
    """One value for all where they differ by noise only."""
    if max(speeds) <= _ALIKE * min(speeds):
        return (median(speeds),) * len(speeds)
    return tuple(speeds)
