"""Elements of large magnitude."""

from torch import Tensor

from gradwire.kernels._checks import check_fused, check_motion, fuses
from gradwire.kernels._motion import Motion, Residual
from gradwire.kernels.native import selection as native
from gradwire.kernels.reference import selection as reference


def select_largest(
    x: Tensor, residual: Residual | None, count: int, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Ascending positions (int64) and values of the `count` largest magnitudes of x + residual.

    Of equal ones the first. `out` gets the others, with zeros where elements were taken; it must
    not be one of the inputs. NaN is larger than any number. The residual may be a `Motion`; then
    there must be an `out`, and the velocity is moved in the same pass.
    """
    if not 0 <= count <= x.numel():
        raise ValueError(f"select_largest: {count} of {x.numel()} elements")
    if not fuses(x, residual, out):
        return reference.select_largest(x.reshape(-1), _flat(residual), count, out)
    _check("select_largest", x, residual, out)
    return native.select_largest(x.reshape(-1), _flat(residual), count, out)


def select_above(
    x: Tensor,
    residual: Residual | None,
    threshold: float,
    capacity: int = 4096,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Ascending positions and values of magnitudes of x + residual of at least `threshold`.

    As `select_largest`. If more than `capacity` are found it takes a second pass.
    """
    if not threshold >= 0:
        raise ValueError(f"select_above takes a threshold of at least 0, got {threshold}")
    if not fuses(x, residual, out):
        return reference.select_above(x.reshape(-1), _flat(residual), threshold, capacity, out)
    _check("select_above", x, residual, out)
    return native.select_above(x.reshape(-1), _flat(residual), threshold, max(0, capacity), out)


def _flat(residual: Residual | None) -> Residual | None:
    if residual is None or isinstance(residual, Motion):
        return None if residual is None else residual.flat()
    return residual.reshape(-1)


def _check(operation: str, x: Tensor, residual: Residual | None, out: Tensor | None) -> None:
    if isinstance(residual, Motion):
        check_motion(operation, x, residual, out)
    else:
        check_fused(operation, x, residual, out)
