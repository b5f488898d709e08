"""SketchedSGD: find the largest elements of a sum from a sum of sketches (Ivkin et al. 2019).

A count sketch (Charikar et al. 2002) of x has rows x columns counters,

    S[r, h_r(i)] += s_r(i) x_i,       estimate of x_i = median over r of s_r(i) S[r, h_r(i)]

with a random column h_r(i) and sign s_r(i). It is linear: the mean of sketches is the sketch of
the mean, an all-reduce of rows * columns numbers. The `oversample` * k elements of largest estimate
are candidates; a second all-reduce averages their true values, and the k largest are the result.
The estimates only choose, so every value applied is an exact mean, and feedback knows exactly what
was heard: e <- x, zero at the k positions. (FetchSGD, Rothchild et al. 2020, does without the
second round, applies the estimates and keeps the error in the sketch.)

An element is estimated to within eps |x| with O(1 / eps^2) columns and O(log(d / failure)) rows.

Columns and signs are drawn from the shared key, new ones in each step, and made again when needed:
no table of rows * d lives longer than one block of elements. Where sketch and candidates would be
no shorter than the vector, the vector itself is averaged.

Use it as `ef(countsketch(...))` for very long vectors and many workers, where a sketch is far
shorter than the vector and gathering everyone's top-k too long. On a single layer of some ten
thousand elements the sketch outweighs what it saves: take `ef(topk(0.01))` or `ef(gtopk(0.01))`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from gradwire.compression.sparsification._selection import check_density, num_kept, scatter
from gradwire.core.codec import State, scale_dtype
from gradwire.core.group import Group
from gradwire.core.key import Key
from gradwire.core.reducer import Reduced, Reducer, corrected
from gradwire.core.spec import Spec

_BLOCK = 1 << 18  # elements whose columns are held at a time


@dataclass(frozen=True, repr=False)
class CountSketch(Reducer):
    """Find the largest elements of the mean in a mean of sketches, then average just those."""

    rows: int  # odd, for the median; more of them make mistakes rarer
    columns: int  # more of them make estimates sharper
    density: float  # fraction kept in the result
    oversample: int = 4  # candidates per element kept

    paper = "Ivkin et al. 2019, Communication-efficient distributed SGD with sketching"
    examples = (
        "countsketch(5, columns=1000, density=0.01)",
        "ef(countsketch(3, columns=20, density=0.1, oversample=2))",
    )

    def __post_init__(self) -> None:
        if self.rows < 1 or self.rows % 2 == 0:
            raise ValueError(
                f"countsketch: rows must be odd, because an estimate is their median; got "
                f"{self.rows}. Try 5."
            )
        if not 1 <= self.columns < 1 << 31:
            raise ValueError(
                f"countsketch: columns must lie in 1 .. 2**31 - 1, got {self.columns}. "
                "Try a few times the number of elements kept."
            )
        if self.oversample < 1:
            raise ValueError(
                f"countsketch: oversample is the number of candidates per element kept and must "
                f"be at least 1, got {self.oversample}. Try 4."
            )
        check_density("countsketch", self.density)

    def init(self, spec: Spec, size: int) -> State:
        return None

    async def mean(
        self, x: Tensor, state: State, key: Key, group: Group, residual: Tensor | None = None
    ) -> Reduced:
        node, shared = group.node, key.shared()
        full = corrected(x, residual).reshape(-1)
        numel = full.numel()
        kept = num_kept(self.density, numel)
        count = min(numel, self.oversample * kept)
        if self.rows * self.columns + count < numel:
            sketch = await group.mean((await node.call(self.sketch, full, shared)).reshape(-1))
            candidates = await node.share(self._candidates, sketch, numel, count, shared)
            values = await group.mean(await node.call(torch.take, full, candidates))
        else:
            candidates = None
            values = await group.mean(full)
        where, mean = await node.share(_largest, values, candidates, kept, Spec.of(full))
        own = partial(_own, full, where, x.shape)
        lost = None if residual is None else await node.call(_lost, full, where, x.shape)
        return Reduced(mean.reshape(x.shape), own, state, lost)

    def sketch(self, x: Tensor, key: Key) -> Tensor:
        """[rows, columns] of a flat vector, in float32 at least."""
        table = torch.zeros(self.rows * self.columns, dtype=scale_dtype(x.dtype), device=x.device)
        for block, places, signs in self._hashes(x.numel(), key, x.device):
            signed = torch.where(signs, -x[block], x[block])
            table.index_add_(0, places.reshape(-1), signed.reshape(-1).to(table.dtype))
        return table.view(self.rows, self.columns)

    def estimates(self, sketch: Tensor, numel: int, key: Key) -> Tensor:
        """[numel]: the median over rows of what each row says about each element."""
        table, out = sketch.reshape(-1), sketch.new_empty(numel)
        for block, places, signs in self._hashes(numel, key, sketch.device):
            told = table[places]
            out[block] = torch.where(signs, -told, told).median(dim=0).values
        return out

    def _candidates(self, sketch: Tensor, numel: int, count: int, key: Key) -> Tensor:
        sizes = self.estimates(sketch, numel, key).abs()
        return torch.topk(sizes, count, sorted=False).indices.sort().values

    def _hashes(
        self, numel: int, key: Key, device: torch.device
    ) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """For each block of elements: positions in the flat table and signs, [rows, block]."""
        first = torch.arange(self.rows, device=device)[:, None] * self.columns
        for start in range(0, numel, _BLOCK):
            block = slice(start, min(numel, start + _BLOCK))
            width = block.stop - block.start
            words = key.child(f"block {start // _BLOCK}").words(self.rows * width, device)
            # The lowest bit is the sign, the 31 others choose a column.
            words = (words.to(torch.int64) & 0xFFFFFFFF).view(self.rows, width)
            yield block, first + ((words >> 1) * self.columns >> 31), (words & 1).bool()


def _largest(
    values: Tensor, candidates: Tensor | None, kept: int, spec: Spec
) -> tuple[Tensor, Tensor]:
    """The positions of the largest means, and the vector of them."""
    largest = torch.topk(values.abs(), kept, sorted=False).indices.sort().values
    where = largest if candidates is None else candidates[largest]
    return where, scatter(values[largest], where, spec)


def _own(x: Tensor, where: Tensor, shape: torch.Size) -> Tensor:
    return scatter(x[where], where, Spec.of(x)).reshape(shape)


def _lost(x: Tensor, where: Tensor, shape: torch.Size) -> Tensor:
    return x.index_fill(0, where, 0).reshape(shape)
