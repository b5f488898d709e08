"""Elements of large magnitude."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from gradwire.kernels._checks import check_apart, check_fused, check_motion, check_rows, fuses
from gradwire.kernels._dispatch import InTriton, pick
from gradwire.kernels._motion import Motion, Residual, row_of_residual
from gradwire.kernels.native import selection as native
from gradwire.kernels.reference import selection as reference
from gradwire.kernels.reference import selection_rows as reference_rows

triton = InTriton("selection")
triton_rows = InTriton("selection_rows")


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
        return reference.select_largest(_vector(x), _flat(residual), count, out)
    _check("select_largest", x, residual, out)
    run = pick(x.device, native.select_largest, reference.select_largest, triton.select_largest)
    return run(_vector(x), _flat(residual), count, out)


def select_largest_rows(
    x: Tensor, residual: Residual | None, count: int, out: Tensor | None = None
) -> list[tuple[Tensor, Tensor]]:
    """`select_largest` of each row of x, [rows, n]; on CUDA in the launches of one.

    Vectors of the residual and `out` are [rows, n], too.
    """
    if x.dim() != 2 or not 0 <= count <= x.shape[1]:
        raise ValueError(f"select_largest_rows: {count} elements of rows of {list(x.shape)}")
    if not fuses(x, residual, out):
        return _each_row(x, residual, count, out)
    _check_rows("select_largest_rows", x, residual, out)
    return pick(x.device, _each_row, _each_row, triton.select_largest_rows)(x, residual, count, out)


def select_sampled(
    x: Tensor,
    residual: Residual | None,
    sample: int,
    rank: int,
    seed: int,
    stream: tuple[int, int, int],
    most: int,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor] | None:
    """The at most `most` largest that reach the magnitude which `rank` elements of a sample reach.

    The sample has the elements of x + residual at `sample` of `strata_positions`; zero reaches
    nothing. As `select_largest` otherwise. None where it is made of other operations.
    """
    if not 1 <= rank <= sample <= x.numel():
        raise ValueError(f"select_sampled: {rank} of {sample} of {x.numel()} elements")
    run: Callable[..., Any] = reference.select_sampled
    if fuses(x, residual, out):
        _check("select_sampled", x, residual, out)
        run = pick(x.device, _composed, run, triton.select_sampled)
    return run(_vector(x), _flat(residual), sample, rank, seed, stream, most, out)


def select_sampled_rows(
    x: Tensor,
    residual: Residual | None,
    sample: int,
    rank: int,
    keys: Sequence[tuple[int, tuple[int, int, int]]],
    most: int,
    out: Tensor | None = None,
) -> list[tuple[Tensor, Tensor]] | None:
    """`select_sampled` of each row of x, [rows, n], with seeds and streams of their own; on CUDA in
    the launches of one.

    Vectors of the residual and `out` are [rows, n], too.
    """
    if x.dim() != 2 or len(keys) != len(x) or not 1 <= rank <= sample <= x.shape[1]:
        raise ValueError(
            f"select_sampled_rows: {rank} of {sample} elements with {len(keys)} keys, of rows of "
            f"{list(x.shape)}"
        )
    run: Callable[..., Any] = reference_rows.select_sampled_rows
    if fuses(x, residual, out):
        _check_rows("select_sampled_rows", x, residual, out)
        run = pick(x.device, _composed, run, triton_rows.select_sampled_rows)
    return run(x, residual, sample, rank, keys, most, out)


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
        return reference.select_above(_vector(x), _flat(residual), threshold, capacity, out)
    _check("select_above", x, residual, out)
    run = pick(x.device, native.select_above, reference.select_above, triton.select_above)
    return run(_vector(x), _flat(residual), threshold, max(0, capacity), out)


def _composed(*arguments: Any) -> Any:
    """C has the operations that it is made of, and no other."""
    return None


def _each_row(
    x: Tensor, residual: Residual | None, count: int, out: Tensor | None
) -> list[tuple[Tensor, Tensor]]:
    return [select_largest(row, owed, count, left) for row, owed, left in _rows(x, residual, out)]


def _rows(
    x: Tensor, residual: Residual | None, out: Tensor | None
) -> Iterator[tuple[Tensor, Residual | None, Tensor | None]]:
    for r, row in enumerate(x):
        yield row, row_of_residual(residual, r), None if out is None else out[r]


def _flat(residual: Residual | None) -> Residual | None:
    if residual is None or isinstance(residual, Motion):
        return None if residual is None else residual.flat()
    return _vector(residual)


def _vector(x: Tensor) -> Tensor:
    return x if x.dim() == 1 else x.reshape(-1)


def _check_rows(operation: str, x: Tensor, residual: Residual | None, out: Tensor | None) -> None:
    """Of all rows at once: they are many, and a look at each takes longer than to select."""
    if isinstance(residual, Motion):
        for vector in (residual.residual, residual.velocity):
            check_rows(operation, x, vector, out)
            check_rows(operation, x, vector, residual.moved)
        check_apart(operation, residual, out)
    else:
        check_rows(operation, x, residual, out)


def _check(operation: str, x: Tensor, residual: Residual | None, out: Tensor | None) -> None:
    if isinstance(residual, Motion):
        check_motion(operation, x, residual, out)
    else:
        check_fused(operation, x, residual, out)
