"""SketchedSGD: find the largest elements of a sum from a sum of sketches (Ivkin et al. 2019).

A count sketch (Charikar et al. 2002) of x has rows x columns counters,

    S[r, h_r(i)] += s_r(i) x_i,       estimate of x_i = median over r of s_r(i) S[r, h_r(i)]

with a random column h_r(i) and sign s_r(i). It is linear: the mean of sketches is the sketch of
the mean, an all-reduce of rows * columns numbers. The `oversample` * k elements of largest estimate
are candidates; a second all-reduce averages their true values, and the k largest are the result.
The estimates only choose, so every value applied is an exact mean, and feedback knows exactly what
was sent: e <- x, zero at the k positions. (FetchSGD, Rothchild et al. 2020, does without the
second round, applies the estimates and keeps the error in the sketch.)

An element is estimated to within eps |x| with O(1 / eps^2) columns and O(log(d / failure)) rows.

Columns and signs are hashes of the position, h_r(i) from the upper bits of a_r i + b_r modulo 2^64:
pairwise independent, which is what the bounds ask for. a_r and b_r are drawn from the shared key,
new ones in each step. Where sketch and candidates would be no shorter than the vector, the vector
itself is averaged.

Use it as `ef(countsketch(...))` for very long vectors and many workers, where a sketch is far
shorter than the vector and gathering the top-k of all workers too long. On a single layer of some
ten thousand elements the sketch outweighs what it saves: take `ef(topk(0.01))` or
`ef(gtopk(0.01))`.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.compression.sparsification._selection import check_density, num_kept, scatter
from gradwire.core.codec import Compression, State, check_input, corrected, scale_dtype
from gradwire.core.group import Group
from gradwire.core.key import Key
from gradwire.core.reducer import Reduced, Reducer
from gradwire.core.spec import Spec


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

    def unfed(self, spec: Spec) -> Compression | None:
        return self

    def init(self, spec: Spec, size: int) -> State:
        return None

    async def mean(
        self, x: Tensor, state: State, key: Key, group: Group, residual: Tensor | None = None
    ) -> Reduced:
        node, shared = group.node, key.shared()
        full = corrected(x, residual).reshape(-1)
        check_input(self, full)
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
        where, mean = await node.share(_keep_largest, values, candidates, kept, Spec.of(full))
        own = partial(_own_contribution, full, where, x.shape)
        lost = None if residual is None else await node.call(_residual, full, where, x.shape)
        return Reduced(mean.reshape(x.shape), own, state, lost)

    def sketch(self, x: Tensor, key: Key) -> Tensor:
        """[rows, columns] of a flat vector, in float32 at least."""
        return kernels.sketch(x.to(scale_dtype(x.dtype)), self._hashes(key, x.device), self.columns)

    def estimates(self, sketch: Tensor, numel: int, key: Key) -> Tensor:
        """[numel]: the median over rows of the estimates of each element."""
        table = sketch.reshape(self.rows, self.columns)
        return kernels.sketch_medians(table, self._hashes(key, sketch.device), numel)

    def _candidates(self, sketch: Tensor, numel: int, count: int, key: Key) -> Tensor:
        return kernels.select_largest(self.estimates(sketch, numel, key), None, count)[0]

    def _hashes(self, key: Key, device: torch.device) -> Tensor:
        """A multiplier and an offset of 64 bits for each row: [2, rows]."""
        words = key.child("hashes").words(4 * self.rows, device).to(torch.int64)
        high, low = words.view(2, 2, self.rows)
        return (high << 32) | (low & 0xFFFFFFFF)


def _keep_largest(
    values: Tensor, candidates: Tensor | None, kept: int, spec: Spec
) -> tuple[Tensor, Tensor]:
    """The positions of the largest means, and the vector of them."""
    largest, means = kernels.select_largest(values, None, kept)
    where = largest if candidates is None else candidates[largest]
    return where, scatter(means, where, spec)


def _own_contribution(x: Tensor, where: Tensor, shape: torch.Size) -> Tensor:
    return scatter(x[where], where, Spec.of(x)).reshape(shape)


def _residual(x: Tensor, where: Tensor, shape: torch.Size) -> Tensor:
    return x.index_fill(0, where, 0).reshape(shape)
