"""EDEN (Vargaftik et al. 2022, "EDEN: communication-efficient and robust distributed mean
estimation for federated learning").

DRIVE with more bits. Coordinates of a randomly rotated vector are near Gaussian, so each is
rounded to the nearest of the 2^b centroids that lose least of a standard normal (Lloyd 1982; Max
1960), and the scale S of a block sets the length:   decoded = R^T (S c),
unbiased:   S = |Rx|^2 / <Rx, c>    (E = x for a uniformly random rotation)
otherwise:  S = <Rx, c> / |c|^2     (least squared error)
Least squared errors are 0.363, 0.1175, 0.0345 and 0.0095 of |x|^2 for 1 .. 4 bits, as those of the
normal distribution; the unbiased scale makes e / (1 - e) of an error e. The centroids need not be
entropy-coded to be worth it, but they can be: `eden(4) >> rans` saves a quarter bit.

We rotate blocks by a randomised Hadamard transform, for which E = x holds only in the limit of long
blocks: no omega is stated. The scale of least squared error contracts, in expectation over the
rotation. For one bit see `drive`. For more, let u be a coordinate relative to its deviation, a sum
under random signs with E u^2 = 1 and E u^4 <= 3. The squared distance to the nearest centroid is at
most alpha + beta u^2 + gamma u^4, with numbers chosen to make alpha + beta + 3 gamma small (they
are in the test), and the best scale loses no more than the deviation as scale does.

Use it at 2 to 4 bits where the error counts more than the time: of the quantisers here it errs
least at equal bits without a coder, whatever the shape of the gradient. Under `ef(...)` take
unbiased=False; where the rotation costs too much take `adaptive`, and for heavy tails `qsgd >>
rans` in long buckets.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.compression.quantization._buckets import num_buckets
from gradwire.compression.quantization._packed import PackedCodec, look_up, packing
from gradwire.compression.quantization._powers import from_range
from gradwire.compression.quantization._rotation import (
    check_block,
    rotatable,
    rotate,
    row_length,
    safe_divisor,
    unrotate,
)
from gradwire.core.codec import Guarantee, Parts, expect_scale, scale_dtype
from gradwire.core.key import Key
from gradwire.core.spec import Spec

# The positive half of the centroids of a standard normal, by bits; the test is that they are the
# means of their cells.
_LLOYD_MAX = {
    1: (0.797884560803,),
    2: (0.452780034636, 1.510417608499),
    3: (0.245094178944, 0.756005281206, 1.343909278505, 2.151945704537),
    4: (
        0.128395029851,
        0.388048299490,
        0.656759118532,
        0.942340456487,
        1.256231197347,
        1.618046386022,
        2.069017226531,
        2.732589570995,
    ),
}
_DELTA = {1: 0.5, 2: 0.67, 3: 0.89, 4: 0.96}


@dataclass(frozen=True, repr=False)
class Eden(PackedCodec):
    """Rotate at random, round to the centroids of a Gaussian at 1 to 4 bits."""

    bits: int  # per element
    unbiased: bool = True  # else the scale of least squared error
    block: int = 4096  # elements rotated together

    paper = (
        "Vargaftik et al. 2022, EDEN: communication-efficient and robust distributed mean "
        "estimation for federated learning"
    )
    examples = (
        "eden(1)",
        "eden(2)",
        "eden(1, unbiased=False)",
        "eden(2, unbiased=False)",
        "eden(4, unbiased=False, block=128)",
    )

    parts = ("scale", "values")

    def __post_init__(self) -> None:
        if self.bits not in _LLOYD_MAX:
            raise ValueError(f"eden: bits must lie in 1 .. 4, got {self.bits}")
        check_block("eden", self.block)

    @property
    def centroids(self) -> tuple[float, ...]:
        """Ascending."""
        half = _LLOYD_MAX[self.bits]
        return (*(-c for c in reversed(half)), *half)

    def guarantee(self, spec: Spec) -> Guarantee:
        return Guarantee() if self.unbiased else Guarantee(delta=_DELTA[self.bits])

    def values_spec(self, spec: Spec, parts: Parts) -> Spec:
        return Spec(spec.shape, spec.dtype, alphabet=len(self.centroids))

    def pack(self, x: Tensor, key: Key) -> Parts:
        (x, shift), m = rotatable(x), row_length(x.numel(), self.block)
        y = rotate(x, key, self.block)
        squares = kernels.bucket_squares(y, m)
        spread = (squares / m).sqrt()
        if x.numel() % m:
            # The last group is part of a rotated row: its variance is that of the row.
            spread[-1:] = (kernels.bucket_squares(x[-m:], m) / m).sqrt()
        values, how = self._table(y), packing(len(self.centroids))
        edges = [(a + b) / 2 for a, b in zip(self.centroids, self.centroids[1:])]
        packed = kernels.to_cells(y, spread.to(y.dtype), m, values.new_tensor(edges), how)
        along, length = kernels.cell_products(y, packed, m, values, how)
        scale = squares / safe_divisor(along) if self.unbiased else along / safe_divisor(length)
        return {"scale": from_range(scale, shift, y.dtype), "values": packed}

    def decode_packed(self, parts: Parts, spec: Spec, key: Key) -> Tensor:
        dtype, m = scale_dtype(spec.dtype), row_length(spec.numel, self.block)
        scale = expect_scale(parts["scale"], num_buckets(spec.numel, m), dtype)
        scale, shift = rotatable(scale)
        y = look_up(parts["values"], self._table(scale), scale, m, spec.numel)
        return from_range(unrotate(y, key, self.block), shift, spec.dtype)

    def _table(self, like: Tensor) -> Tensor:
        return torch.tensor(self.centroids, dtype=like.dtype, device=like.device)
