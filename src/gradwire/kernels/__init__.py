"""The hot loops, behind one dispatch. Callers import from here, never from a backend."""

import torch
from torch import Tensor

from gradwire.kernels.reference import philox as _philox


def philox_words(
    seed: int, stream: tuple[int, int, int], count: int, device: torch.device, first_block: int = 0
) -> Tensor:
    """The first `count` 32-bit words of a Philox 4x32-10 stream, as int32 [count]."""
    return _philox.philox_words(seed, stream, count, device, first_block)
