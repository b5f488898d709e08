"""The fast Walsh-Hadamard transform of each row, randomised by signs, and signs of the result.

H_1 = 1,   H_2n = [[H_n, H_n], [H_n, -H_n]] / sqrt(2):   orthonormal, symmetric, its own inverse.
log2 n stages of butterflies (a, b) -> (a + b, a - b), between elements 1, 2, 4 ... apart. The
factor 1/sqrt(n) comes first, so that no stage leaves the range that the result needs.

Norms are added in float64 along a tree that folds a row in halves, since the order of torch's own
sums depends on the processor: this one gives the same bits everywhere.
"""

import math

import torch
from torch import Tensor

from gradwire.kernels.reference.bits import pack_uints, unpack_signs, unpack_uints
from gradwire.kernels.reference.philox import philox_words

LEAST_TILE = 1024  # elements that a program of an accelerator transforms, or one longer row
Stream = tuple[int, int, int]


def factor(n: int) -> float:
    """1 / sqrt(n), exact where n is a power of four."""
    stages = n.bit_length() - 1
    return 2.0 ** -(stages // 2) * (math.sqrt(0.5) if stages % 2 else 1.0)


def hadamard(
    x: Tensor, before: Tensor | None, after: Tensor | None, out: Tensor | None = None
) -> Tensor:
    """[rows, n]; `before` and `after` are packed bits that flip signs, row after row."""
    rows, n = x.shape
    y = x * factor(n)
    if before is not None:
        y = y * unpack_signs(before, x.numel(), x.dtype).reshape(rows, n)
    h = 1
    while h < n:
        pairs = y.reshape(rows, n // (2 * h), 2, h)
        a, b = pairs[:, :, 0], pairs[:, :, 1]
        y = torch.stack([a + b, a - b], dim=2)
        h *= 2
    y = y.reshape(rows, n)
    if after is not None:
        y = y * unpack_signs(after, x.numel(), x.dtype).reshape(rows, n)
    return y if out is None else out.copy_(y)


def row_norms(y: Tensor) -> tuple[Tensor, Tensor]:
    """Sums of |y| and of y^2 over each row of [rows, n], float64."""
    n = y.shape[1]
    magnitude = torch.nn.functional.pad(
        y.abs().to(torch.float64), (0, (1 << (n - 1).bit_length()) - n)
    )
    return _fold(magnitude), _fold(magnitude.square())


def rotated_signs(x: Tensor, before: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    y = hadamard(x, before, None)
    return pack_uints((y >= 0).reshape(-1), 1), *row_norms(y)


def unrotated_signs(
    packed: Tensor, scale: Tensor, n: int, after: Tensor, out: Tensor | None = None
) -> Tensor:
    signs = 2 * unpack_uints(packed, 1, len(scale) * n).reshape(-1, n) - 1
    return hadamard(signs * scale[:, None], None, after, out)


def encode_rotated_signs(
    x: Tensor,
    n: int,
    seed: int,
    streams: tuple[Stream, Stream],
    unbiased: bool,
    exponents: tuple[int, int],
    into: tuple[Tensor, Tensor],
) -> Tensor:
    rows, rest = divmod(x.numel(), n)
    largest = _tile_maxima(x.abs(), (rows * n - 1) // tile_length(n), tile_length(n))
    exponent = math.frexp(float(largest.amax()) or 2.0 ** exponents[0])[1]
    shift = exponent - min(max(exponent, exponents[0]), exponents[1])
    x = _times_power(x, -shift)
    flips, end = (
        philox_words(seed, stream, -(-count // 32), x.device).view(torch.uint8)[: count // 8]
        for stream, count in zip(streams, (rows * n, n))
    )
    if rest:
        across = hadamard(x[-n:].reshape(1, n), end, None).reshape(-1)
        x = torch.cat([x[: (rows - 1) * n + rest], across])
    bits, *both = rotated_signs(x[: rows * n].reshape(rows, n), flips)
    sums, squares = both
    sizes = torch.full((rows,), n, device=x.device)
    if rest:
        more = row_norms(x[rows * n :].reshape(1, rest))
        bits = torch.cat([bits, pack_uints(x[rows * n :] >= 0, 1)])
        sums, squares = torch.cat([sums, more[0]]), torch.cat([squares, more[1]])
        sizes = torch.cat([sizes, sizes.new_full((1,), rest)])
    found = squares / torch.where(sums > 0, sums, 1.0) if unbiased else sums / sizes
    most = torch.finfo(torch.float32).max
    into[0].copy_(_times_power(found, shift).clamp(max=most).to(torch.float32))
    into[1].copy_(bits)
    return largest


def tile_length(n: int) -> int:
    return max(n, LEAST_TILE)


def _tile_maxima(x: Tensor, whole: int, tile: int) -> Tensor:
    """Of `whole` tiles and of all that is left."""
    return torch.cat(
        [x[: whole * tile].reshape(whole, tile).amax(1), x[whole * tile :].amax(0, True)]
    )


def _times_power(x: Tensor, exponent: int) -> Tensor:
    half = exponent // 2
    return x * 2.0**half * 2.0 ** (exponent - half)


def _fold(rows: Tensor) -> Tensor:
    while rows.shape[1] > 1:
        half = rows.shape[1] // 2
        rows = rows[:, :half] + rows[:, half:]
    return rows[:, 0]
