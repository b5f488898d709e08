"""Order-0 entropy coding of symbols with rANS: see `kernels/reference/rans.py` for the code itself.

The message's own frequencies, rounded to multiples of 2^-precision, travel in front:

    a byte: precision + 16 log2(lanes); the frequencies plus one in Elias' delta code; what is
    below the highest 12 bits of the symbols, if they have more, at fixed width; the rANS code

Lanes cost about two bytes each and are what makes the code fast; the sender takes the power of two
that keeps this below a quarter of a per cent. Frequencies have 12 bits, fewer in messages shorter
than that, 14 where a symbol may be rarer than 12 bits tell or there are very many.
"""

import math

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.coding._stream import (
    Reader,
    join_low,
    number,
    read,
    split_low,
    table_size,
    take_low,
    write,
)
from gradwire.coding.elias import decode_integers, encode_integers
from gradwire.core.errors import WireError

_PRECISION, _FINE = 12, 14
_MAX_LOG_LANES = 12
_BITS_PER_LANE = 8192  # a lane costs about 20 bits


def encode_rans(symbols: Tensor, alphabet: int) -> Tensor:
    """Symbols 0 .. alphabet - 1 as uint8, at most one byte more than at fixed width."""
    return write(symbols, alphabet, lambda symbols: _encode(symbols, alphabet))


def decode_rans(packed: Tensor, count: int, alphabet: int) -> Tensor:
    """The inverse of `encode_rans`, as int32 [count]; other bytes are a WireError."""
    return read(packed, count, alphabet, lambda reader: _decode(reader, count, alphabet))


def _encode(symbols: Tensor, alphabet: int) -> Tensor:
    high, low = split_low(symbols, alphabet)
    counts = torch.bincount(high, minlength=table_size(alphabet)).cpu()
    precision = _precision(counts)
    frequencies = quantised(counts, precision)
    log_lanes = _log_lanes(counts)
    code = kernels.rans_encode(high, frequencies, precision, 1 << log_lanes)
    table = encode_integers(frequencies + 1, "delta").to(symbols.device)
    return torch.cat([number(precision + 16 * log_lanes, 255, symbols), table, low, code])


def _decode(reader: Reader, count: int, alphabet: int) -> Tensor:
    log_lanes, precision = divmod(reader.number(255, "precision and lanes"), 16)
    if precision > _FINE or log_lanes > _MAX_LOG_LANES or 1 << log_lanes > max(1, count):
        raise WireError(f"rANS of {precision} bits and {1 << log_lanes} lanes for {count} symbols")
    largest = (1 << precision) + 1
    frequencies = decode_integers(reader, table_size(alphabet), largest, "delta") - 1
    low = take_low(reader, count, alphabet)
    code = reader.take(reader.rest.numel(), "rANS code")
    try:
        high = kernels.rans_decode(code, frequencies, precision, 1 << log_lanes, count)
    except ValueError as error:
        raise WireError(str(error)) from None
    return join_low(high, low, alphabet)


def quantised(counts: Tensor, precision: int) -> Tensor:
    """Counts (int64 [m]) as integers that add up to 2^precision, positive where counts are."""
    total, target = int(counts.sum()), 1 << precision
    scaled = counts * target
    frequencies = torch.where(counts > 0, (scaled // total).clamp(min=1), 0)
    missing = target - int(frequencies.sum())
    if missing >= 0:
        # Rounding down left some: to those that lost the largest fraction.
        order = torch.argsort(scaled % total, descending=True, stable=True)
        frequencies[order[:missing]] += 1
        return frequencies
    # Rare symbols took more than their share: the others give in proportion to what they have.
    spare = (frequencies - 1).clamp(min=0)
    cut = spare * -missing // int(spare.sum())
    frequencies -= cut
    order = torch.argsort(spare - cut, descending=True, stable=True)
    frequencies[order[: -missing - int(cut.sum())]] -= 1
    return frequencies


def _precision(counts: Tensor) -> int:
    total, distinct = int(counts.sum()), int((counts > 0).sum())
    fine = distinct > 256 or 16 * int(counts.max()) > 15 * total
    most, least = _FINE if fine else _PRECISION, max(1, (distinct - 1).bit_length())
    return max(least, min(most, total.bit_length()))


def _log_lanes(counts: Tensor) -> int:
    total = int(counts.sum())
    present = counts[counts > 0].to(torch.float64)
    bits = float((present * (math.log2(total) - present.log2())).sum())
    return min(_MAX_LOG_LANES, max(1, int(bits) // _BITS_PER_LANE).bit_length() - 1)
