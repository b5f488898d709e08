"""Counting symbols and finding the rare ones."""

import torch
from torch import Tensor


def symbol_range_error(symbols: Tensor, alphabet: int) -> ValueError:
    low, high = int(symbols.min()), int(symbols.max())
    return ValueError(f"symbols from {low} to {high}, expected 0 .. {alphabet - 1}")


def num_others_error(num_others: int) -> ValueError:
    return ValueError(f"find_others: not {num_others} symbols differ from the frequent one")


def count_symbols(symbols: Tensor, alphabet: int) -> Tensor:
    symbols = symbols.to(torch.int64)
    if symbols.numel() and not 0 <= int(symbols.min()) <= int(symbols.max()) < alphabet:
        raise symbol_range_error(symbols, alphabet)
    return torch.bincount(symbols, minlength=alphabet)


def find_others(symbols: Tensor, frequent: int, num_others: int) -> tuple[Tensor, Tensor]:
    symbols = symbols.to(torch.int32)
    positions = torch.nonzero(symbols != frequent).reshape(-1)
    if positions.numel() != num_others:
        raise num_others_error(num_others)
    others = symbols[positions]
    return positions, others - (others > frequent).to(torch.int32)
