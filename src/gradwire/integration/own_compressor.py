"""A compressor of the user's own, in Horovod's convention: an object with two methods.

    compress(tensor) -> (compressed, context);   decompress(compressed, context) -> tensor

What it compresses to is averaged over all ranks, so it must be a tensor of floats whose mean makes
sense, of the same shape on all ranks.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gradwire.core.codec import State
from gradwire.core.group import Group
from gradwire.core.key import Key
from gradwire.core.reducer import Reduced, Reducer
from gradwire.core.spec import Spec


def is_compressor(value: Any) -> bool:
    return callable(getattr(value, "compress", None)) and callable(
        getattr(value, "decompress", None)
    )


@dataclass(frozen=True, repr=False)
class OwnCompressor(Reducer):
    """Averages what an object of the user makes of a tensor."""

    compressor: Any

    def __repr__(self) -> str:
        kind = self.compressor if isinstance(self.compressor, type) else type(self.compressor)
        return f"{kind.__module__}.{kind.__qualname__}"

    def init(self, spec: Spec, size: int) -> State:
        return {}

    async def mean(
        self, x: Tensor, state: State, key: Key, group: Group, residual: Tensor | None = None
    ) -> Reduced:
        if residual is not None:
            raise ValueError(f"{self!r} keeps what it needs itself: write it without feedback")
        node = group.node
        compressed, context = await node.call(self.compressor.compress, x)
        if not isinstance(compressed, Tensor) or not compressed.is_floating_point():
            raise TypeError(
                f"{self!r}: compress returns a tensor of floats and a context, got {compressed!r}"
            )
        averaged = await group.mean(compressed.reshape(-1))
        shaped = averaged.view(compressed.shape)
        mean = await node.call(self.compressor.decompress, shaped, context)
        return Reduced(mean.reshape(x.shape), lambda: x, state)
