"""Measures what ranks take of the processor: gradients, coding, and messages.

For `host = "cores(...)"` (`runtime/virtual/host.py`), where gradients, coding and messages of all
ranks share the cores of one machine. Times are processor time, so that waiting does not count:

- gradients, whole and layer by layer, while all ranks compute at once. What all ranks together get
  of the processor per second of the clock is the number of cores.
- messages, short and long, which all exchange with all after each gradient, as in a step: the
  thread that sends and receives, and all other threads of the process. One message to each rank, or
  many at once: then threads need not wake up for each.
- coding, likewise in a step, and after gradients of one rank alone, as the simulator codes: how
  many times as long it takes.

The time by the clock of such steps, and of long messages between two ranks, is measured, too:
`network_fit.py` finds the network for which the simulator needs as long.
"""

import os
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any

import torch

from gradwire.core.group import Group
from gradwire.core.node import Node

SHORT, LONG = 64, 200_000  # bytes
PAIRS = (SHORT, 200_000, 400_000)
PAIR_REPEATS = 10
MANY = 8  # messages to each rank at once
_SHORT_REPEATS, _LONG_REPEATS = 40, 12
_WARM_UP = 3

Cost = tuple[float, float]  # seconds, seconds per byte
Clocks = Callable[[], tuple[float, float]]  # processor time of this thread, of the process
Work = Callable[[Node], Awaitable[object]]


def processor_clocks() -> tuple[float, float]:
    return time.thread_time(), time.process_time()


@dataclass(frozen=True)
class Works:
    """What a rank computes."""

    gradient: Work  # as a whole
    # Layer by layer, last one first; calls back when the gradient of a layer is there.
    layers: Callable[[Node, Callable[[], None]], Awaitable[object]]
    coding: Work


@dataclass(frozen=True)
class Messages:
    """Steps of a gradient and an exchange of all with all. Of one message:"""

    send_s: float  # of the thread
    receive_s: float
    transfer_s: float  # of other threads, at both ends together
    step_s: float  # by the clock, of the step


@dataclass(frozen=True)
class Processor:
    """Mean values of all ranks. Seconds of a core, but for those by the clock."""

    cores: float  # that ranks get while all of them compute
    machine_cores: float  # that there are
    gradient_s: float
    layers_s: tuple[float, ...]  # until each layer's gradient is there, last layer first
    slowdown: float  # of coding in a step, relative to one rank alone
    short: Messages
    many: Messages  # short ones, many at once
    long: Messages
    pairs_s: tuple[float, ...]  # by the clock: messages of the lengths PAIRS between two ranks

    @property
    def send(self) -> Cost:
        return (self.short.send_s + self.many.send_s) / 2, self._per_byte("send_s")

    @property
    def receive(self) -> Cost:
        return min(self.short.receive_s, self.many.receive_s), self._per_byte("receive_s")

    @property
    def transfer(self) -> Cost:
        fixed_s = min(self.short.transfer_s, self.many.transfer_s)
        return fixed_s, self._per_byte("transfer_s") / 2

    @property
    def wake(self) -> tuple[float, float]:
        return self.short.receive_s - self.receive[0], self.short.transfer_s - self.transfer[0]

    def _per_byte(self, name: str) -> float:
        return max(0.0, getattr(self.long, name) - getattr(self.short, name)) / (LONG - SHORT)


def average(first: Processor, second: Processor) -> Processor:
    """Between two measurements, where other work on the machine changes."""
    return Processor(*(_average(a, b) for a, b in zip(_values(first), _values(second))))


def _values(chosen: Any) -> list[Any]:
    return [getattr(chosen, field.name) for field in fields(chosen)]


def _average(a: Any, b: Any) -> Any:
    if isinstance(a, Messages):
        return Messages(*(_average(x, y) for x, y in zip(_values(a), _values(b))))
    if isinstance(a, tuple):
        return tuple(_average(x, y) for x, y in zip(a, b))
    return (a + b) / 2


async def measure_processor(
    node: Node, works: Works, seconds: float = 1.0, clocks: Clocks = processor_clocks
) -> Processor:
    """The program of every rank; all get the same result. Gradients are computed for so long."""
    pairs_s = [
        (await gather(node, await pair_row(node, nbytes, PAIR_REPEATS)))[0] for nbytes in PAIRS
    ]
    await gather(node, 0.0)
    began, busy = await node.now(), clocks()[1]
    gradients = await _repeat(node, works.gradient, seconds, lambda: clocks()[1])
    cores = (clocks()[1] - busy) / max(1e-9, await node.now() - began)
    gradient_s = await mean(node, median(gradients))
    layers_s = await _layers(node, works, seconds, clocks)
    short = await _messages(node, works, SHORT, _SHORT_REPEATS, clocks)
    many = await _messages(node, works, SHORT, _SHORT_REPEATS, clocks, MANY)
    long = await _messages(node, works, LONG, _LONG_REPEATS, clocks)
    coding = []

    async def coded(node: Node) -> None:
        before = clocks()[0]  # other threads receive meanwhile
        await works.coding(node)
        coding.append(clocks()[0] - before)

    await step_row(node, SHORT, _SHORT_REPEATS, works.gradient, coding=coded)
    coding_s = await mean(node, median(coding[_WARM_UP:]))
    # Rank 0 alone, while the others wait: also after a gradient, as in the simulator.
    coding.clear()
    if node.rank == 0:
        for _ in range(_SHORT_REPEATS):
            await works.gradient(node)
            await coded(node)
    alone_s = (await gather(node, median(coding or [0.0])))[0]
    return Processor(
        sum(await gather(node, cores)),
        float(
            len(os.sched_getaffinity(0))
            if hasattr(os, "sched_getaffinity")
            else os.cpu_count() or 1
        ),
        gradient_s,
        layers_s,
        max(1.0, coding_s / alone_s) if alone_s else 1.0,
        short,
        many,
        long,
        tuple(pairs_s),
    )


async def gather(node: Node, own: float) -> list[float]:
    """The numbers of all ranks; waits until all ranks are here."""
    values = await Group(node, "processor").all_gather(torch.tensor(own, dtype=torch.float64))
    return [float(value) for value in values]


async def mean(node: Node, own: float) -> float:
    return sum(await gather(node, own)) / node.size


async def _repeat(
    node: Node, work: Work, seconds: float, clock: Callable[[], float]
) -> list[float]:
    """Processor seconds of some work, again and again for so long."""
    taken: list[float] = []
    began = await node.now()
    while len(taken) < 2 * _WARM_UP or await node.now() - began < seconds:
        start = clock()
        await work(node)
        taken.append(clock() - start)
    return taken[_WARM_UP:]


async def _layers(node: Node, works: Works, seconds: float, clocks: Clocks) -> tuple[float, ...]:
    marks: list[list[float]] = []

    async def layers(node: Node) -> None:
        began = clocks()[1]
        own: list[float] = []
        marks.append(own)
        await works.layers(node, lambda: own.append(clocks()[1] - began))

    await gather(node, 0.0)
    await _repeat(node, layers, seconds, lambda: clocks()[1])
    own = [median(times) for times in zip(*marks[_WARM_UP:])]
    return tuple([await mean(node, own_s) for own_s in own])


async def _messages(
    node: Node, works: Works, nbytes: int, repeats: int, clocks: Clocks, count: int = 1
) -> Messages:
    sent, received = [], []

    def on_exchange(before_s: float, between_s: float, after_s: float) -> None:
        sent.append(between_s - before_s)
        received.append(after_s - between_s)

    row = partial(step_row, node, nbytes, gradient=works.gradient, count=count)
    await row(_WARM_UP)
    await gather(node, 0.0)
    thread, process = clocks()
    steps = [
        await row(1, clock=lambda: clocks()[0], on_exchange=on_exchange) for _ in range(repeats)
    ]
    thread, process = (now - before for now, before in zip(clocks(), (thread, process)))
    number = count * (node.size - 1)
    return Messages(
        await mean(node, median(sent) / number),
        await mean(node, median(received) / number),
        await mean(node, max(0.0, process - thread) / (number * repeats)),
        await mean(node, sorted(steps)[repeats // 4]),  # other work only makes them slower
    )


async def step_row(
    node: Node,
    nbytes: int,
    repeats: int,
    gradient: Work,
    count: int = 1,
    coding: Work | None = None,
    clock: Callable[[], float] = lambda: 0.0,
    on_exchange: Callable[[float, float, float], None] | None = None,
) -> float:
    """Seconds by the clock of a step: a gradient, `count` messages from each to each, perhaps
    coding."""
    messages = [torch.zeros(nbytes, dtype=torch.uint8) for _ in range(node.size)]
    peers = [(node.rank + shift) % node.size for shift in range(1, node.size)] * count
    start = await node.now()
    for _ in range(repeats):
        await gradient(node)
        before = clock()
        for peer in peers:
            await node.send(peer, "exchange", messages[peer])
        between = clock()
        for peer in reversed(peers):
            await node.recv(peer, "exchange")
        if on_exchange is not None:
            on_exchange(before, between, clock())
        if coding is not None:
            await coding(node)
    return (await node.now() - start) / repeats


async def pair_row(node: Node, nbytes: int, repeats: int) -> float:
    """Seconds by the clock of a message from rank 0 to rank 1 or back, while others wait.

    The fastest: other work only makes them slower.
    """
    message, seconds = torch.zeros(nbytes, dtype=torch.uint8), []
    for number in range(repeats + 1):
        start = await node.now()
        if node.rank == 0:
            await node.send(1, ("to", number), message)
            await node.recv(1, ("fro", number))
        elif node.rank == 1:
            await node.recv(0, ("to", number))
            await node.send(0, ("fro", number), message)
        seconds.append((await node.now() - start) / 2)
    return min(seconds[1:])


def layer_shares(layers_s: Sequence[float]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Forward and backward times of all layers, as `layer_times = "given(...)"` has them.

    When the gradient of the last layer is there, the forward pass and its own backward pass are
    over: its backward pass counts as a third of what the others take on average.
    """
    first, count = layers_s[0], len(layers_s)
    later = [after - before for before, after in pairwise(layers_s)]
    last = min(first, sum(later) / max(1, len(later)) / 3)
    forward = (max(0.0, first - last) / count,) * count
    return forward, tuple(max(0.0, own) for own in reversed([last, *later]))
