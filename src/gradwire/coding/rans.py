"""Order-0 entropy coding of symbols with rANS: see `kernels/reference/rans.py` for the code itself.

The message's own frequencies, rounded to multiples of 2^-precision, travel in front:

    a byte: precision + 16 log2(lanes); the frequencies plus one in Elias' delta code; what is
    below the highest 12 bits of the symbols, if they have more, at fixed width; the rANS code

Lanes cost about two bytes each and are what makes the code fast; the sender takes the power of two
that keeps this below a quarter of a per cent. Frequencies have 12 bits, fewer in messages shorter
than that, 14 where a symbol may be rarer than 12 bits can express or there are very many.
"""

import math

import numpy as np
import torch
from torch import Tensor

from gradwire import kernels
from gradwire.coding._stream import (
    Coded,
    StreamReader,
    join_low,
    read_symbols,
    split_low,
    table_size,
    take_low,
    write_number,
    write_symbols,
)
from gradwire.coding.elias import decode_integers, encode_integers
from gradwire.core.errors import WireError

_PRECISION_BITS, _FINE_PRECISION_BITS = 12, 14
_MAX_LOG_LANES = 12
_BITS_PER_LANE = 8192  # a lane costs about 20 bits


def encode_rans(symbols: Tensor, alphabet: int) -> Tensor:
    """Symbols 0 .. alphabet - 1 as uint8, at most one byte more than at fixed width."""
    return write_symbols(symbols, alphabet, lambda symbols: _encode(symbols, alphabet))


def decode_rans(packed: Tensor, count: int, alphabet: int) -> Tensor:
    """The inverse of `encode_rans`, as int32 [count]; other bytes are a WireError."""
    return read_symbols(packed, count, alphabet, lambda reader: _decode(reader, count, alphabet))


def _encode(symbols: Tensor, alphabet: int) -> Coded:
    high, low = split_low(symbols, alphabet)
    counts = kernels.count_symbols(high, table_size(alphabet)).cpu()
    precision = _precision(counts)
    frequencies = quantise_counts(counts, precision)
    log_lanes = _log_lanes(counts)
    code = kernels.rans_encode(high, frequencies, precision, 1 << log_lanes)
    table = encode_integers(frequencies + 1, "delta")
    return write_number(precision + 16 * log_lanes, 255), [table, *low, code]


def _decode(reader: StreamReader, count: int, alphabet: int) -> Tensor:
    log_lanes, precision = divmod(reader.read_number(255, "precision and lanes"), 16)
    if (
        precision > _FINE_PRECISION_BITS
        or log_lanes > _MAX_LOG_LANES
        or 1 << log_lanes > max(1, count)
    ):
        raise WireError(f"rANS of {precision} bits and {1 << log_lanes} lanes for {count} symbols")
    largest = (1 << precision) + 1
    frequencies = decode_integers(reader, table_size(alphabet), largest, "delta") - 1
    low = take_low(reader, count, alphabet)
    code = reader.take(reader.rest.numel(), "rANS code")
    high = kernels.rans_decode(code, frequencies, precision, 1 << log_lanes, count)
    return join_low(high, low, alphabet)


# Tables are small, and numpy takes a microsecond where torch takes five.


def quantise_counts(counts: Tensor, precision: int) -> Tensor:
    """Counts (int64 [m]) as integers that add up to 2^precision, positive where counts are."""
    given = counts.numpy()
    total, target = int(given.sum()), 1 << precision
    scaled = given * target
    frequencies = scaled // total
    frequencies[(given > 0) & (frequencies == 0)] = 1
    missing = target - int(frequencies.sum())
    if missing >= 0:
        # Rounding down left some: to those that lost the largest fraction.
        order = np.argsort(-(scaled % total), kind="stable")
        frequencies[order[:missing]] += 1
        return torch.from_numpy(frequencies)
    # Rare symbols took more than their share: the others give in proportion to what they have.
    spare = np.maximum(frequencies - 1, 0)
    cut = spare * -missing // int(spare.sum())
    frequencies -= cut
    order = np.argsort(cut - spare, kind="stable")
    frequencies[order[: -missing - int(cut.sum())]] -= 1
    return torch.from_numpy(frequencies)


def _precision(counts: Tensor) -> int:
    given = counts.numpy()
    total, distinct = int(given.sum()), int(np.count_nonzero(given))
    fine = distinct > 256 or 16 * int(given.max()) > 15 * total
    most, least = (
        _FINE_PRECISION_BITS if fine else _PRECISION_BITS,
        max(1, (distinct - 1).bit_length()),
    )
    return max(least, min(most, total.bit_length()))


def _log_lanes(counts: Tensor) -> int:
    given = counts.numpy()
    present = given[given > 0].astype(np.float64)
    bits = float((present * (math.log2(given.sum()) - np.log2(present))).sum())
    return min(_MAX_LOG_LANES, max(1, int(bits) // _BITS_PER_LANE).bit_length() - 1)
