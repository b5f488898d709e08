"""Block floating point: small integers and one power of two per block (Drumond et al. 2018,
"Training DNNs with hybrid block floating point"; rounding at random as in Gupta et al. 2015,
"Deep learning with limited numerical precision").

x_i ~ 2^e q_i with |q_i| <= L = 2^(bits - 1) - 1, and e the smallest exponent for which the largest
element of the block fits. A block's exponent takes one byte (two for float64), a quarter of a
scale, so blocks can be small; it travels modulo 256. Symmetric: -L - 1 is not used, and 2 bits are
the three values -1, 0, 1, of which five share a byte.

The step 2^e is less than 2/L of the largest element a. Rounding costs an element p(1 - p) <= 1/4
of a squared step at random, and no more than step |x_i|; so for b elements, with
a |x|_1 <= (1 + sqrt(b)) / 2 |x|^2, it is unbiased with omega = min(b / L^2, (1 + sqrt(b)) / L).
To nearest it costs at most a quarter of a squared step too, no element loses more than itself, and
the largest no more than 1/L^2 of its square: delta = max(1 - b / L^2, (1 - 1/L^2) / b).

Use it as `lowprec(8)` for a quarter of the traffic at an error that hardly shows, with nothing to
tune and no `ef(...)`, since rounding at random is unbiased. Under `ef(...)` take
rounding="nearest"; at 4 bits and below `eden` errs less.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.compression.quantization._buckets import num_buckets
from gradwire.compression.quantization._packed import PackedCodec, finished, look_up, packing
from gradwire.compression.quantization._scales import bucket_norm, check_bucket
from gradwire.core.codec import Guarantee, Parts, expect, scale_dtype
from gradwire.core.errors import WireError
from gradwire.core.key import Key
from gradwire.core.spec import Spec

_BITS = (2, 4, 8)
_WIRE_DTYPES = {torch.float32: torch.int8, torch.float64: torch.int16}
_ZERO_BLOCK_EXPONENT = {torch.float32: -128, torch.float64: -1022}  # exponents of blocks of zeros


@dataclass(frozen=True, repr=False)
class LowPrec(PackedCodec):
    """Round to integers of 8, 4 or 2 bits times a power of two per block."""

    bits: int  # of one element
    block: int = 32  # elements that share one exponent
    rounding: Literal["random", "nearest"] = "random"

    paper = "Drumond et al. 2018, Training DNNs with hybrid block floating point"
    examples = (
        "lowprec(8)",
        "lowprec(4, block=16)",
        "lowprec(2)",
        'lowprec(4, rounding="nearest")',
        'lowprec(2, block=8, rounding="nearest")',
    )

    parts = ("exponents", "values")

    def __post_init__(self) -> None:
        if self.bits not in _BITS:
            raise ValueError(
                f"lowprec: bits are 2, 4 or 8, got {self.bits}. For other widths use qsgd(bits=...)"
            )
        check_bucket("lowprec", "block", self.block)
        if self.rounding not in ("random", "nearest"):
            raise ValueError(f'lowprec: rounding is "random" or "nearest", got {self.rounding!r}')

    @property
    def largest(self) -> int:
        """L, the largest integer."""
        return 2 ** (self.bits - 1) - 1

    def guarantee(self, spec: Spec) -> Guarantee:
        size, top = max(1, min(self.block, spec.numel)), self.largest
        if self.rounding == "random":
            return Guarantee(omega=min(size / top**2, (1 + math.sqrt(size)) / top))
        return Guarantee(delta=max(1 - size / top**2, (1 - 1 / top**2) / size))

    def values_spec(self, spec: Spec, parts: Parts) -> Spec:
        return Spec(spec.shape, spec.dtype, alphabet=2 * self.largest + 1)

    def pack(self, x: Tensor, key: Key) -> Parts:
        dtype, top = scale_dtype(x.dtype), self.largest
        x = x.to(dtype)
        exponents = _exponents(bucket_norm(x, self.block), top)
        # The largest over L may have been rounded down to a power of two: clamped to L.
        steps, how = _powers(exponents, dtype), packing(2 * top + 1)
        draw = (key.seed, key.stream) if self.rounding == "random" else None
        packed = kernels.to_whole(x, steps, None, self.block, -top, top, draw, how)
        return {"exponents": _to_wire(exponents, dtype), "values": packed}

    def decode_packed(self, parts: Parts, spec: Spec, key: Key) -> Tensor:
        dtype, top = scale_dtype(spec.dtype), self.largest
        lowest, highest = _range(dtype, top)
        count = num_buckets(spec.numel, self.block)
        wire = expect(parts["exponents"], "exponents", count, _WIRE_DTYPES[dtype])
        exponents = _from_wire(wire, highest)
        if bool(((exponents < lowest) | (exponents > highest)).any()):
            raise WireError(f"exponents: one is not in {lowest} .. {highest}")
        steps = _powers(exponents, dtype)
        table = torch.arange(-top, top + 1, dtype=dtype, device=steps.device)
        return finished(look_up(parts["values"], table, steps, self.block, spec.numel), spec.dtype)


def _range(dtype: torch.dtype, top: int) -> tuple[int, int]:
    """The exponents that a step may have: 256 of float32, enough for every normal element."""
    if dtype == torch.float64:
        return -1022 - 7, 1023  # 7 bits: the largest L
    highest = min(127, math.ceil(128 - math.log2(top)))
    return highest - 255, highest


def _exponents(largest: Tensor, top: int) -> Tensor:
    """The smallest e with 2^e top >= the largest element of each block, int32."""
    lowest, highest = _range(largest.dtype, top)
    mantissa, exponent = torch.frexp(largest / top)  # mantissa 2^exponent, mantissa in [1/2, 1)
    ceiling = torch.where(mantissa == 0.5, exponent - 1, exponent).clamp(lowest, highest)
    return torch.where(
        largest > 0, ceiling, torch.full_like(ceiling, _ZERO_BLOCK_EXPONENT[largest.dtype])
    )


def _to_wire(exponents: Tensor, dtype: torch.dtype) -> Tensor:
    """As they travel: modulo 256 in one byte, since the range of steps is below its own."""
    if dtype == torch.float32:
        exponents = torch.where(exponents < -128, exponents + 256, exponents)
    return exponents.to(_WIRE_DTYPES[dtype])


def _from_wire(wire: Tensor, highest: int) -> Tensor:
    exponents = wire.to(torch.int32)
    if wire.dtype == torch.int8:
        exponents = torch.where(exponents > highest, exponents - 256, exponents)
    return exponents


def _powers(exponents: Tensor, dtype: torch.dtype) -> Tensor:
    """2^e, exactly, on any device."""
    lowest, highest = _range(dtype, 127)[0], _range(dtype, 1)[1]
    table = [2.0**exponent for exponent in range(lowest, highest + 1)]
    return torch.tensor(table, dtype=dtype, device=exponents.device)[exponents.long() - lowest]
