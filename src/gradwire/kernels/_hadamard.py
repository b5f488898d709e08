"""The Walsh-Hadamard transform, and the signs of what it rotates."""

import torch
from torch import Tensor

from gradwire.kernels._checks import check_packed, check_scale
from gradwire.kernels._dispatch import InTriton, Pair, pick, runs_triton
from gradwire.kernels.native import hadamard as native
from gradwire.kernels.reference import hadamard as reference
from gradwire.kernels.reference.hadamard import Stream

_triton = InTriton("hadamard")
LONGEST_ENCODED = 4096  # elements of a row that a program of an accelerator transforms alone


def hadamard(
    x: Tensor,
    before: Tensor | None = None,
    after: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """The orthonormal Walsh-Hadamard transform of each row of [rows, 2^k]; its own inverse.

    float32 or float64. `before` and `after` are packed bits (uint8), one per element, row after
    row: where a bit is 1 the sign of that element is flipped before or after the transform.
    The result goes to `out`, which may be x itself, if given. Backends agree to the bit.
    """
    _check_rows("hadamard", x)
    for flips in (before, after):
        if flips is not None:
            check_packed("hadamard", flips, x.numel())
    _check_rows_out("hadamard", out, tuple(x.shape), x)
    run = pick(x.device, native.hadamard, reference.hadamard, _triton.hadamard)
    return run(x, before, after, out)


def row_norms(y: Tensor) -> tuple[Tensor, Tensor]:
    """Sums of |y| and of y^2 over each row of [rows, n], float64: the same bits on every device."""
    return pick(y.device, reference.row_norms, reference.row_norms, _triton.row_norms)(y)


def rotated_signs(x: Tensor, before: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """y = `hadamard(x, before)` as packed bits, 1 where y >= 0, and the `row_norms` of y."""
    _check_rows("rotated_signs", x)
    check_packed("rotated_signs", before, x.numel())
    run = pick(x.device, native.rotated_signs, reference.rotated_signs, _triton.rotated_signs)
    return run(x, before)


def unrotated_signs(
    packed: Tensor, scale: Tensor, n: int, after: Tensor, out: Tensor | None = None
) -> Tensor:
    """`hadamard(y, after=after)` of rows of n: scale[row] where the bit is 1, else minus that."""
    for bits in (packed, after):
        check_packed("unrotated_signs", bits, len(scale) * n)
    _check_rows_out("unrotated_signs", out, (len(scale), n), scale)
    run = pick(
        packed.device,
        native.unrotated_signs,
        reference.unrotated_signs,
        _triton.unrotated_signs,
    )
    return run(packed, scale, n, after, out)


def encodes_rotated_signs(device: torch.device, dtype: torch.dtype, n: int) -> bool:
    """Whether `encode_rotated_signs` serves, and is fastest: it is written for accelerators."""
    return runs_triton(device) and dtype == torch.float32 and 8 <= n <= LONGEST_ENCODED


def encode_rotated_signs(
    x: Tensor,
    n: int,
    seed: int,
    streams: tuple[Stream, Stream],
    unbiased: bool,
    exponents: tuple[int, int],
    into: Pair,
) -> Tensor:
    """Scales and signs of a whole vector in rows of n, from the seed and two Philox streams.

    The elements that fill no row are transformed with those before them first, n together, under
    signs of the second stream; what then lies in whole rows is `rotated_signs` under signs of the
    first one. `into` gets a scale for each row and for the rest, float32, and all packed signs. A
    scale is |y|^2 / |y|_1 or, if not `unbiased`, |y|_1 / n. All is computed from x times a power
    of two if the exponent of the largest magnitude (of `math.frexp`) is not within `exponents`.

    Returns the largest magnitudes of tiles of x: finite if and only if x is.
    """
    count, (scale, packed) = x.numel(), into
    if x.dtype != torch.float32 or not 8 <= n <= min(count, LONGEST_ENCODED) or n & (n - 1):
        raise ValueError(
            f"encode_rotated_signs takes float32 and rows of 8, 16 .. {LONGEST_ENCODED} elements, "
            f"of which there is one at least; got {count} x {x.dtype} in rows of {n}"
        )
    check_packed("encode_rotated_signs", packed, count)
    check_scale("encode_rotated_signs", scale, count, n)
    composed = reference.encode_rotated_signs
    run = pick(x.device, composed, composed, _triton.encode_rotated_signs)
    return run(x.reshape(-1), n, seed, streams, unbiased, exponents, into)


def _check_rows_out(
    operation: str, out: Tensor | None, shape: tuple[int, ...], like: Tensor
) -> None:
    if out is not None and (
        tuple(out.shape) != shape
        or (out.dtype, out.device) != (like.dtype, like.device)
        or not out.is_contiguous()
    ):
        raise ValueError(
            f"{operation}: out must be contiguous {list(shape)} of {like.dtype}, got "
            f"{list(out.shape)} of {out.dtype}"
        )


def _check_rows(operation: str, x: Tensor) -> None:
    if x.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"{operation} takes float32 or float64, got {x.dtype}")
    if x.dim() != 2 or x.shape[1] < 1 or x.shape[1] & (x.shape[1] - 1):
        raise ValueError(f"{operation} takes rows of 2^k elements, got a tensor of {list(x.shape)}")
