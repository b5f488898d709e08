"""Keys: every random draw names where it comes from, so it is the same wherever it is made.

A `Key` is a position in the streams of Philox 4x32-10 (Salmon et al. 2011): the seed is the
generator's 64-bit key; step, rank and purpose fill three counter words; the fourth numbers
the blocks of one draw. Two ranks that hold equal keys draw equal bits without communication;
`private(rank)` makes a key that only one rank holds.

    key = Key(seed=7).at(step).child("fc1.weight")     # shared by all ranks
    mask = key.uniform(1000)
    noise = key.private(rank).child("dropout").uniform(1000)
"""

import math
import zlib
from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire import kernels

_CPU = torch.device("cpu")
_SHARED = 0xFFFFFFFF  # the rank word of a key that every rank holds


@dataclass(frozen=True, slots=True)
class Key:
    seed: int
    step: int = 0
    rank: int | None = None
    purpose: int = 0  # 32-bit hash of the names given to `child`

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**64:
            raise ValueError(f"seed must lie in 0 .. 2**64 - 1, got {self.seed}")
        if not 0 <= self.step < 2**32:
            raise ValueError(f"step must lie in 0 .. 2**32 - 1, got {self.step}")
        if self.rank is not None and not 0 <= self.rank < _SHARED:
            raise ValueError(f"rank must lie in 0 .. 2**32 - 2, got {self.rank}")

    def at(self, step: int) -> "Key":
        return Key(self.seed, step, self.rank, self.purpose)

    def private(self, rank: int) -> "Key":
        return Key(self.seed, self.step, rank, self.purpose)

    def shared(self) -> "Key":
        return Key(self.seed, self.step, None, self.purpose)

    def child(self, name: str | int) -> "Key":
        """A key for a named purpose; children of different names are independent."""
        # The length distinguishes "a" then "b" from "ab".
        text = f"{len(str(name))}/{name}"
        return Key(self.seed, self.step, self.rank, zlib.crc32(text.encode(), self.purpose))

    @property
    def stream(self) -> tuple[int, int, int]:
        """Three words of the Philox counter, for kernels that draw by themselves."""
        return self.step, self.purpose, _SHARED if self.rank is None else self.rank

    def words(self, count: int, device: torch.device = _CPU) -> Tensor:
        """`count` independent 32-bit words, as int32."""
        return kernels.philox_words(self.seed, self.stream, count, device)

    def halfwords(self, count: int, device: torch.device = _CPU) -> Tensor:
        """`count` independent 16-bit words in 0 .. 65535, as int32: one block serves eight."""
        words = self.words((count + 1) // 2, device)
        return torch.stack([words & 0xFFFF, (words >> 16) & 0xFFFF], dim=1).reshape(-1)[:count]

    def uniform(self, count: int, device: torch.device = _CPU) -> Tensor:
        """Uniform on [0, 1) in steps of 2^-24, float32: every value is exact."""
        return ((self.words(count, device) >> 8) & 0xFFFFFF).to(torch.float32) * 2.0**-24

    def uniform64(self, count: int, device: torch.device = _CPU) -> Tensor:
        """Uniform on [0, 1) in steps of 2^-53, float64."""
        pairs = self.words(2 * count, device).to(torch.int64).reshape(-1, 2) & 0xFFFFFFFF
        return ((pairs[:, 0] << 21) | (pairs[:, 1] >> 11)).to(torch.float64) * 2.0**-53

    def normal(self, count: int, device: torch.device = _CPU) -> Tensor:
        """Standard normal, float32 (Box and Muller 1958, in float64)."""
        pairs = self.uniform64(2 * ((count + 1) // 2), device).reshape(-1, 2)
        radius = torch.sqrt(-2.0 * torch.log1p(-pairs[:, 0]))
        angle = (2.0 * math.pi) * pairs[:, 1]
        both = torch.stack([radius * torch.cos(angle), radius * torch.sin(angle)], dim=1)
        return both.reshape(-1)[:count].to(torch.float32)

    def integers(self, count: int, high: int, device: torch.device = _CPU) -> Tensor:
        """Uniform integers in 0 .. high - 1, int64; the bias is below high * 2^-53."""
        if high < 1:
            raise ValueError(f"integers needs high >= 1, got {high}")
        return (self.uniform64(count, device) * high).to(torch.int64)

    def permutation(self, count: int, device: torch.device = _CPU) -> Tensor:
        """A uniform permutation of 0 .. count - 1, int64."""
        return torch.argsort(self.uniform64(count, device), stable=True)
