"""Counting symbols and finding the rare ones in C, as reference/symbols.py."""

import torch
from torch import Tensor

from gradwire.kernels.native._library import dense, load
from gradwire.kernels.reference.symbols import num_others_error, symbol_range_error

_CPU = torch.device("cpu")


def as_integers(x: Tensor) -> Tensor:
    """`x` as C may read it, in one of the integer types it knows: uint8, int32, int64."""
    if x.dtype == torch.bool:
        x = x.view(torch.uint8)
    elif x.dtype not in (torch.uint8, torch.int32, torch.int64):
        x = x.to(torch.int64)
    return dense(x)


def count_symbols(symbols: Tensor, alphabet: int) -> Tensor:
    symbols = as_integers(symbols)
    table = torch.empty(alphabet + 1, dtype=torch.int32, device=_CPU)
    counts = torch.empty(alphabet, dtype=torch.int64, device=_CPU)
    if load().gw_count_symbols(
        symbols.data_ptr(),
        symbols.element_size(),
        symbols.numel(),
        alphabet,
        table.data_ptr(),
        counts.data_ptr(),
    ):
        raise symbol_range_error(symbols, alphabet)
    return counts


def find_others(symbols: Tensor, frequent: int, num_others: int) -> tuple[Tensor, Tensor]:
    symbols = as_integers(symbols)
    positions = torch.empty(num_others + 1, dtype=torch.int64, device=_CPU)
    others = torch.empty(num_others + 1, dtype=torch.int32, device=_CPU)
    found = load().gw_find_others(
        symbols.data_ptr(),
        symbols.element_size(),
        symbols.numel(),
        frequent,
        num_others,
        positions.data_ptr(),
        others.data_ptr(),
    )
    if found != num_others:
        raise num_others_error(num_others)
    return positions[:num_others], others[:num_others]
