"""float32 to 16 bits, and means of 16-bit floats."""

from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.kernels._checks import check_fused, flat
from gradwire.kernels._dispatch import InTriton, pick
from gradwire.kernels.native import halves as native
from gradwire.kernels.reference import halves as reference

_triton = InTriton("halves")


def narrow(x: Tensor, out: Tensor) -> bool | None:
    """Rounds float32 into `out`, float16 or bfloat16, saturating; whether x was finite.

    None on a device that has not finished: there `out` is NaN where x is not finite.
    """
    _check_narrow("narrow", x, out)
    run = pick(x.device, native.narrow, reference.narrow, _triton.narrow)
    return run(flat(x), flat(out))


def narrow_sum(x: Tensor, residual: Tensor, out: Tensor, lost: Tensor) -> bool | None:
    """`narrow` of x + residual, whose answer it gives; `lost` gets what is lost, float32 [d].

    `lost` must not be one of the inputs.
    """
    check_fused("narrow_sum", x, residual, lost)
    _check_narrow("narrow_sum", x, out)
    run = pick(x.device, native.narrow_sum, reference.narrow_sum, _triton.narrow_sum)
    return run(flat(x), flat(residual), flat(out), lost)


def _check_narrow(operation: str, x: Tensor, out: Tensor) -> None:
    if x.dtype != torch.float32 or out.dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(
            f"{operation} takes float32 to a 16-bit float, got {x.dtype} to {out.dtype}"
        )
    if out.numel() != x.numel() or not out.is_contiguous() or out.device != x.device:
        raise ValueError(f"{operation} needs {x.numel()} contiguous elements for its result")


def mean_halves(pieces: Sequence[Tensor], count: int, out: Tensor) -> Tensor:
    """The sum of float16 or bfloat16 vectors over `count`, added in float32 and rounded once."""
    kinds = {(piece.dtype, piece.numel(), piece.device) for piece in (*pieces, out)}
    if len(kinds) > 1 or out.dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(
            f"mean_halves takes 16-bit vectors of one kind, got {sorted(map(str, kinds))}"
        )
    if not pieces or not out.is_contiguous():
        raise ValueError(
            "mean_halves needs at least one vector, and contiguous memory for the mean"
        )
    run = pick(out.device, native.mean_halves, reference.mean_halves, _triton.mean_halves)
    return run([piece.reshape(-1) for piece in pieces], count, out)
