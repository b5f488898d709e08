"""Where the elements of a vector lie in blocks of a polar code, 64 blocks side by side.

d elements make B = ceil(d / N) blocks, which all use their first n = ceil(d / B) positions: a block
is shortened from its end. A polar code whose last inputs are zero has zeros at its last positions,
so those cost nothing. 64 blocks make a group, the last one may have fewer; in a group element
i * blocks + b is position i of block b, so that neighbours lie in different blocks and no bit ever
has to be moved to another lane. Fewer than B positions at the end stay empty.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.coding.polar.channel import CERTAIN

_WIDE = kernels.POLAR_LANES
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
    def num_groups(self) -> int:
        return -(-self.num_blocks // _WIDE)

    @property
    def _last(self) -> int:
        """Blocks of the last group."""
        return self.num_blocks - (self.num_groups - 1) * _WIDE

    def spread(self, ratios: Tensor, order: Tensor | None = None) -> Tensor:
        """int8 [numel] as [groups, N, 64]; what is shortened is certain, what is empty says 0.

        `order` is a permutation of the positions in use: position i gets those of order[i].
        """
        full, used = self.num_groups - 1, self.used
        cut = full * used * _WIDE
        if self.numel == self.num_groups * self.length * _WIDE:
            whole = ratios.view(self.num_groups, self.length, _WIDE)
            return whole if order is None else whole[:, order]
        out = ratios.new_zeros(self.num_groups, self.length, _WIDE)
        out[:, used:] = CERTAIN
        out[:full, :used] = ratios[:cut].view(full, used, _WIDE)
        last = ratios.new_zeros(used * self._last)
        last[: self.numel - cut] = ratios[cut:]
        out[full, :used, : self._last] = last.view(used, self._last)
        if order is not None:
            out[:, :used] = out[:, order]
        return out

    def bits(self, word: Tensor, order: Tensor | None = None) -> Tensor:
        """Bits of [groups, N, 8], one for each element, packed in the order of the elements."""
        rows = word[:, : self.used] if order is None else word[:, order.argsort()]
        return self.join(rows)[: -(-self.numel // 8)]

    def num_bytes(self, rows: int) -> int:
        """Packed bytes of `rows` rows of all blocks."""
        return -(-rows * self.num_blocks // 8)

    def join(self, rows: Tensor) -> Tensor:
        """Some rows of all groups, uint8 [groups, rows, 8], packed without empty lanes."""
        full, count = self.num_groups - 1, rows.shape[1]
        if self._last == _WIDE:
            return rows.reshape(-1)
        last = _bits(rows[full], count * _WIDE).view(count, _WIDE)[:, : self._last]
        return torch.cat([rows[:full].reshape(-1), kernels.pack_uints(last, 1)])

    def cut(self, packed: Tensor, rows: int) -> Tensor:
        """The inverse of `join`: uint8 [groups, rows, 8]; lanes that are empty hold zeros."""
        full, width = self.num_groups - 1, self._last
        if width == _WIDE:
            return packed.view(self.num_groups, rows, 8)
        split = full * rows * 8
        last = packed.new_zeros(rows, _WIDE, dtype=torch.int32)
        last[:, :width] = _bits(packed[split:], rows * width).view(rows, width)
        tail = kernels.pack_uints(last, 1).view(1, rows, 8)
        return torch.cat([packed[:split].view(full, rows, 8), tail])


def _bits(packed: Tensor, count: int) -> Tensor:
    return kernels.unpack_uints(packed.reshape(-1)[: -(-count // 8)], 1, count)
