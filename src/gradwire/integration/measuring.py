"""Schedules that decide by times, in a user's loop: measured during the first steps.

`mgwfbp` without groups needs to know when each gradient is there and what an exchange costs. For a
few steps all gradients leave together at the end of the backward pass, and hooks note when each
came. Then parts of the largest tensor, of several sizes, are exchanged as buckets are: alone, and
several at once (`training/prices.py` explains the two). All ranks get the gradients' times of rank
0, and the longest time of any rank for each exchange; so all decide alike, once.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from statistics import median

import torch
from torch import Tensor

from gradwire.core.errors import WireError
from gradwire.core.group import Group
from gradwire.core.node import Node
from gradwire.core.profile import Price, Profile, layers_of
from gradwire.core.replica import Bucket
from gradwire.core.spec import Placed
from gradwire.integration.exchange import Exchange
from gradwire.training.layer_times import durations

_NUM_STEPS = 4  # after the first, in which memory is allocated
_TOGETHER = 4  # exchanges at once
_REPEATS = 3
_SMALLEST, _LARGEST, _FACTOR = 256, 1 << 17, 8  # elements
_LEAST_S = 1e-9  # no layer takes none

Named = Sequence[tuple[str, Tensor]]


class Measuring:
    """The times of gradients in the first steps, and then what all ranks decide by."""

    def __init__(self, named: Named) -> None:
        self._named = named
        self._events: dict[int, float | torch.cuda.Event] = {}  # by parameter, in this step
        self._steps: list[dict[int, float]] = []  # seconds since the first gradient

    def gradient_is_there(self, parameter: Tensor) -> None:
        event: float | torch.cuda.Event = time.perf_counter()
        if parameter.is_cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
        self._events[id(parameter)] = event

    def end_step(self) -> bool:
        """Whether enough has been measured. All ranks have taken as many steps."""
        self._steps.append(_seconds(self._events))
        self._events = {}
        return len(self._steps) > _NUM_STEPS

    def profiles(self, exchange: Exchange) -> Callable[[Sequence[Bucket]], Profile]:
        """What schedules decide by, given tensors in order. All ranks call it together."""
        name, largest = max(self._named, key=lambda own: own[1].numel())
        exchanged = _Pricing(exchange, name, largest)
        numels = priced_numels(largest.numel())
        measured = [seconds for numel in numels for seconds in exchanged.seconds(numel)]
        own = torch.tensor([*self._medians(), *measured], dtype=torch.float64)
        rows = exchange.communicator.post(lambda node: _gathered(node, exchange.label, own))
        everyone = torch.stack(rows.result())
        count = len(self._named)
        gradients = everyone[0, :count].tolist()
        slowest = everyone[:, count:].max(0).values.view(-1, 2).tolist()
        seconds = {name: own for (name, _), own in zip(self._named, gradients)}
        prices = tuple(price(numel, *own) for numel, own in zip(numels, slowest))
        return lambda tensors: profile_of(tensors, seconds, prices)

    def _medians(self) -> list[float]:
        """When each gradient came; of those that never came, with the last one."""
        steps = self._steps[1:]
        last = max((median(own.values()) for own in steps if own), default=0.0)
        found = []
        for _, parameter in self._named:
            known = [own[id(parameter)] for own in steps if id(parameter) in own]
            found.append(median(known) if known else last)
        return found


class _Pricing:
    """Exchanges parts of a tensor, as buckets of its name, and forgets what they leave behind."""

    def __init__(self, exchange: Exchange, name: str, tensor: Tensor) -> None:
        self._exchange, self._name, self._tensor = exchange, name, tensor
        draw = torch.Generator().manual_seed(exchange.settings.seed)
        x = torch.randn(min(tensor.numel(), _LARGEST), generator=draw)
        self._x = x.to(tensor.device, tensor.dtype)

    def seconds(self, numel: int) -> tuple[float, float]:
        """Of one exchange alone, and of several at once."""
        whole = self._exchange
        communicator = whole.communicator
        part = Exchange(communicator, whole.settings, f"{whole.label}priced {numel} ")
        layout = (_rows(self._name, self._tensor, numel),)

        def start(number: int, x: Tensor) -> "Future[Tensor]":
            return communicator.post(
                lambda node: part.average(node, str(number), layout, x, 0),
                num_collectives=part.num_collectives,
            )

        def run(count: int) -> float:
            parts = [self._x[:numel].clone() for _ in range(count)]
            if self._x.is_cuda:
                torch.cuda.synchronize(self._x.device)
            communicator.post(lambda node: _gathered(node, part.label, _NOTHING)).result()
            began = time.perf_counter()
            for future in [start(number, x) for number, x in enumerate(parts)]:
                future.result()
            seconds = time.perf_counter() - began
            part.finish_step()
            return seconds

        run(1)  # some methods begin in another way
        alone_s = min(run(1) for _ in range(_REPEATS))
        return alone_s, min(run(_TOGETHER) for _ in range(_REPEATS))


_NOTHING = torch.empty(0, dtype=torch.float64)


def priced_numels(largest: int) -> list[int]:
    """Sizes of buckets whose exchange is measured, from small ones to large ones."""
    numels = [min(largest, _LARGEST)]
    while numels[-1] >= _FACTOR * _SMALLEST:
        numels.append(numels[-1] // _FACTOR)
    return numels[::-1]


def price(numel: int, alone_s: float, together_s: float) -> Price:
    busy_s = max(0.0, together_s - alone_s) / (_TOGETHER - 1)
    return Price(numel, busy_s, max(0.0, alone_s - busy_s))


def profile_of(
    tensors: Sequence[Bucket], seconds: dict[str, float], prices: tuple[Price, ...]
) -> Profile:
    """`seconds`: when the gradient of each tensor comes, after the first one."""
    layers = layers_of(tensors)
    ends = [
        max(seconds[t.name] for t in tensors if layer.start <= t.start < layer.stop)
        for layer in layers
    ]
    backward = [max(_LEAST_S, own) for own in durations(ends[::-1], 0.0)[::-1]]
    return Profile(layers, (0.0,) * len(layers), tuple(backward), prices=prices)


def _seconds(events: dict[int, float | torch.cuda.Event]) -> dict[int, float]:
    """Since the first of them."""
    found: dict[int, float] = {}
    first = next(iter(events.values()), None)
    for key, event in events.items():
        if isinstance(event, torch.cuda.Event):
            event.synchronize()
            found[key] = first.elapsed_time(event) / 1e3 if isinstance(first, type(event)) else 0.0
        else:
            found[key] = event - first if isinstance(first, float) else 0.0
    return found


def _rows(name: str, tensor: Tensor, numel: int) -> Placed:
    """So many elements of a tensor, as whole rows if there are some."""
    row = max(1, tensor.numel() // max(1, len(tensor))) if tensor.dim() > 1 else 1
    shape = (numel // row, *tensor.shape[1:]) if row > 1 and not numel % row else (numel,)
    return name, 0, numel, tuple(shape)


async def _gathered(node: Node, label: str, own: Tensor) -> list[Tensor]:
    rows = list(await Group(node, f"{label}measured").all_gather(own))
    for rank, row in enumerate(rows):
        is_good = row.dtype is own.dtype and row.shape == own.shape
        if not (is_good and bool((row.isfinite() & (row >= 0)).all())):
            raise WireError(f"rank {rank} sent what are no {own.numel()} measured times")
    return rows
