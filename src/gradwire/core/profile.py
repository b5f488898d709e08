"""How the time of a gradient divides among the layers of a model, and what a message costs.

Schedules decide by it what travels in one piece. All ranks of a run have the same profile.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from gradwire.core.replica import Bucket


@dataclass(frozen=True)
class Profile:
    """Of one model on one kind of machine and network.

    A layer is a module with parameters of its own; layers are in the order of the forward pass.
    """

    layers: tuple[Bucket, ...]  # what each holds of the flat vector
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    latency_s: float = 0.0  # of one exchange, however short
    bandwidth: float = float("inf")  # bytes of gradient exchanged per second

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
        """How long the exchange of so many values takes on its own."""
        return self.latency_s + 4 * numel / self.bandwidth


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
