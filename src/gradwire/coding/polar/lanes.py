"""Where the elements of a vector lie in blocks of a polar code, up to 64 blocks side by side.

d elements make B = ceil(d / N) blocks, which all use their first n = ceil(d / B) positions: a block
is shortened from its end. A polar code whose last inputs are zero has zeros at its last positions,
so those cost nothing. 64 blocks make a group, the last one may have fewer; in a group element
i * blocks + b is position i of block b, so that neighbours lie in different blocks and no bit ever
has to be moved to another lane. Fewer than B positions at the end stay empty. If there are at most
32 blocks there are fewer lanes to compute; what is sent does not depend on how many.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.coding.polar.channel import CERTAIN

_SHORTEST = 64


@dataclass(frozen=True)
class Lanes:
    """The blocks of a vector of `numel` >= 1 elements, at most `block` positions each."""

    numel: int
    block: int

    @property
    def length(self) -> int:
        """N: a power of two, no longer than it must be."""
        return max(_SHORTEST, min(self.block, 1 << (self.numel - 1).bit_length()))

    @property
    def num_blocks(self) -> int:
        return -(-self.numel // self.length)

    @property
    def used(self) -> int:
        """n: positions of every block that are used."""
        return -(-self.numel // self.num_blocks)

    @property
    def width(self) -> int:
        """Lanes of a group."""
        return kernels.polar_width(self.num_blocks)

    @property
    def num_groups(self) -> int:
        return -(-self.num_blocks // self.width)

    def spread(self, ratios: Tensor, order: Tensor | None = None) -> Tensor:
        """int8 [numel] as [groups, N, lanes]; shortened positions are certain, empty ones 0.

        `order` is a permutation of the positions in use: position i gets those of order[i].
        """
        if self.numel == self.num_groups * self.length * self.width:
            whole = ratios.view(self.num_groups, self.length, self.width)
            return whole if order is None else whole[:, order]
        out = kernels.polar_fill(ratios, self.num_blocks, self.length, self.width, CERTAIN)
        if order is not None:
            out[:, : self.used] = out[:, order]
        return out

    def bits(self, word: Tensor, order: Tensor | None = None) -> Tensor:
        """Bits of [groups, N, lanes / 8], one for each element, packed in their order."""
        rows = word[:, : self.used] if order is None else word[:, order.argsort()]
        return self.join(rows)[: -(-self.numel // 8)]

    def num_bytes(self, rows: int) -> int:
        """Packed bytes of `rows` rows of all blocks."""
        return -(-rows * self.num_blocks // 8)

    def join(self, rows: Tensor) -> Tensor:
        """Some rows of all groups, uint8 [groups, rows, lanes / 8], packed without empty lanes."""
        if self.num_blocks % self.width == 0:
            return rows.reshape(-1)
        return kernels.join_lanes(rows, self.num_blocks)

    def cut(self, packed: Tensor, rows: int) -> Tensor:
        """The inverse of `join`: uint8 [groups, rows, lanes / 8]; empty lanes hold zeros."""
        if self.num_blocks % self.width == 0:
            return packed.view(self.num_groups, rows, self.width // 8)
        return kernels.cut_lanes(packed, self.num_blocks, rows, self.width)


_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


def select(lanes: Tensor, positions: Tensor) -> Tensor:
    """Rows [groups, positions, k] of uint8 [groups, n, k]."""
    words = lanes.view(_WORDS[lanes.shape[2]])[..., 0]
    chosen = words.index_select(1, positions.to(lanes.device))
    return chosen.unsqueeze(-1).view(torch.uint8)


def spread(rows: Tensor, positions: Tensor, n: int) -> Tensor:
    """The inverse of `select`, zero elsewhere."""
    dtype = _WORDS[rows.shape[2]]
    words = torch.zeros(rows.shape[0], n, dtype=dtype, device=rows.device)
    if positions.numel():
        rows = rows.clone() if rows.storage_offset() % rows.shape[2] else rows.contiguous()
        words.index_copy_(1, positions.to(rows.device), rows.view(dtype)[..., 0])
    return words.unsqueeze(-1).view(torch.uint8)
