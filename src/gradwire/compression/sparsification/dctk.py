"""Top-k of a cosine transform, chunk by chunk: what DeMo sends (Peng, Quesnelle and Kingma 2024).

A matrix is cut into chunks of at most `chunk` x `chunk` elements, a vector into chunks of at most
`chunk`; tensors of more dimensions are the matrix [n, ...] of their rows. Of each chunk X the
orthonormal DCT-II (Ahmed, Natarajan and Rao 1974),

    Y = D X D'^T,   D[i, j] = sqrt(2/n) cos(pi (2j + 1) i / 2n),   the first row over sqrt(2),

is taken, by two matrix products, and its `k` coefficients of largest magnitude are sent; X is put
together from them as D^T Y D'. The transform keeps the norm, so this is a contraction with
delta = k / c for chunks of c elements, in general with the least k/c of the bucket. Of neighbouring
elements that move together few coefficients hold most of the norm; where they do not, the
transform gains nothing over `topk`.

All positions of a bucket travel as one ascending list, with coded gaps. That takes less than the
ceil(log2 c) bits each of a fixed width if k is at least 3: 10.5 instead of 12 for 8 of 64 x 64 at
random, 4.4 instead of 6 for 8 of 64. Chunks of at most k elements are sent as they are. Means are
taken of coefficients, so that a step costs one inverse transform however many workers there are.
The last bits are left to the library that multiplies; two devices may send different bytes of
nearly equal value.

Where we differ: the side of a chunk in the authors' code is the largest divisor of the dimension
not above `chunk`; that is 1 for a large prime, where nothing is compressed then. Here a dimension n
is cut into ceil(n / chunk) chunks of equal length, the last one filled up with zeros. Where `chunk`
divides n, both are the same.

Use it as `demo(dctk(64, 8))`, or `ef(dctk(64, 8))`; it needs to know the tensors of a bucket, so
buckets are gathered whole. `>> fp16` or `>> sign` cuts the coefficients.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.coding.indices import decode_indices, encode_indices
from gradwire.compression._layers import tensors_covering
from gradwire.compression.lowrank._matrix import (
    Layout,
    kept_tensors,
    layout,
    magnitude_unit,
    matrix_shape,
)
from gradwire.core.codec import (
    LOSSLESS,
    Codec,
    Guarantee,
    Parts,
    State,
    Traits,
    checked_values,
    clamp_to,
    expect,
    scale_dtype,
)
from gradwire.core.fusion import SaturatingFeedback
from gradwire.core.group import mean_in_order
from gradwire.core.key import Key
from gradwire.core.payload import Payload
from gradwire.core.spec import Placed, Spec


@dataclass(frozen=True, repr=False)
class DCTK(Codec):
    """Keep the largest coefficients of a cosine transform of each chunk."""

    chunk: int  # elements of a vector's chunk, and of each side of a matrix's
    k: int  # coefficients kept of each chunk

    paper = "Peng, Quesnelle and Kingma 2024, DeMo: Decoupled momentum optimization"
    examples = ("dctk(64, 8)", "dctk(8, k=1)", "dctk(4, k=16)")

    parts = ("indices", "values")
    traits = Traits(layout=kept_tensors)

    def __post_init__(self) -> None:
        if self.chunk < 1:
            raise ValueError(f"dctk: chunk must be at least 1, got {self.chunk}. Try 64.")
        if not 1 <= self.k <= self.chunk**2:
            raise ValueError(
                f"dctk: k is the number of coefficients kept of each chunk, 1 .. "
                f"{self.chunk**2} for chunks of {self.chunk} x {self.chunk}, got {self.k}. Try 8."
            )

    def init(self, spec: Spec) -> State:
        return spec.layout

    def guarantee(self, spec: Spec) -> Guarantee:
        cuts = self._plan(spec.layout, spec.numel).cuts
        return Guarantee(delta=min(self.k / cut.numel for cut in cuts)) if cuts else LOSSLESS

    def values_spec(self, spec: Spec, parts: Parts) -> Spec:
        plan = self._plan(spec.tensors, spec.numel)
        return Spec((plan.num_kept + plan.layout.num_plain,), spec.dtype)

    def split(self, x: Tensor, state: State, key: Key) -> tuple[Parts, State]:
        plan = self._plan(state, x.numel())
        positions, values = [x.new_empty(0, dtype=torch.int64)], [x.new_empty(0)]
        for first, cut, matrices in zip(plan.firsts, plan.cuts, plan.layout.matrices(x)):
            # In units in which no sum of products leaves the range.
            scale = magnitude_unit(matrices).clamp_(min=1)
            coefficients = cut.transformed(matrices, scale)  # [num_chunks, c]
            best = coefficients.abs().topk(self.k, sorted=False).indices.sort().values
            kept = coefficients.gather(1, best).reshape(-1) * scale
            starts = torch.arange(len(best), device=x.device) * cut.numel + first
            positions.append((best + starts[:, None]).reshape(-1))
            values.append(clamp_to(kept, x.dtype))
        values.append(plan.layout.rest(x))
        return {
            "indices": encode_indices(torch.cat(positions), plan.universe),
            "values": torch.cat(values),
        }, state

    def join(self, parts: Parts, spec: Spec, key: Key) -> Tensor:
        return self.mean([parts], spec)

    @property
    def fusion(self) -> "_DCTKFusion":
        return _DCTKFusion(self)

    def mean(self, messages: Sequence[Parts], spec: Spec) -> Tensor:
        """The mean of what the messages describe, by one inverse transform."""
        plan, count = self._plan(spec.tensors, spec.numel), len(messages)
        sizes = [plan.num_kept, plan.layout.num_plain]
        values = [parts["values"].split(sizes) for parts in messages]
        kept = torch.stack([own for own, _ in values]).to(scale_dtype(spec.dtype))
        scale = magnitude_unit(kept).clamp_(min=1)  # in which no sum of products leaves the range
        kept = kept / scale
        coefficients = kept.new_zeros(plan.universe)
        for parts, own in zip(messages, kept):
            packed = expect(parts["indices"], "indices", parts["indices"].numel(), torch.uint8)
            positions = decode_indices(packed, plan.universe, plan.num_kept)
            coefficients.index_add_(0, positions, own, alpha=1 / count)
        rest = mean_in_order((plain for _, plain in values), count)
        return plan.restored(coefficients, scale, rest)

    def _plan(self, tensors: tuple[Placed, ...] | None, numel: int) -> "_TransformPlan":
        return _plan(tensors_covering(tensors, numel), self.chunk, self.k)


class _DCTKFusion(SaturatingFeedback[DCTK]):
    """Means by one inverse transform.

    What is decoded may have another sign than x, and the difference be beyond the range.
    """

    averages = True

    def decode_mean(self, payloads: Sequence[Payload], spec: Spec, keys: Sequence[Key]) -> Tensor:
        codec, flat = self.codec, spec.flat()
        wanted = codec.values_spec(flat, {})
        for payload in payloads:
            checked_values(codec, payload.parts["values"], wanted)
        return codec.mean([payload.parts for payload in payloads], flat).reshape(spec.shape)


class _ChunkGrid(NamedTuple):
    """How `num` matrices [n, m] are cut into chunks [h, w], filled up with zeros."""

    num: int
    n: int
    m: int
    h: int
    w: int

    @property
    def numel(self) -> int:
        """Of one chunk."""
        return self.h * self.w

    @property
    def grid(self) -> tuple[int, int]:
        return -(-self.n // self.h), -(-self.m // self.w)

    @property
    def num_chunks(self) -> int:
        return self.num * math.prod(self.grid)

    def transformed(self, matrices: Tensor, scale: Tensor) -> Tensor:
        """The coefficients over `scale` of every chunk: [num_chunks, h * w]."""
        rows, columns = self.grid
        margins = (0, columns * self.w - self.m, 0, rows * self.h - self.n)
        if any(margins):
            matrices = torch.nn.functional.pad(matrices, margins)
        x = matrices.reshape(self.num, rows, self.h, columns, self.w)
        x = x @ (_dct_basis(self.w, x.dtype, x.device).mT / scale)
        x = x.transpose(2, 3).reshape(-1, self.h, self.w)
        if self.h > 1:
            x = _dct_basis(self.h, x.dtype, x.device) @ x
        return x.reshape(-1, self.numel)

    def restored(self, coefficients: Tensor) -> Tensor:
        """The inverse, [num, n, m], of coefficients in a row."""
        rows, columns = self.grid
        x = coefficients.view(-1, self.h, self.w) @ _dct_basis(
            self.w, coefficients.dtype, coefficients.device
        )
        if self.h > 1:
            x = _dct_basis(self.h, x.dtype, x.device).mT @ x
        x = x.view(self.num, rows, columns, self.h, self.w).transpose(2, 3)
        x = x.reshape(self.num, rows * self.h, columns * self.w)
        return x[:, : self.n, : self.m]


class _TransformPlan(NamedTuple):
    """What becomes of a bucket; both sides make the same."""

    layout: Layout
    cuts: tuple[_ChunkGrid, ...]  # of each stack
    firsts: tuple[int, ...]  # the place of each stack's first coefficient among all
    universe: int  # how many coefficients there are
    num_kept: int

    def restored(self, coefficients: Tensor, scale: Tensor, rest: Tensor) -> Tensor:
        """The flat bucket of these coefficients times `scale`, and of what was sent as it is."""
        rows = coefficients.split([cut.num_chunks * cut.numel for cut in self.cuts])
        matrices = [
            clamp_to(cut.restored(row) * scale, rest.dtype) for cut, row in zip(self.cuts, rows)
        ]
        return self.layout.assemble(matrices, rest)


@lru_cache(maxsize=1024)
def _plan(tensors: tuple[Placed, ...], chunk: int, k: int) -> _TransformPlan:
    shaped = []
    for name, start, stop, shape in tensors:  # a vector is a matrix of one row
        shaped.append((name, start, stop, matrix_shape(shape) or (1, stop - start)))
    shrinks = [math.prod(_chunk_length(n, chunk) for n in tensor[3]) > k for tensor in shaped]
    bucket = layout(shaped, shrinks)
    cuts = [
        _ChunkGrid(s.num, s.n, s.m, _chunk_length(s.n, chunk), _chunk_length(s.m, chunk))
        for s in bucket.stacks
    ]
    firsts = [0, *accumulate(cut.num_chunks * cut.numel for cut in cuts)]
    num_kept = k * sum(cut.num_chunks for cut in cuts)
    return _TransformPlan(bucket, tuple(cuts), tuple(firsts[:-1]), firsts[-1], num_kept)


def _chunk_length(n: int, chunk: int) -> int:
    """The length of a chunk: n is cut into as few equal ones as may be."""
    return -(-n // max(1, -(-n // chunk)))


@lru_cache(maxsize=64)
def _dct_basis(n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The orthonormal DCT-II [n, n], one basis vector per row."""
    i = torch.arange(n, dtype=torch.float64)
    # Angles repeat after 4n steps; taken there as whole numbers they are exact.
    steps = torch.outer(i, 2 * i + 1) % (4 * n)
    rows = torch.cos(steps * (math.pi / (2 * n))) * math.sqrt(2 / n)
    rows[0] /= math.sqrt(2)
    return rows.to(dtype).to(device)
