"""Random words that every device draws alike."""

import torch
from torch import Tensor

from gradwire.kernels._checks import check_count
from gradwire.kernels._dispatch import InTriton, pick
from gradwire.kernels.native import philox as native
from gradwire.kernels.reference import philox as reference

_triton = InTriton("philox")


def philox_words(
    seed: int, stream: tuple[int, int, int], count: int, device: torch.device, first_block: int = 0
) -> Tensor:
    """`count` 32-bit words of a Philox 4x32-10 stream from a block on, as int32 [count].

    The 64-bit `seed` is the Philox key. Of the 128-bit counter the first word numbers the
    blocks of four words and wraps at 2^32, the other three are `stream`.
    """
    check_count("philox_words", "count", count)
    run = pick(device, native.philox_words, reference.philox_words, _triton.philox_words)
    return run(seed, stream, count, device, first_block)
