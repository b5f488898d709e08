"""Interleaved rANS: lanes are threads.

A lane's pushes depend on its own symbols alone, so programs encode some lanes each, and note which
elements shed a word; the words are gathered afterwards. Pops of all lanes read one stream: one
program decodes, which finds by a prefix sum over the lanes of a row where each word lies.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels.reference import rans as reference
from gradwire.kernels.triton._common import cdiv, launch, power_of_two

_LANES = 32  # of a program that encodes
_MOST_LANES = 4096  # of the program that decodes
_LANES_OF_WARP = 256  # there


def rans_encode(symbols: Tensor, frequencies: Tensor, precision: int, lanes: int) -> Tensor:
    symbols = symbols.contiguous()
    count, device = symbols.numel(), symbols.device
    frequencies = frequencies.to(torch.int32)
    starts = (torch.cumsum(frequencies, 0) - frequencies).to(torch.int32)
    states = torch.empty(lanes, dtype=torch.int32, device=device)
    words = torch.empty(count, dtype=torch.int16, device=device)
    shed = torch.empty(count, dtype=torch.bool, device=device)
    missing = torch.zeros(1, dtype=torch.int32, device=device)
    launch(
        _encode,
        (cdiv(lanes, _LANES),),
        symbols,
        frequencies,
        starts,
        frequencies.numel(),
        count,
        lanes,
        cdiv(count, lanes),
        states,
        words,
        shed,
        missing,
        PRECISION=precision,
        LANES=_LANES,
        num_warps=1,
        num_stages=1,
    )
    written = words[shed]
    if bool(missing):
        raise reference.missing_frequency_error(symbols)
    return torch.cat([states.view(torch.uint8), written.view(torch.uint8)])


def rans_decode(
    packed: Tensor, frequencies: Tensor, precision: int, lanes: int, count: int
) -> Tensor:
    if lanes > _MOST_LANES:
        return reference.rans_decode(packed, frequencies, precision, lanes, count)
    device = packed.device
    frequencies = frequencies.to(torch.int64)
    symbol_of = torch.repeat_interleave(frequencies, output_size=1 << precision)
    within = torch.arange(1 << precision, device=device)
    within -= (torch.cumsum(frequencies, 0) - frequencies)[symbol_of]
    slots = (frequencies[symbol_of] | within << 16).to(torch.int32)
    states = packed[: 4 * lanes].clone().view(torch.int32)
    words = packed[4 * lanes :].clone().view(torch.int16)
    symbols = torch.empty(count, dtype=torch.int32, device=device)
    is_code = torch.empty(1, dtype=torch.bool, device=device)
    tile = power_of_two(lanes)
    launch(
        _decode,
        (1,),
        words,
        words.numel(),
        symbol_of.to(torch.int32),
        slots,
        states,
        lanes,
        count,
        cdiv(count, lanes),
        symbols,
        is_code,
        PRECISION=precision,
        LANES=tile,
        num_warps=max(1, min(16, tile // _LANES_OF_WARP)),
        num_stages=1,
    )
    if not bool(is_code):
        raise reference.invalid_code_error()
    return symbols


@triton.jit(do_not_specialize=["num_symbols", "count", "lanes", "rows"])
def _encode(
    symbols,
    frequencies,
    starts,
    num_symbols,
    count,
    lanes,
    rows,
    states,
    words,
    shed,
    missing,
    PRECISION: tl.constexpr,
    LANES: tl.constexpr,
):
    lane = tl.program_id(0) * LANES + tl.arange(0, LANES)
    x = tl.full((LANES,), 1 << 16, tl.uint32)
    bad = tl.zeros((LANES,), tl.int32)
    at = tl.zeros((1,), tl.int64) + (rows - 1)
    at = at * lanes + lane  # the last row comes first
    # Symbols of four rows are on their way.
    symbol = _symbols_at(symbols, at, lane, lanes, count)
    second = _symbols_at(symbols, at - lanes, lane, lanes, count)
    third = _symbols_at(symbols, at - 2 * lanes, lane, lanes, count)
    for _ in range(rows):
        fourth = _symbols_at(symbols, at - 3 * lanes, lane, lanes, count)
        here = (lane < lanes) & (at < count)
        known = here & (symbol >= 0) & (symbol < num_symbols)
        f = tl.load(frequencies + symbol, mask=known, other=0)
        start = tl.load(starts + symbol, mask=known, other=0).to(tl.uint32)
        bad = bad | (here & (f <= 0)).to(tl.int32)
        f = tl.maximum(f, 1).to(tl.uint32)
        full = (x >> (32 - PRECISION)) >= f
        tl.store(words + at, (x & 0xFFFF).to(tl.int16), mask=here)
        tl.store(shed + at, full, mask=here)
        rest = tl.where(full, x >> 16, x)
        quotient = rest // f
        pushed = (quotient << PRECISION) + start + (rest - quotient * f)
        x = tl.where(here, pushed, x)
        at -= lanes
        symbol, second, third = second, third, fourth
    tl.store(states + lane, x.to(tl.int32, bitcast=True), mask=lane < lanes)
    if tl.sum(bad, axis=0) > 0:
        tl.store(missing, 1)


@triton.jit
def _symbols_at(symbols, at, lane, lanes, count):
    here = (lane < lanes) & (at >= 0) & (at < count)
    return tl.load(symbols + at, mask=here, other=0)


@triton.jit(do_not_specialize=["num_words", "count", "lanes", "rows"])
def _decode(
    words,
    num_words,
    symbol_of,
    slots,
    states,
    lanes,
    count,
    rows,
    symbols,
    is_code,
    PRECISION: tl.constexpr,
    LANES: tl.constexpr,
):
    lane = tl.arange(0, LANES)
    x = tl.load(states + lane, mask=lane < lanes, other=1 << 16).to(tl.uint32, bitcast=True)
    used = tl.zeros((1,), tl.int32)
    at = lane.to(tl.int64)
    for _ in range(rows):
        here = (lane < lanes) & (at < count)
        slot = (x & ((1 << PRECISION) - 1)).to(tl.int32)
        tl.store(symbols + at, tl.load(symbol_of + slot), mask=here)
        entry = tl.load(slots + slot)
        popped = (entry & 0xFFFF).to(tl.uint32) * (x >> PRECISION) + (entry >> 16).to(tl.uint32)
        empty = here & (popped < (1 << 16))
        place = used + tl.cumsum(empty.to(tl.int32), axis=0) - 1
        word = tl.load(words + place, mask=empty & (place < num_words), other=0)
        filled = (popped << 16) | (word.to(tl.int32) & 0xFFFF).to(tl.uint32)
        x = tl.where(here, tl.where(empty, filled, popped), x)
        used += tl.sum(empty.to(tl.int32), axis=0)
        at += lanes
    wrong = tl.sum((x != (1 << 16)).to(tl.int32), axis=0)
    tl.store(is_code + tl.arange(0, 1), (used == num_words) & (wrong == 0))
