"""Count sketches."""

import torch
from torch import Tensor

from gradwire.kernels._checks import check_count, fuses
from gradwire.kernels._dispatch import InTriton, pick
from gradwire.kernels.native import sketch as native
from gradwire.kernels.reference import sketch as reference

triton = InTriton("sketch")


def sketch(x: Tensor, hashes: Tensor, columns: int) -> Tensor:
    """[rows, columns] in x's dtype: each row adds up elements under its own signs.

    `hashes` are a multiplier and an offset per row, int64 [2, rows], uniform on all integers.
    """
    _check("sketch", hashes, x.numel(), columns)
    run = reference.sketch
    if fuses(x):
        run = pick(x.device, native.sketch, run, triton.sketch)
    return run(x.reshape(-1), hashes, columns)


def sketch_medians(table: Tensor, hashes: Tensor, count: int) -> Tensor:
    """[count]: the median over an odd number of rows of a sketch's estimates of each element."""
    check_count("sketch_medians", "count", count)
    _check("sketch_medians", hashes, count, table.shape[1])
    if hashes.shape[1] != len(table) or len(table) % 2 == 0:
        raise ValueError(
            f"sketch_medians takes an odd number of rows, hashed alike: got {len(table)} and "
            f"hashes of {hashes.shape[1]}"
        )
    run = reference.sketch_medians
    if fuses(table):
        run = pick(table.device, native.sketch_medians, run, triton.sketch_medians)
    return run(table, hashes, count)


def _check(operation: str, hashes: Tensor, count: int, columns: int) -> None:
    if hashes.dtype != torch.int64 or hashes.dim() != 2 or len(hashes) != 2:
        raise ValueError(
            f"{operation} takes hashes int64 [2, rows], got {hashes.dtype} {list(hashes.shape)}"
        )
    if not 1 <= columns < 1 << 31:
        raise ValueError(f"{operation} takes 1 .. 2^31 - 1 columns, got {columns}")
    if count >= 1 << 32:
        raise ValueError(f"{operation} hashes fewer than 2^32 elements, got {count}")
