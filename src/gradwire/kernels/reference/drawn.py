"""Elements kept at random in proportion to their magnitude: a first choice by 16 random bits."""

import torch
from torch import Tensor

from gradwire.kernels.reference.philox import philox_words


def draw_candidates(
    x: Tensor, factor: float, seed: int, stream: tuple[int, int, int], capacity: int
) -> tuple[Tensor, Tensor, Tensor]:
    words = philox_words(seed, stream, (x.numel() + 1) // 2, x.device)
    halves = torch.stack([words & 0xFFFF, (words >> 16) & 0xFFFF], dim=1).reshape(-1)[: x.numel()]
    indices = (x.abs() * factor + 1 >= halves).nonzero().reshape(-1)
    return indices, x[indices], halves[indices]
