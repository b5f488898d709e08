"""How well each input of a polar code is known, by drawing from the channel.

Successive cancellation sees input i through the channel and the inputs before it. If those are
known to be zero, as are all the others, what it sees is a ratio L, and log2(1 + e^-L) averaged over
many draws is the entropy that is left of the input. All arithmetic is on integers, so that the
inputs come in the same order on every machine.
"""

import hashlib
import math
from functools import lru_cache

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.coding.polar.cache import cached_tensor
from gradwire.coding.polar.channel import CERTAIN, UNITS, bsc_table
from gradwire.core.key import Key

_NUM_POSITIONS = 1 << 27  # positions drawn in all
_MIN_GROUPS, _MAX_GROUPS = 8, 1 << 11
_CHUNK_POSITIONS = 1 << 21  # positions drawn at a time


def scores(n: int, distortion: float, groups: int | None = None) -> Tensor:
    """`entropies` for BSC(D)."""
    return entropies(n, bsc_table(distortion), groups)


def entropies(
    n: int, channel: Tensor, groups: int | None = None, used: int | None = None
) -> Tensor:
    """What is left of each of n inputs, int64 [n] in units that grow with the number of draws.

    `channel` is a table as `channel.bsc_table` makes it, `groups` how often 64 blocks are drawn.
    Positions from `used` on are shortened: known for certain. Kept in a file: see `cache.py`.
    """
    if groups is None:
        groups = max(_MIN_GROUPS, min(_MAX_GROUPS, _NUM_POSITIONS // (64 * n)))
    table = hashlib.sha256(channel.numpy().tobytes()).hexdigest()
    question = f"monte_carlo n {n}, channel {table}, groups {groups}, used {used}"
    return cached_tensor(
        question, n, torch.int64, lambda: _sample_entropies(n, channel, groups, used)
    )


def _sample_entropies(n: int, channel: Tensor, groups: int, used: int | None) -> Tensor:
    key = Key(0).child("polar construction")
    total = torch.zeros(n, dtype=torch.int64, device="cpu")
    at_once = max(1, _CHUNK_POSITIONS // (64 * n))
    for start in range(0, groups, at_once):
        count = min(at_once, groups - start)
        draws = key.child(start).halfwords(count * n * 64, torch.device("cpu"))
        llr = channel[draws.to(torch.int64)].view(count, n, 64)
        if used is not None:
            llr[:, used:] = CERTAIN
        total += kernels.polar_genie(llr, _costs())
    return total


@lru_cache(maxsize=1)
def _costs() -> Tensor:
    bits = [math.log2(1 + math.exp(-ratio / UNITS)) for ratio in range(-127, 128)]
    return torch.tensor([round(value * 2**20) for value in bits], dtype=torch.int32, device="cpu")
