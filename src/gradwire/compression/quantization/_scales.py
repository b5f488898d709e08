"""Shared by block-scaled quantisers: the scale of each bucket, and elements relative to it."""

from typing import Literal

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.compression.quantization._powers import from_range, in_range


def bucket_scale(buckets: Tensor, norm: Literal["max", "l2"] = "max") -> Tensor:
    """The largest magnitude or the Euclidean norm of each row of [num_buckets, bucket]."""
    if norm == "max":
        return buckets.abs().amax(dim=1)
    buckets, shift = _squarable(buckets)
    norms = torch.linalg.vector_norm(buckets, dim=1, dtype=torch.float64)
    return from_range(norms, shift, buckets.dtype)


def relative_to(buckets: Tensor, scale: Tensor) -> Tensor:
    """Each row over its scale, within -1 .. 1; rows of zeros stay zero."""
    safe = torch.where(scale > 0, scale, torch.ones_like(scale))
    # A norm rounded down may lie below the largest element.
    return (buckets / safe[:, None]).clamp(-1, 1)


def bucket_norm(x: Tensor, bucket: int, norm: Literal["max", "l2"] = "max") -> Tensor:
    """The largest magnitude or the Euclidean norm of each bucket of a flat vector."""
    if norm == "max":
        return kernels.bucket_maxima(x, bucket)
    x, shift = _squarable(x)
    return from_range(kernels.bucket_squares(x, bucket).sqrt(), shift, x.dtype)


def _squarable(x: Tensor) -> tuple[Tensor, int]:
    """x times 2^-e with squares in the range of float64, in which they are added, and e.

    Those of all other dtypes are. A norm beyond the range of its dtype saturates, which keeps
    rounding unbiased: no element is larger.
    """
    return in_range(x, -400, 400) if x.dtype == torch.float64 else (x, 0)


def mirrored(levels: Tensor) -> Tensor:
    """Levels from zero on, [s + 1], as what symbols 0 .. 2s stand for."""
    return torch.cat([-levels[1:].flip(0), levels])


def check_bucket(name: str, field: str, bucket: int) -> None:
    if bucket < 1:
        raise ValueError(
            f"{name}: {field} is the elements that share a scale, at least 1; got {bucket}"
        )


def bucket_sizes(numel: int, bucket: int, device: torch.device) -> Tensor:
    """How many elements each bucket holds, int64: the last one may hold fewer."""
    starts = torch.arange(0, numel, bucket, device=device)
    return (numel - starts).clamp(max=bucket)


def check_levels(name: str, levels: int | None, bits: int | None) -> None:
    """Refuses anything but a number of levels above zero, or the bits of an element."""
    if (levels is None) == (bits is None):
        raise ValueError(f"{name} needs levels or bits, one of them: {name}(7) or {name}(bits=4)")
    if levels is not None and not 1 <= levels < 2**15:
        raise ValueError(f"{name}: levels must lie in 1 .. 32767, got {levels}")
    if bits is not None and not 2 <= bits <= 16:
        raise ValueError(f"{name}: bits must lie in 2 .. 16, got {bits}")


def levels_above_zero(levels: int | None, bits: int | None) -> int:
    """s: as many as given, or as fit into so many bits with their negatives and zero."""
    return levels if levels is not None else 2 ** ((bits or 0) - 1) - 1
