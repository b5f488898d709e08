"""3LC (Lim et al. 2019, "3LC: lightweight and effective traffic compression for distributed machine
learning"): three values, five of them to a byte, runs of zeros shortened.

M = s max |x|,  q_i = round(x_i / M) in {-1, 0, 1},  decoded M q_i

The sparsity multiplier s in [1, 2) sends more elements to zero as it grows; use it in `ef(...)`,
which sends them later. Five trits q + 1 make a byte of base 3, the last byte being filled up with
zeros (quartic encoding); the byte 121 stands for five zeros, and the thirteen values 243
to 255 that are left over for 2 to 14 such bytes in a row (zero-run encoding). It takes
1.6 bits per element at most and 0.115 at least.

The largest element keeps all but (s - 1)^2 of its square, and no other one loses more than all of
its own. So |C(x) - x|^2 <= |x|^2 - s (2 - s) max^2: a contraction with delta = s (2 - s) / d.

Use it as `ef(threelc)` for a small fraction of a bit per element at little work: a maximum and a
rounding, no selection. `ef(stc(0.01))` keeps far more of the gradient in fewer bits, if finding the
largest elements can be afforded.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.compression.quantization._packed import finished, look_up, packing
from gradwire.compression.quantization._scales import bucket_norm
from gradwire.core.codec import (
    Codec,
    Guarantee,
    Kind,
    Parts,
    State,
    clamp_to,
    expect,
    expect_scale,
    scale_dtype,
)
from gradwire.core.errors import WireError
from gradwire.core.key import Key
from gradwire.core.spec import Spec
from gradwire.core.symbols import packed_bytes

_TRITS_PER_BYTE = 5  # trits to a byte
_FIVE_ZEROS = 121  # the byte of five zeros, 1 + 3 + 9 + 27 + 81
_LONGEST_RUN = 14  # zero bytes that one byte stands for: a run of n is written 241 + n


@dataclass(frozen=True, repr=False)
class ThreeLC(Codec):
    """Round to minus, zero or plus the largest magnitude, and shorten runs of zeros."""

    sparsity: float = 1.0  # s: the multiplier of the largest magnitude

    paper = (
        "Lim et al. 2019, 3LC: lightweight and effective traffic compression for distributed "
        "machine learning"
    )
    examples = ("threelc", "threelc(1.75)", "ef(threelc(1.5))")

    leaves = Kind.NOTHING
    parts = ("scale", "trits")

    def __post_init__(self) -> None:
        if not 1 <= self.sparsity < 2:
            raise ValueError(
                f"threelc: sparsity must lie in [1, 2), got {self.sparsity}. 1 sends the most, "
                "and with 2 every element would be zero."
            )

    def guarantee(self, spec: Spec) -> Guarantee:
        return Guarantee(delta=self.sparsity * (2 - self.sparsity) / max(1, spec.numel))

    def split(self, x: Tensor, state: State, key: Key) -> tuple[Parts, State]:
        x = x.to(scale_dtype(x.dtype))
        scale = bucket_norm(x, x.numel()) if x.numel() else x.new_zeros(1)
        # +1 from half of s on, -1 from minus that on: the lower edge is the next number.
        upper = x.new_tensor(self.sparsity) / 2
        edges = torch.stack([torch.nextafter(-upper, upper), upper])
        packed = kernels.to_cells(x, scale[: x.numel()], x.numel() or 1, edges, packing(3))
        padding = packed.numel() * _TRITS_PER_BYTE - x.numel()
        packed[-1:] += sum(3**digit for digit in range(_TRITS_PER_BYTE - padding, _TRITS_PER_BYTE))
        return {
            "scale": scale,
            "trits": kernels.shorten_runs(packed, _FIVE_ZEROS, _LONGEST_RUN),
        }, state

    def join(self, parts: Parts, spec: Spec, key: Key) -> Tensor:
        largest = expect_scale(parts["scale"], 1, scale_dtype(spec.dtype))
        packed = _restore_runs(parts["trits"], packed_bytes(spec.numel, 3))
        size = _rounded_down(largest.double() * self.sparsity, spec.dtype).to(largest.dtype)
        table = size * size.new_tensor([-1.0, 0.0, 1.0])
        return finished(look_up(packed, table, None, spec.numel or 1, spec.numel), spec.dtype)


def _rounded_down(magnitude: Tensor, dtype: torch.dtype) -> Tensor:
    """float64 as a `dtype` that is not larger: were M rounded up, the bound would not hold."""
    nearest = clamp_to(magnitude, dtype)
    lower = clamp_to(magnitude * (1 - torch.finfo(dtype).eps), dtype)
    return torch.where(nearest.double() > magnitude, lower, nearest)


def _restore_runs(code: Tensor, num_bytes: int) -> Tensor:
    """The packed trits; `WireError` if they do not come to `num_bytes`."""
    expect(code, "trits", code.numel(), torch.uint8)
    if code.numel() > num_bytes:
        raise WireError(f"trits: {code.numel()} bytes, expected at most {num_bytes}")
    packed, total = kernels.lengthen_runs(code, _FIVE_ZEROS, _LONGEST_RUN, num_bytes)
    if total != num_bytes:
        raise WireError(f"trits: they come to {total} bytes, expected {num_bytes}")
    return packed
