"""Random rotations that cost no byte.

R = H D / sqrt(m): random signs D (from the shared key, so nothing travels), then the Hadamard
transform H. Every coordinate of R x is a sum of the elements under random signs, near a Gaussian
of variance |x|^2 / m, whatever x is (Ailon and Chazelle 2009; Suresh et al. 2017).

A vector is cut into rows of m elements, m a power of two: `block`, or the largest one that fits
into a shorter vector. What is left over is not padded, since padding would have to travel: the
last m elements are rotated first, across the border, and then all whole rows. So R is orthonormal
on exactly d coordinates. The coordinates of one row, or left over at the end, form a group.

Sums and squares of very large or small numbers leave the range of float32. Such vectors are scaled
by a power of two, which is exact, before they are rotated (`rotatable`), and so are the scales of
payloads before they are rotated back. What travels is in the units of the vector.
"""

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.compression.quantization._powers import in_range
from gradwire.core.codec import scale_dtype
from gradwire.core.key import Key

_SMALLEST, _LARGEST = 8, 2**16
# Exponents of the largest magnitude that sums and squares of any row have room for.
_EXPONENTS = {torch.float32: (-80, 88), torch.float64: (-400, 400)}


def check_block(name: str, block: int) -> None:
    if not _SMALLEST <= block <= _LARGEST or block & (block - 1):
        raise ValueError(
            f"{name}: block is the elements rotated together, a power of two in "
            f"{_SMALLEST} .. {_LARGEST}; got {block}"
        )


def row_length(numel: int, block: int) -> int:
    """m: the elements of one row, and of every group but the last."""
    return min(block, 1 << max(0, numel.bit_length() - 1))


def rotatable(x: Tensor, largest: float | None = None) -> tuple[Tensor, int]:
    """x times 2^-e in float32 or float64, for `rotate`, or scales for `unrotate`; e, mostly 0.

    `largest` is the largest magnitude of x, if it is known.
    """
    x = x.to(scale_dtype(x.dtype))
    return in_range(x, *exponents(x.dtype), largest)


def exponents(dtype: torch.dtype) -> tuple[int, int]:
    """The least and the greatest of a largest magnitude that needs no factor."""
    return _EXPONENTS[dtype]


def mixed_rows(x: Tensor, key: Key, block: int) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
    """The first step of `rotate`: rows [., m] with the signs to apply, and the rest.

    The left-over coordinates [rest] are rotated already. x is `rotatable`.
    """
    numel, m = x.numel(), row_length(x.numel(), block)
    rows, rest = divmod(numel, m)
    flips = row_flips(numel, key, block, x.device)
    if not rest:
        return [(x.reshape(rows, m), flips)], x[:0]
    cut = (rows - 1) * m  # where the row begins that the left-over elements mix with
    across = kernels.hadamard(x[-m:].reshape(1, m), before=_flips(key, "end", m, x.device))
    last = torch.cat([x[cut : cut + rest].reshape(1, rest), across[:, : m - rest]], dim=1)
    whole = x[:cut].reshape(rows - 1, m)
    return [(whole, flips[: cut // 8]), (last, flips[cut // 8 :])], across[0, m - rest :]


def unmix(x: Tensor, key: Key, block: int) -> Tensor:
    """The last step of `unrotate`, in place: x holds the rows, rotated back, and the rest."""
    m = row_length(x.numel(), block)
    if x.numel() % m:
        last = x[-m:].reshape(1, m)
        kernels.hadamard(last, after=_flips(key, "end", m, x.device), out=last)
    return x


def rotate(x: Tensor, key: Key, block: int) -> Tensor:
    """R x, [d]; x is `rotatable`."""
    pieces, end = mixed_rows(x, key, block)
    y = kernels.empty(x.numel(), x.dtype, x.device)
    start = 0
    for rows, flips in pieces:
        out = y[start : start + rows.numel()].reshape(rows.shape)
        kernels.hadamard(rows, before=flips, out=out)
        start += rows.numel()
    y[start:] = end
    return y


def unrotate(y: Tensor, key: Key, block: int) -> Tensor:
    """R^T y in place, [d]; what decides the size of y is `rotatable`."""
    m = row_length(y.numel(), block)
    rows = y.numel() // m
    whole = y[: rows * m].reshape(rows, m)
    kernels.hadamard(whole, after=row_flips(y.numel(), key, block, y.device), out=whole)
    return unmix(y, key, block)


def row_flips(numel: int, key: Key, block: int, device: torch.device) -> Tensor:
    """Packed signs of all whole rows."""
    m = row_length(numel, block)
    return _flips(key, "rows", numel // m * m, device)


def _flips(key: Key, name: str, count: int, device: torch.device) -> Tensor:
    """`count` packed random bits that every rank draws alike."""
    words = _flip_key(key, name).words(-(-count // 32), device)
    return words.view(torch.uint8)[: -(-count // 8)]


def flip_streams(key: Key) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """The streams of signs of whole rows, and of the row that mixes what is left over."""
    return _flip_key(key, "rows").stream, _flip_key(key, "end").stream


def _flip_key(key: Key, name: str) -> Key:
    return key.shared().child(f"rotation of {name}")


def safe_divisor(divisor: Tensor) -> Tensor:
    """One in place of zero: what is divided is zero too."""
    return torch.where(divisor > 0, divisor, 1.0)
