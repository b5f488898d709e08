"""Interleaved rANS (Duda 2013, "Asymmetric numeral systems"): range coding with integer states.

With frequencies f_s that add up to M = 2^precision and c_s the sum of those before, pushing a
symbol onto a state x is

    x <- M floor(x / f_s) + c_s + x mod f_s

and popping finds s from x mod M and undoes it. States stay in [2^16, 2^32): before a push that
would leave it a state sheds its low 16 bits as a word of the stream, and after a pop one that fell
below takes a word. Symbol i belongs to lane i mod lanes; each lane has a state of its own, and all
take their words from one stream, row after row. So the lanes of a row are one vector operation.
A state begins at 2^16, pushes go from the last symbol to the first, pops from the first to the
last, and the words lie in the order of the pops.

    bytes of a code: the states as uint32 [lanes], then the words as uint16, little-endian
"""

import torch
from torch import Tensor

_MIN_STATE = 1 << 16


def missing_frequency_error(symbols: Tensor) -> ValueError:
    low, high = int(symbols.min()), int(symbols.max())
    return ValueError(f"rans_encode: a symbol in {low} .. {high} has no frequency")


def invalid_code_error() -> ValueError:
    return ValueError("rans_decode: the bytes are no rANS code of so many symbols")


def rans_encode(symbols: Tensor, frequencies: Tensor, precision: int, lanes: int) -> Tensor:
    symbols, frequencies = symbols.to(torch.int64), frequencies.to(torch.int64)
    count = symbols.numel()
    inside = (symbols >= 0) & (symbols < frequencies.numel())
    if not bool(inside.all()) or not bool((frequencies[symbols] > 0).all()):
        raise missing_frequency_error(symbols)
    starts = torch.cumsum(frequencies, 0) - frequencies
    states = torch.full((lanes,), _MIN_STATE, dtype=torch.int64, device=symbols.device)
    words = torch.zeros(count, dtype=torch.int32, device=symbols.device)
    shed = torch.zeros(count, dtype=torch.bool, device=symbols.device)
    for row in reversed(range(0, count, lanes)):
        here = slice(row, row + lanes)
        f, c = frequencies[symbols[here]], starts[symbols[here]]
        x = states[: f.numel()]
        full = (x >> (32 - precision)) >= f
        shed[here], words[here] = full, (x & 0xFFFF).to(torch.int32)
        x = torch.where(full, x >> 16, x)
        quotient = x // f
        states[: f.numel()] = (quotient << precision) + c + x - quotient * f
    return torch.cat([_to_bytes(states, 4), _to_bytes(words[shed], 2)])


def rans_decode(
    packed: Tensor, frequencies: Tensor, precision: int, lanes: int, count: int
) -> Tensor:
    frequencies = frequencies.to(torch.int64)
    symbol_of = torch.repeat_interleave(frequencies)  # [2^precision]
    slot_frequency = frequencies[symbol_of]
    within = torch.arange(symbol_of.numel(), device=packed.device)
    within -= (torch.cumsum(frequencies, 0) - frequencies)[symbol_of]
    states = _from_bytes(packed[: 4 * lanes], 4)
    words = _from_bytes(packed[4 * lanes :], 2)
    num_words = words.numel()
    words = torch.cat([words, words.new_zeros(1)])  # what is read where none is left
    used = torch.zeros((), dtype=torch.int64, device=packed.device)
    symbols = torch.empty(count, dtype=torch.int32, device=packed.device)
    for row in range(0, count, lanes):
        width = min(lanes, count - row)
        x = states[:width]
        slot = x & ((1 << precision) - 1)
        symbols[row : row + width] = symbol_of[slot].to(torch.int32)
        x = slot_frequency[slot] * (x >> precision) + within[slot]
        empty = x < _MIN_STATE
        place = used + torch.cumsum(empty, 0)
        x = torch.where(empty, x << 16 | words[(place - 1).clamp(0, num_words)], x)
        states[:width] = x
        used = place[-1]
    if int(used) != num_words or not bool((states == _MIN_STATE).all()):
        raise invalid_code_error()
    return symbols


def _to_bytes(values: Tensor, size: int) -> Tensor:
    shifts = torch.arange(0, 8 * size, 8, device=values.device)
    return ((values.to(torch.int64)[:, None] >> shifts) & 0xFF).to(torch.uint8).reshape(-1)


def _from_bytes(packed: Tensor, size: int) -> Tensor:
    shifts = torch.arange(0, 8 * size, 8, device=packed.device)
    return (packed.reshape(-1, size).to(torch.int64) << shifts).sum(dim=1)
