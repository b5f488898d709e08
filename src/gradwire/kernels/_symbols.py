"""Counts of each symbol of a message, and the positions of those that differ from one."""

from torch import Tensor

from gradwire.kernels._checks import check_count
from gradwire.kernels._dispatch import pick
from gradwire.kernels.native import symbols as native
from gradwire.kernels.reference import symbols as reference


def count_symbols(symbols: Tensor, alphabet: int) -> Tensor:
    """int64 [alphabet]; an integer outside 0 .. alphabet - 1 is a ValueError."""
    if symbols.dtype.is_floating_point or symbols.dtype.is_complex:
        raise ValueError(f"count_symbols takes integers, got {symbols.dtype}")
    if not 1 <= alphabet <= 2**24:
        raise ValueError(f"count_symbols takes an alphabet of 1 .. 2^24, got {alphabet}")
    run = pick(symbols.device, native.count_symbols, reference.count_symbols)
    return run(symbols.reshape(-1), alphabet)


def find_others(symbols: Tensor, frequent: int, num_others: int) -> tuple[Tensor, Tensor]:
    """Where symbols differ from the frequent one (int64), and which of the others are there.

    Those (int32) are numbered as if there were no frequent one. `num_others` is how many there
    are; another number is a ValueError.
    """
    check_count("find_others", "num_others", num_others)
    run = pick(symbols.device, native.find_others, reference.find_others)
    return run(symbols.reshape(-1), frequent, num_others)
