"""All-reduce on a two-dimensional torus (Mikami et al. 2018, "Massively distributed SGD").

    in each row:      reduce-scatter around the ring: every rank has one piece of the row's sum
    in each column:   ring all-reduce of that piece
    in each row:      all-gather around the ring

Rank r is in row r // cols and column r % cols. With N bytes, latency a and b seconds per byte it
takes exactly

    2(cols-1)(a + bN/cols) + 2(rows-1)(a + bN/(rows cols))

and 2(n-1)/n N bytes leave each rank, as few as around one ring, in 2(rows + cols - 2) steps
rather than 2(n-1).

When to use it: for long vectors on many ranks, and on machines that are wired as a torus.

Without `rows` and `cols` the torus is as square as the number of workers allows, with no more rows
than columns; a prime number gives one row, which is the ring. With one of them the other follows.
So it is in exchanges among some of the workers, whatever `rows` and `cols` say.

Messages that are gathered and payloads that merge go around rows and columns, too. `all_to_all`
stays direct.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from gradwire.architecture.allreduce import _rings
from gradwire.architecture.allreduce._sums import addend, divide_sum
from gradwire.architecture.allreduce.ring import RingGroup
from gradwire.core.group import Group, Merging
from gradwire.core.node import Node
from gradwire.core.protocols import Architecture


@dataclass(frozen=True, repr=False)
class Torus2d(Architecture):
    """Reduce-scatter in rows, all-reduce in columns, all-gather in rows."""

    rows: int = 0  # 0: chosen for the number of workers
    cols: int = 0

    paper = "Mikami et al. 2018, Massively distributed SGD: ImageNet/ResNet-50 in a flash"
    examples = ("torus2d", "torus2d(1)", "torus2d(cols=1)")

    def __post_init__(self) -> None:
        if self.rows < 0 or self.cols < 0:
            raise ValueError(
                f"torus2d: rows and cols are positive, or 0 to leave them open, got "
                f"rows={self.rows}, cols={self.cols}"
            )

    def check(self, num_workers: int) -> None:
        self.shape(num_workers)

    def group(self, node: Node, label: str, members: Sequence[int] | None = None) -> Group:
        size = node.size if members is None else len(members)
        # A subset of the workers has no configured shape: one is chosen.
        shape = self.shape(size) if size == node.size else Torus2d().shape(size)
        return Torus2dGroup(node, label, "gather", members, shape[1])

    def shape(self, size: int) -> tuple[int, int]:
        """Rows and columns for so many workers."""
        rows, cols = self.rows, self.cols
        if rows == cols == 0:
            rows = next(r for r in range(math.isqrt(size), 0, -1) if size % r == 0)
        rows = rows or size // cols
        cols = cols or size // rows
        if rows * cols != size:
            raise ValueError(
                f"{self!r} does not fit {size} workers: rows x cols must be {size}. "
                "Leave both out to have them chosen."
            )
        return rows, cols


class Torus2dGroup(Group):
    """Collectives around the rings of a torus: neighbours in a row or a column."""

    def __init__(
        self, node: Node, label: str, route: str, members: Sequence[int] | None, cols: int
    ) -> None:
        super().__init__(node, label, route, members)
        # Two ranks share a row or a column, never both: messages of the two never mix.
        start, place = self.rank - self.rank % cols, self.rank % cols
        self._row = RingGroup(node, label, route, self.members[start : start + cols])
        self._column = RingGroup(node, label, route, self.members[place::cols])

    async def mean(self, x: Tensor) -> Tensor:
        if self.size == 1:
            return x

        async def finish(piece: Tensor) -> Tensor:
            return await self.node.call(divide_sum, piece, self.size)

        async def over_rows(piece: Tensor) -> Tensor:
            return await _rings.all_reduce(self._column, piece, finish)

        return await _rings.all_reduce(self._row, addend(x, self.size), over_rows)

    async def all_gather(self, message: Tensor) -> Sequence[Tensor]:
        if self._row.size == 1:
            return await self._column.all_gather(message)
        row = list(await self._row.all_gather(message))
        bundles = [row for _ in range(self._column.size)]
        await _rings.pass_around(self._column, bundles, self._column.rank)
        return [message for bundle in bundles for message in bundle]

    async def reduce_tree(self, x: Tensor, merging: Merging) -> Tensor:
        """Merges along each row, then down the last column, and sends the result back."""
        x = await _rings.merge_to_last(self._row, x, merging.merge)
        if self._row.rank == self._row.size - 1:
            x = await self._column.reduce_tree(x, merging)
        return await _rings.pass_from_last(self._row, x)
