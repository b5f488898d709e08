"""A sorted set of indices in the fewest bytes of a bitmap and several codes of its gaps.

The gaps of a random set are geometric, for which Golomb's run-length code (Golomb 1966,
"Run-length encodings") is optimal; Rice's power-of-two parameters (Rice 1979) come within two per
cent at a density of 0.01. A gap is split into its low r bits and a quotient in unary,
q zeros and a one. All low parts come first, at fixed width, then all quotients as one bit
stream (the layout of Elias-Fano), so that both directions are vector operations: the ones of
the stream are at q_0, q_0 + 1 + q_1, ..., and differences give the quotients back. The gaps of a
clustered set are anything but geometric: Elias' gamma and delta codes (`coding/elias.py`) of the
gaps plus one need no parameter and win there.

    byte 0    0: the bitmap, ceil(universe / 8) bytes, follows
              1 + r: ceil(count * r / 8) bytes of low parts, then the quotients, follow
              33: the gaps plus one in the gamma code follow; 34: in the delta code

Universe and count are known to the receiver and not sent.
"""

import math

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.coding._stream import Reader
from gradwire.coding.elias import (
    Code,
    decode_integers,
    encode_integers,
    expect_zero_padding,
    integers_bytes,
)
from gradwire.core.errors import WireError

_BITMAP = 0
_MAX_PARAMETER = 31  # low parts are unpacked as int32; mean gaps beyond 2^32 are rare
_SAMPLE = 4096  # gaps by which Elias' codes are ruled out
_ELIAS: dict[int, Code] = {33: "gamma", 34: "delta"}


def index_entropy_bits(universe: int, count: int) -> float:
    """log2 of the number of such sets, the least an enumerative code needs (Cover 1973)."""
    nats = math.lgamma(universe + 1) - math.lgamma(count + 1) - math.lgamma(universe - count + 1)
    return nats / math.log(2)


def encode_indices(indices: Tensor, universe: int) -> Tensor:
    """Strictly increasing int64 indices in 0 .. universe - 1, as uint8 with the mode in front."""
    if indices.dtype != torch.int64 or indices.dim() != 1:
        raise ValueError(
            f"encode_indices takes int64 [count], got {indices.dtype} {list(indices.shape)}"
        )
    if universe < 0:
        raise ValueError(f"encode_indices needs universe >= 0, got {universe}")
    gaps = torch.diff(indices, prepend=indices.new_full((1,), -1)) - 1
    if len(indices) and (int(gaps.min()) < 0 or int(indices[-1]) >= universe):
        raise ValueError(
            f"encode_indices takes strictly increasing indices in 0 .. {universe - 1}, "
            f"got {len(indices)} from {int(indices.min())} to {int(indices.max())}"
        )
    bitmap_bytes = 1 + _ceil8(universe)
    sizes = [(_rice_bytes(gaps, parameter), 1 + parameter) for parameter in _candidates(gaps)]
    shortest = min(bitmap_bytes, *(size_bytes for size_bytes, _ in sizes))
    for mode, code in _ELIAS.items():
        if _may_win(gaps, code, shortest):
            sizes.append((1 + integers_bytes(gaps + 1, code), mode))
    size_bytes, mode = min(sizes)
    if bitmap_bytes <= size_bytes:
        return _with_mode(_BITMAP, kernels.pack_ones(indices, universe))
    if mode in _ELIAS:
        packed = _with_mode(mode, encode_integers(gaps + 1, _ELIAS[mode]))
    else:
        packed = _encode_rice(gaps, mode - 1)
    assert packed.numel() == size_bytes
    return packed


def _encode_rice(gaps: Tensor, parameter: int) -> Tensor:
    quotients = gaps >> parameter
    ones = torch.cumsum(quotients + 1, 0) - 1
    num_bits = int(ones[-1]) + 1 if len(ones) else 0
    parts = [kernels.pack_ones(ones, num_bits)]
    if parameter:
        parts.insert(0, kernels.pack_uints(gaps - (quotients << parameter), parameter))
    return _with_mode(1 + parameter, *parts)


def decode_indices(packed: Tensor, universe: int, count: int) -> Tensor:
    """The inverse of `encode_indices`, as int64 [count]; other bytes are a WireError."""
    if packed.dtype != torch.uint8 or packed.dim() != 1:
        raise WireError(f"an index part is uint8 [size], got {packed.dtype} {list(packed.shape)}")
    if not 0 <= count <= universe:
        raise WireError(f"an index part of {universe} elements cannot hold {count} indices")
    if not len(packed):
        raise WireError("an index part starts with a mode byte, got 0 bytes")
    mode, body = int(packed[0]), packed[1:]
    if mode == _BITMAP:
        return _decode_bitmap(body, universe, count)
    if mode in _ELIAS and count:
        return _decode_elias(body, _ELIAS[mode], universe, count)
    return _decode_rice(body, mode - 1, universe, count)


def _decode_bitmap(body: Tensor, universe: int, count: int) -> Tensor:
    _expect(len(body) == _ceil8(universe), "bitmap bytes", len(body), _ceil8(universe))
    expect_zero_padding(body, universe)
    indices = kernels.ones_positions(body, universe)
    _expect(len(indices) == count, "indices in the bitmap", len(indices), count)
    return indices


def _decode_rice(body: Tensor, parameter: int, universe: int, count: int) -> Tensor:
    largest = _largest_parameter(universe, count)
    _expect(parameter <= largest, "as index mode", 1 + parameter, f"0 .. {1 + largest}")
    # A code no shorter than the bitmap is never sent, which also bounds what is allocated here.
    longest = _ceil8(universe) - 1
    num_low = _ceil8(count * parameter)
    shortest = num_low + _ceil8(count)  # every quotient takes at least its one
    _expect(shortest <= len(body) <= longest, "Rice bytes", len(body), f"{shortest} .. {longest}")
    low, stream = body[:num_low], body[num_low:]
    ones = kernels.ones_positions(stream, 8 * len(stream))
    _expect(len(ones) == count, "quotients", len(ones), count)
    if count == 0:
        _expect(len(stream) == 0, "bytes of quotients", len(stream), 0)
        return ones
    used = _ceil8(int(ones[-1]) + 1)
    _expect(used == len(stream), "bytes of quotients", len(stream), used)
    # The quotients alone must fit, or the shift below could overflow.
    total = int(ones[-1]) + 1 - count
    most = (universe - 1) >> parameter
    _expect(total <= most, "as sum of quotients", total, f"at most {most}")
    gaps = (torch.diff(ones, prepend=ones.new_full((1,), -1)) - 1) << parameter
    if parameter:
        expect_zero_padding(low, count * parameter)
        gaps |= kernels.unpack_uints(low, parameter, count)
    indices = torch.cumsum(gaps + 1, 0) - 1
    last = int(indices[-1])
    _expect(last < universe, "as last index", last, f"at most {universe - 1}")
    return indices


def _decode_elias(body: Tensor, code: Code, universe: int, count: int) -> Tensor:
    longest = _ceil8(universe) - 1  # as above
    _expect(len(body) <= longest, "Elias bytes", len(body), f"at most {longest}")
    reader = Reader(body)
    steps = decode_integers(reader, count, universe, code)
    reader.end()
    # In floating point, since the sum of steps that nobody sends could overflow.
    total = float(steps.sum(dtype=torch.float64))
    _expect(total < 2**62, "as sum of gaps", total, f"at most {universe}")
    indices = torch.cumsum(steps, 0) - 1
    last = int(indices[-1])
    _expect(last < universe, "as last index", last, f"at most {universe - 1}")
    # Nobody sends it where Rice's code is as short; so a damaged mode cannot mean the same set.
    rice = min(_rice_bytes(steps - 1, parameter) for parameter in _candidates(steps - 1)) - 1
    _expect(len(body) < rice, "Elias bytes", len(body), f"fewer than the {rice} of Rice's code")
    return indices


def _candidates(gaps: Tensor) -> range:
    """The parameters next to log2 of the mean gap, where the shortest code of a set lies."""
    if not len(gaps):
        return range(1)
    mean = max(int(gaps.sum()) // len(gaps), 1)
    middle = min(mean.bit_length() - 1, _MAX_PARAMETER)
    return range(max(middle - 1, 0), min(middle + 1, _MAX_PARAMETER) + 1)


def _may_win(gaps: Tensor, code: Code, size_bytes: int) -> bool:
    """Whether an Elias code may take less than `size_bytes`, by a sample of many gaps.

    Its length takes longer to find than Rice's, and of random sets it is never the shortest.
    """
    if not len(gaps):
        return False
    sample = gaps[:: max(1, len(gaps) // _SAMPLE)]
    estimate = integers_bytes(sample + 1, code) * len(gaps) / len(sample)
    return estimate <= 1.1 * size_bytes


def _largest_parameter(universe: int, count: int) -> int:
    """What `_candidates` never exceeds: the mean gap is at most (universe - count) / count."""
    if not count:
        return 0
    return min(max((universe - count) // count, 1).bit_length(), _MAX_PARAMETER)


def _rice_bytes(gaps: Tensor, parameter: int) -> int:
    unary_bits = int((gaps >> parameter).sum()) + len(gaps)
    return 1 + _ceil8(len(gaps) * parameter) + _ceil8(unary_bits)


def _with_mode(mode: int, *parts: Tensor) -> Tensor:
    return torch.cat([parts[0].new_full((1,), mode), *parts])


def _ceil8(num_bits: int) -> int:
    return -(-num_bits // 8)


def _expect(condition: bool, what: str, given: object, expected: object) -> None:
    if not condition:
        raise WireError(f"an index part has {given} {what}, expected {expected}")
