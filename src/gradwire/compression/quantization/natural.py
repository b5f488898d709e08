"""Natural compression (Horvath et al. 2019, "Natural compression for distributed deep learning").

Every element is rounded at random to one of the two powers of two around it, so that the mean is
the element:  C(t) = sign(t) 2^a with probability (2^(a + 1) - |t|) / 2^a, else sign(t) 2^(a + 1),
a = floor(log2 |t|)   (their sec. 2).  With |t| = 2^a r the variance is (r - 1)(2 - r) / r^2 of
t^2, which is largest at r = 4/3: unbiased with omega = 1/8.

What travels is sign and exponent, of float32 and bfloat16 in 9 bits. The exponents of float64 take
12, those of float16, subnormal numbers included, 7. Below the smallest normal number of the other
formats an element becomes that number or zero, still without bias; beyond the largest power of
two it becomes that.

Use it where elements differ by orders of magnitude and the small ones count, because the error is
relative to each element; write `natural >> rans`, since exponents are far from equally frequent.
Where only the squared error counts `qsgd(bits=4)` takes fewer bits and errs less.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.compression.quantization._packed import PackedCodec, finished, look_up, packing
from gradwire.compression.quantization._powers import num_levels, powers_on
from gradwire.compression.quantization._scales import mirrored
from gradwire.core.codec import Guarantee, Parts, scale_dtype
from gradwire.core.key import Key
from gradwire.core.spec import Spec

# The lowest and highest power of two of each format.
_EXPONENTS = {
    torch.float32: (-126, 127),
    torch.bfloat16: (-126, 127),
    torch.float16: (-24, 15),
    torch.float64: (-1022, 1023),
}


@dataclass(frozen=True, repr=False)
class Natural(PackedCodec):
    """Round every element at random to a power of two: send sign and exponent."""

    paper = "Horvath et al. 2019, Natural compression for distributed deep learning"

    packs_anything = True

    def guarantee(self, spec: Spec) -> Guarantee:
        return Guarantee(omega=1 / 8)

    def values_spec(self, spec: Spec, parts: Parts) -> Spec:
        return Spec(spec.shape, spec.dtype, 2 * num_levels(*_EXPONENTS[spec.dtype]) + 1)

    def pack(self, x: Tensor, key: Key) -> Parts:
        low, high = _EXPONENTS[x.dtype]
        x = x.to(scale_dtype(x.dtype))
        draw, how = (key.seed, key.stream), packing(2 * num_levels(low, high) + 1)
        levels = powers_on(low, high, x.dtype, x.device)
        return {"values": kernels.to_levels(x, None, x.numel() or 1, levels, draw, how)}

    def decode_packed(self, parts: Parts, spec: Spec, key: Key) -> Tensor:
        values = parts["values"]
        table = _table(*_EXPONENTS[spec.dtype], scale_dtype(spec.dtype), values.device)
        return finished(look_up(values, table, None, spec.numel or 1, spec.numel), spec.dtype)


@lru_cache(maxsize=64)
def _table(low: int, high: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """What symbols stand for, which nobody may change."""
    return mirrored(powers_on(low, high, dtype, device))
