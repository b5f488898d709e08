"""Which route OPAQUE payloads take: gathered by everyone, or scattered to the owners of shards."""

from torch import Tensor

from gradwire.core.chain import Chain
from gradwire.core.codec import Codec
from gradwire.core.ramp import Moment

# The route on which the owners of shards answer with the mean as it is, not encoded again.
ONE_WAY = "one_way"

# Below this many elements per shard the header of each shard's payload would count.
_MIN_SHARD = 1 << 14
# Elements, of three bytes or so, that a node need not send. It has them sent in the time that
# encoding again takes on a link of about 200 Mbit/s (benchmarks/shaped_training.py).
_LEAST_SAVED = 6 << 14


def scatters(route: str, size: int, numel: int, num_sent: int | None = None) -> bool:
    """Whether OPAQUE payloads take the scatter route. Depends only on what all ranks know.

    Scattering sends 2(n-1)/n payloads against n-1: less from three ranks on, if the shards
    are large enough. It encodes twice, which costs time, and accuracy that gathering does not.
    So where a codec sends only some elements, `num_sent`, it must save many of those.
    """
    if route != "auto":
        return route in ("scatter", ONE_WAY)
    if size < 3 or numel < size * _MIN_SHARD:
        return False
    return num_sent is None or (size - 1) * (size - 2) * num_sent >= size * _LEAST_SAVED


def num_sent(codec: Codec, x: Tensor) -> int | None:
    """How many elements of x a codec of a given density sends; None: of another kind.

    Of a density that changes with time those of the largest: if a codec left the scatter route, the
    owners of shards could not send what they owe to the mean.
    """
    first = codec.stages[0] if isinstance(codec, Chain) else codec
    density = getattr(first, "density", None)
    if isinstance(density, Moment):
        density = density.most
    return round(density * x.numel()) if isinstance(density, int | float) else None
