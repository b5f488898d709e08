"""How the time of a gradient divides among the layers of a model, and what a message costs.

Schedules decide by it what travels in one piece. All ranks of a run have the same profile.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from gradwire.core.replica import Bucket


class Price(NamedTuple):
    """What the exchange of a bucket costs, as it is encoded and sent."""

    numel: int
    busy_s: float  # how long it holds up the next exchange
    delay_s: float  # how long after that its mean is there


@dataclass(frozen=True)
class Profile:
    """Of one model on one kind of machine and network.

    A layer is a module with parameters of its own; layers are in the order of the forward pass.
    """

    layers: tuple[Bucket, ...]  # what each holds of the flat vector
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    # Without prices, an exchange is one of float32:
    latency_s: float = 0.0  # of one exchange, however short
    bandwidth: float = float("inf")  # bytes of gradient exchanged per second
    prices: tuple[Price, ...] = ()  # of exchanges, from small ones to large ones

    def __post_init__(self) -> None:
        if not len(self.layers) == len(self.forward_s) == len(self.backward_s):
            raise ValueError(
                f"a profile has one forward and one backward time for each layer, got "
                f"{len(self.forward_s)} and {len(self.backward_s)} for {len(self.layers)} layers"
            )
        if min(*self.forward_s, *self.backward_s) < 0 or self.total_s <= 0:
            raise ValueError("times of layers must be at least 0, and their sum positive")

    @property
    def total_s(self) -> float:
        return sum(self.forward_s) + sum(self.backward_s)

    def forward_ends(self) -> list[float]:
        """The share of the gradient's time after which each layer's forward pass ends."""
        return [end / self.total_s for end in accumulate(self.forward_s)]

    def backward_ends(self) -> list[float]:
        """The share of the gradient's time after which each layer's gradient is there."""
        ends = accumulate(reversed(self.backward_s), initial=sum(self.forward_s))
        return [end / self.total_s for end in list(ends)[:0:-1]]

    def first_layer(self, bucket: Bucket) -> int:
        """The layer of a bucket whose gradient comes last."""
        return layer_at(self.layers, bucket.start)

    def exchange_s(self, numel: int) -> float:
        """How long the exchange of so many values holds up the next one."""
        return self._price(numel).busy_s

    def delay_s(self, numel: int) -> float:
        """How long after that the mean is there."""
        return self._price(numel).delay_s

    def _price(self, numel: int) -> Price:
        """Between two known sizes in proportion, and beyond the largest as from the last two."""
        prices = self.prices
        if not prices:
            return Price(numel, self.latency_s + 4 * numel / self.bandwidth, 0.0)
        if numel <= prices[0].numel or len(prices) == 1:
            return prices[0]
        number = min(bisect_left(prices, (numel,)), len(prices) - 1)
        low, high = prices[number - 1], prices[number]
        share = (numel - low.numel) / (high.numel - low.numel)
        busy_s = low.busy_s + share * (high.busy_s - low.busy_s)
        delay_s = low.delay_s + min(share, 1.0) * (high.delay_s - low.delay_s)
        return Price(numel, max(busy_s, high.busy_s) if share > 1 else busy_s, delay_s)


def layer_at(layers: Sequence[Bucket], position: int) -> int:
    """The number of the layer that holds an element of the flat vector."""
    return next(number for number, layer in enumerate(layers) if position < layer.stop)


def layers_of(tensors: Sequence[Bucket]) -> tuple[Bucket, ...]:
    """Tensors of one module (`fc1.weight`, `fc1.bias`) as one layer (`fc1`)."""
    layers: list[Bucket] = []
    for tensor in tensors:
        name = tensor.name.rpartition(".")[0] or tensor.name
        if layers and layers[-1].name == name:
            layers[-1] = Bucket(name, layers[-1].start, tensor.stop)
        else:
            layers.append(Bucket(name, tensor.start, tensor.stop))
    return tuple(layers)
