"""Philox 4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3").

A counter-based generator: block number b of a stream is a pure function of the key and the
counter, so any rank, device or thread can draw any part of a stream without the rest.
"""

import torch
from torch import Tensor

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)  # golden ratio and sqrt(3) - 1: bump the key every round
_MASK = 0xFFFFFFFF
_ROUNDS = 10


def _multiply(a: Tensor, multiplier: int) -> tuple[Tensor, Tensor]:
    """High and low word of a 32 x 32 bit product; int64 wraps, the mask drops the sign."""
    product = a * multiplier
    return (product >> 32) & _MASK, product & _MASK


def philox_words(
    seed: int, stream: tuple[int, int, int], count: int, device: torch.device, first_block: int = 0
) -> Tensor:
    """The first `count` 32-bit words of a stream from block `first_block` on, as int32 [count].

    The 64-bit `seed` is the Philox key. Of the 128-bit counter the first word numbers the
    blocks of four words, the other three are `stream`.
    """
    num_blocks = -(-count // 4)
    blocks = torch.arange(first_block, first_block + num_blocks, dtype=torch.int64, device=device)
    x0 = blocks & _MASK
    x1, x2, x3 = (torch.full_like(x0, word & _MASK) for word in stream)
    k0, k1 = seed & _MASK, (seed >> 32) & _MASK
    for _ in range(_ROUNDS):
        high0, low0 = _multiply(x0, _MULTIPLIERS[0])
        high1, low1 = _multiply(x2, _MULTIPLIERS[1])
        x0, x1, x2, x3 = high1 ^ x1 ^ k0, low1, high0 ^ x3 ^ k1, low0
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    words = torch.stack([x0, x1, x2, x3], dim=1).reshape(-1)[:count]
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
