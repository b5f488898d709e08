"""3LC (Lim et al. 2019, "3LC: lightweight and effective traffic compression for distributed machine
learning"): three values, five of them to a byte, runs of zeros shortened.

M = s max |x|,  q_i = round(x_i / M) in {-1, 0, 1},  decoded M q_i       (their sec. 3)

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

from gradwire.compression.quantization._buckets import clamp_to
from gradwire.compression.quantization._scales import bucket_scale, relative_to
from gradwire.core.codec import (
    Codec,
    Guarantee,
    Kind,
    Parts,
    State,
    expect,
    expect_scale,
    scale_dtype,
)
from gradwire.core.errors import WireError
from gradwire.core.key import Key
from gradwire.core.spec import Spec
from gradwire.core.symbols import pack_symbols, packed_bytes, unpack_symbols

_DIGITS = 5  # trits to a byte
_ZEROS = 121  # the byte of five zeros, 1 + 3 + 9 + 27 + 81
_LONGEST = 14  # zero bytes that one byte stands for
_SHIFT = 241  # a run of n is written 241 + n, from 243 for two on


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
        row = x.to(scale_dtype(x.dtype)).reshape(1, -1)
        scale = bucket_scale(row) if x.numel() else row.new_zeros(1)
        fractions = relative_to(row, scale).reshape(-1)
        trits = (2 * fractions.abs() >= self.sparsity) * fractions.sign() + 1
        padding = packed_bytes(x.numel(), 3) * _DIGITS - x.numel()
        trits = torch.nn.functional.pad(trits.to(torch.int32), (0, padding), value=1)
        return {"scale": scale, "trits": _shortened(pack_symbols(trits, 3))}, state

    def join(self, parts: Parts, spec: Spec, key: Key) -> Tensor:
        largest = expect_scale(parts["scale"], 1, scale_dtype(spec.dtype))
        packed = _lengthened(parts["trits"], packed_bytes(spec.numel, 3))
        trits = unpack_symbols(packed, spec.numel, 3).to(spec.dtype) - 1
        return trits * _rounded_down(largest.double() * self.sparsity, spec.dtype)


def _rounded_down(magnitude: Tensor, dtype: torch.dtype) -> Tensor:
    """float64 as a `dtype` that is not larger: were M rounded up, the bound would not hold."""
    nearest = clamp_to(magnitude, dtype)
    lower = clamp_to(magnitude * (1 - torch.finfo(dtype).eps), dtype)
    return torch.where(nearest.double() > magnitude, lower, nearest)


def _shortened(packed: Tensor) -> Tensor:
    """Bytes of five trits with runs of zeros written as one byte each."""
    positions = torch.arange(packed.numel(), device=packed.device)
    zero = packed == _ZEROS
    if not packed.numel():
        return packed
    # Where a run is longer than a byte can say, a new one begins every 14 bytes.
    last_other = torch.cummax(torch.where(zero, -1, positions), dim=0).values
    dropped = zero & ((positions - last_other - 1) % _LONGEST != 0)
    kept = positions[~dropped]
    # Only zeros are dropped, so the way to the next kept byte is the length of a run.
    lengths = torch.diff(kept, append=kept.new_full((1,), packed.numel()))
    return torch.where(lengths > 1, lengths + _SHIFT, packed[kept]).to(torch.uint8)


def _lengthened(code: Tensor, num_bytes: int) -> Tensor:
    """The inverse of `_shortened`; `WireError` if it does not come to `num_bytes`."""
    expect(code, "trits", code.numel(), torch.uint8)
    if code.numel() > num_bytes:
        raise WireError(f"trits: {code.numel()} bytes, expected at most {num_bytes}")
    run = code > _SHIFT + 1
    lengths = torch.where(run, code.long() - _SHIFT, 1)
    total = int(lengths.sum())
    if total != num_bytes:
        raise WireError(f"trits: they come to {total} bytes, expected {num_bytes}")
    return torch.where(run, _ZEROS, code).to(torch.uint8).repeat_interleave(lengths)
