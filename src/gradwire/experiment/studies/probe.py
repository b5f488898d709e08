"""Measures the network between real ranks, and their machines, through the engine.

The model is the simulator's (`runtime/network/network.py`): a message takes a latency, plus its
bytes over the bandwidth of the cards it passes. Three measurements find its parameters:

- Pairs, one after the other, send a long message to and fro while the others are silent: the card
  of a rank is as fast as the fastest pair it is in.
- Then all exchange with all, as collectives do, once with short messages, once with long ones. The
  short ones take the latency. If the long ones take longer than the cards need (a switch or a
  machine that all share), the bandwidth of everyone is lower by that factor.

Programs here use effects like any algorithm. So the probe is tested on the simulator, where it must
find the parameters of the simulated network.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import log10
from statistics import mean, median
from typing import Any

import torch
from torch import Tensor

from gradwire.core.group import Group
from gradwire.core.node import Node

_SHORT, _LONG = 64, 1 << 20  # bytes; long ones have at least these
_NOISE_FACTOR = 1.15  # speeds that differ by less than this count as equal
_MIN_STEPS = 4


def num_skipped(steps: int) -> int:
    """The number of steps of a real run that do not count: in the first quarter connections are
    made and memory is allocated."""
    if steps < _MIN_STEPS:
        raise ValueError(
            f"steps must be at least {_MIN_STEPS}, got {steps}: methods run for so many steps, and "
            "the first quarter of them does not count"
        )
    return steps // 4


@dataclass(frozen=True)
class NetworkMeasurement:
    """The parameters of the network, one value per rank."""

    latency_s: tuple[float, ...]
    bandwidth: tuple[float, ...]  # bytes per second, when all exchange with all
    alone: tuple[float, ...]  # bytes per second, when no other pair talks


async def measure_network(
    node: Node, long_nbytes: int, short_repeats: int = 30, long_repeats: int = 5
) -> NetworkMeasurement:
    """The program of every rank; all get the same result."""
    n = node.size
    assert n > 1, "a network has at least two ranks"
    short = torch.zeros(_SHORT, dtype=torch.uint8)
    long = torch.zeros(max(long_nbytes, _LONG), dtype=torch.uint8)
    alone = [0.0] * n
    for a in range(n):
        for b in range(a + 1, n):
            quick = await _to_and_fro(node, a, b, short, short_repeats)
            slow = await _to_and_fro(node, a, b, long, long_repeats)
            # At least a tenth of the time is the bytes'; less is a matter of chance.
            speed = (long.numel() - short.numel()) / max(slow - quick, slow / 10)
            alone[a], alone[b] = max(alone[a], speed), max(alone[b], speed)
    # In a full exchange each rank sends and receives n - 1 messages.
    quick = await _exchange(node, short, short_repeats)
    slow = await _exchange(node, long, long_repeats)
    latency_s = max(0.0, quick - (n - 1) * short.numel() / max(alone))
    needed = (n - 1) * long.numel() / min(alone)
    share = min(1.0, needed / max(slow - latency_s, 1e-12))
    speeds = _merge_equal([speed * share for speed in alone])
    return NetworkMeasurement((latency_s,) * n, speeds, tuple(alone))


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
    taken = median(seconds[1:]) / 2  # the first one includes work that is done once
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
    """The numbers of all ranks; waits until all ranks are here."""
    gathered = await Group(node, f"probe {name}").all_gather(torch.tensor(own, dtype=torch.float64))
    return [float(value) for value in gathered]


def _merge_equal(speeds: Sequence[float]) -> tuple[float, ...]:
    """One value for all if they differ only by noise."""
    if max(speeds) <= _NOISE_FACTOR * min(speeds):
        return (median(speeds),) * len(speeds)
    return tuple(speeds)


@dataclass(frozen=True)
class Machine:
    """Of the ranks, when all do the same at once."""

    compute_s: tuple[float, ...]  # a gradient, mean of each rank
    sigma: float  # by how much it varies: deviation of the logarithm
    latency_s: float  # of an exchange of short messages right after another one, in a step
    overhead_s: float  # of a step with an exchange, besides gradient, waiting and latency
    slowdown: float  # of coding, relative to one rank alone


Work = Callable[[Node], Awaitable[object]]


async def measure_machine(node: Node, gradient: Work, coding: Work, repeats: int = 40) -> Machine:
    """The program of every rank; all get the same result.

    Gradients are measured as they are computed in a run, after coding, which empties the caches. A
    step is a gradient and two or four exchanges. The last two of four take twice the latency of a
    message during work, which is longer than that between ranks that do nothing else. (One would
    not be enough: the last rank does not wait in every other exchange.) What the first two take
    beyond that, and beyond waiting for the slowest gradient, is an overhead.
    """
    group, short = Group(node, "in a step"), torch.zeros(_SHORT, dtype=torch.uint8)
    exchange = partial(group.all_to_all, [short] * node.size)

    async def two(node: Node) -> None:
        await gradient(node)
        for _ in range(2):
            await exchange()

    last_two = []

    async def four(node: Node) -> None:
        await two(node)
        start = await node.now()
        for _ in range(2):
            await exchange()
        last_two.append(await node.now() - start)

    async def together(work: Work, before: Work | None = coding) -> list[float]:
        await _gather_times(node, "begin", 0.0)
        return await _timed(node, work, repeats, before)

    own = await together(gradient)
    table = torch.tensor(own, dtype=torch.float64)
    rows = await Group(node, "gradients").all_gather(table)
    gradients = torch.stack(tuple(rows))  # [rank, repeat]
    with_two = mean(await _gather_times(node, "two", median(await together(two))))
    await together(four)
    pair_s = mean(await _gather_times(node, "pair", median(last_two[2:])))
    slowest_s = float(gradients.amax(dim=0).median())
    overhead_s = max(0.0, with_two - slowest_s - pair_s)
    all_s = mean(await _gather_times(node, "coding", median(await together(coding, None))))
    # Rank 0 alone, while the others wait.
    alone = median(await _timed(node, coding, repeats)) if node.rank == 0 else 0.0
    alone = (await _gather_times(node, "alone", alone))[0]
    return Machine(
        tuple(gradients.mean(dim=1).tolist()),
        float(gradients.clamp(min=1e-9).log().std(dim=1).median()),
        pair_s / 2,
        overhead_s,
        max(1.0, all_s / alone) if alone else 1.0,
    )


async def _timed(node: Node, work: Work, repeats: int, before: Work | None = None) -> list[float]:
    """Seconds of some work, again and again, each time after something else."""
    seconds = []
    for _ in range(repeats + 2):
        if before is not None:
            await before(node)
        start = await node.now()
        await work(node)
        seconds.append(await node.now() - start)
    return seconds[2:]


def settings_of(network: NetworkMeasurement, machine: Machine) -> dict[str, Any]:
    """The measurement as settings of `Config`, for a TOML file."""
    slowest = max(machine.compute_s)
    speeds = _merge_equal([slowest / seconds for seconds in machine.compute_s])
    bandwidths = [_bandwidth(speed) for speed in network.bandwidth]
    latency_s = max(machine.latency_s, network.latency_s[0])
    compute_s = slowest + machine.overhead_s
    return {
        "workers": len(network.bandwidth),
        "bandwidth": bandwidths[0] if len(set(bandwidths)) == 1 else ",".join(bandwidths),
        "latency": f"{1e6 * latency_s:.1f}us",
        # A rank that waits for all waits for the slowest of each step, so the variation matters.
        "compute": f"lognormal({compute_s:.4g}, sigma={machine.sigma:.3g})",
        "speeds": "1" if len(set(speeds)) == 1 else ",".join(f"{s:.3g}" for s in speeds),
        "coding": "measured",
        "coding_slowdown": round(machine.slowdown, 3),
    }


def _bandwidth(speed: float) -> str:
    """Bytes per second as the notation has bits, with four digits."""
    bits = 8 * speed
    unit, factor = next(pair for pair in (("G", 1e9), ("M", 1e6), ("k", 1e3)) if bits >= pair[1])
    return f"{bits / factor:.{max(0, 3 - int(log10(bits / factor)))}f}{unit}bit"
