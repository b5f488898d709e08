"""Philox 4x32-10 (Salmon et al. 2011) in C: the words of reference/philox.py, bit for bit."""

import torch
from torch import Tensor

from gradwire.kernels.native._library import parallel

_MASK = 0xFFFFFFFF


def philox_words(
    seed: int, stream: tuple[int, int, int], count: int, device: torch.device, first_block: int = 0
) -> Tensor:
    words = torch.empty(count, dtype=torch.int32, device=device)
    parallel().gw_philox_words(
        seed & 0xFFFFFFFFFFFFFFFF,
        *(word & _MASK for word in stream),
        first_block & _MASK,
        words.data_ptr(),
        count,
    )
    return words
