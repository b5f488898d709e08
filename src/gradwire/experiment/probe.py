"""What the network between real ranks and their machines can do, measured through the engine.

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

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from math import log
from statistics import mean, median, stdev
from typing import Any

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
    ranks begin at slightly different times. The middle one of three rows.
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
    return median(rows)


async def _gather_times(node: Node, name: str, own: float) -> list[float]:
    """Everyone's number; nobody goes on before all are here."""
    gathered = await Group(node, f"probe {name}").all_gather(torch.tensor(own, dtype=torch.float64))
    return [float(value) for value in gathered]


def _alike(speeds: Sequence[float]) -> tuple[float, ...]:
    """One value for all where they differ by noise only."""
    if max(speeds) <= _ALIKE * min(speeds):
        return (median(speeds),) * len(speeds)
    return tuple(speeds)


@dataclass(frozen=True)
class Machine:
    """Of the ranks: what a gradient takes, and by how much coding is slower when all code."""

    compute_s: tuple[float, ...]  # when all compute at once: mean of each rank
    sigma: float  # by how much it varies: deviation of the logarithm
    slowdown: float


Work = Callable[[Node], Awaitable[object]]


async def measure_machine(node: Node, gradient: Work, coding: Work, repeats: int = 40) -> Machine:
    """The program of every rank; all get the same result."""
    await _gather_times(node, "begin", 0.0)
    own = await _timed(node, gradient, repeats)
    compute_s = await _gather_times(node, "compute", mean(own))
    sigmas = await _gather_times(node, "sigma", stdev(map(log, own)))
    together = max(await _gather_times(node, "coding", median(await _timed(node, coding, 15))))
    # Rank 0 alone, while the others wait.
    alone = median(await _timed(node, coding, 15)) if node.rank == 0 else 0.0
    alone = (await _gather_times(node, "alone", alone))[0]
    return Machine(tuple(compute_s), median(sigmas), max(1.0, together / alone))


async def _timed(node: Node, work: Work, repeats: int) -> list[float]:
    """Seconds of some work, again and again."""
    seconds = []
    for _ in range(repeats + 2):
        start = await node.now()
        await work(node)
        seconds.append(await node.now() - start)
    return seconds[2:]


def settings_of(network: Measured, machine: Machine) -> dict[str, Any]:
    """What the simulator is told, as settings of `Config`: the same words in a TOML file."""
    slowest = max(machine.compute_s)
    speeds = _alike([slowest / seconds for seconds in machine.compute_s])
    bandwidths = [f"{8 * speed / 1e6:.4g}Mbit" for speed in network.bandwidth]
    same = len(set(network.bandwidth)) == 1
    return {
        "workers": len(network.bandwidth),
        "bandwidth": bandwidths[0] if same else ",".join(bandwidths),
        "latency": f"{1e6 * network.latency_s[0]:.4g}us",
        # Who waits for all waits for the slowest of each step: that it varies matters.
        "compute": f"lognormal({slowest:.4g}, sigma={machine.sigma:.3g})",
        "speeds": "1" if len(set(speeds)) == 1 else ",".join(f"{s:.3g}" for s in speeds),
        "charge_coding": True,
        "coding_slowdown": round(machine.slowdown, 3),
    }
