"""A plane of bits, one for each element, in less than a bit each: words of polar codes.

The sender has a log-likelihood ratio for each element, positive if it prefers a zero (8 units to a
nat, as in `kernels.polar_quantise`), and takes the words that successive cancellation finds. The
receiver needs their free inputs. A vector is cut into pieces: up to 64 blocks of 32768 positions
each, then one block for every power of two in the number of elements that are left, down to 256;
what is left then is a block with some positions to spare. That errs less than to shorten blocks: a
code of half the length loses less than one that lacks half its positions. Of each piece travel

    1 byte: the rate, in 1/256 of a bit per position; the free inputs of all its blocks, packed

The rate is the mean information of the ratios about the bits, 1 - h2(1 / (1 + e^-L)), so elements
without a preference cost nothing. Polar codes take any mixture of positions, but not an order of
them (rows of a matrix that are all small): the positions of a block are permuted, always in the
same way. Free are the inputs of the largest polarization weight. At whole powers of two it is as
good as an order made for the very ratios, and both sides have it without a table. No two weights of
a block are closer than 0.00009, so that rounding does not change their order on any machine.
"""

import functools
import math
import zlib
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.coding.polar.channel import CERTAIN, UNITS
from gradwire.coding.polar.lanes import Lanes, select, spread
from gradwire.coding.polar.polarization_weight import scores
from gradwire.core.errors import WireError
from gradwire.core.key import Key

_MAX_BLOCK, _MIN_BLOCK = 1 << 15, 1 << 8  # positions of a block
_RATE_UNITS = 256  # per bit
_MAX_RATE = 192
_SAMPLE_NUMEL = 1 << 16  # elements on which a rate is decided


def encode_plane(ratios: Tensor) -> tuple[Tensor, Tensor]:
    """The code, uint8, and the packed bits that it decodes to, for ratios (int8 [numel])."""
    pieces, start = [], 0
    for lanes in _pieces(ratios.numel()):
        own = ratios[start : start + lanes.numel]
        start += lanes.numel
        if own.numel() < lanes.numel:
            own = torch.nn.functional.pad(own, (0, lanes.numel - own.numel()))
        rate = min(max(round(_RATE_UNITS * _mean_information(own)), 1), _MAX_RATE)
        pieces.append((lanes, lanes.spread(own)[0], rate))
    found = kernels.plane_words(
        [
            kernels.PlanePiece(own, _code(lanes.length, rate).kinds, _order(lanes.length))
            for lanes, own, rate in pieces
        ]
    )
    codes, planes = [], []
    for (lanes, _, rate), (inputs, word) in zip(pieces, found):
        codes.append(torch.tensor([rate], dtype=torch.uint8, device="cpu"))
        codes.append(lanes.join(select(inputs.unsqueeze(0), _code(lanes.length, rate).rows)))
        planes.append(lanes.join(word.unsqueeze(0)))
    return torch.cat(codes), torch.cat(planes)[: -(-ratios.numel() // 8)]


def decode_plane(packed: Tensor, numel: int) -> tuple[Tensor, int]:
    """The bits of a plane at the front of bytes, packed, and how many bytes it takes."""
    planes, start = [], 0
    for lanes in _pieces(numel):
        rate = int(packed[start]) if packed.numel() > start else 0
        if not 1 <= rate <= _MAX_RATE:
            raise WireError(f"plane: a rate of {rate} / {_RATE_UNITS}")
        num_rows = _num_rows(lanes.length, rate)
        end = start + 1 + lanes.num_bytes(num_rows)
        if packed.numel() < end:
            raise WireError(f"plane: {packed.numel()} bytes, of {end} or more")
        inputs = lanes.cut(packed[start + 1 : end], num_rows)
        code = _code(lanes.length, rate)
        word = kernels.polar_transform(spread(inputs, code.rows, lanes.length))
        planes.append(lanes.join(word[:, _inverse(lanes.length)]))
        start = end
    return torch.cat(planes)[: -(-numel // 8)], start


def _pieces(numel: int) -> Iterator[Lanes]:
    """Whole blocks; the last of all may be more than what is left."""
    while numel > 0:
        if numel >= _MAX_BLOCK:
            blocks = min(numel // _MAX_BLOCK, kernels.POLAR_LANES)
            piece = Lanes(blocks * _MAX_BLOCK, _MAX_BLOCK)
        elif numel >= _MIN_BLOCK:
            piece = Lanes(1 << (numel.bit_length() - 1), _MAX_BLOCK)
        else:
            piece = Lanes(max(64, 1 << (numel - 1).bit_length()), _MAX_BLOCK)
        yield piece
        numel -= piece.numel


def _mean_information(ratios: Tensor) -> float:
    """The mean information of a ratio about its bit, in bits."""
    some = ratios[:: max(1, ratios.numel() // _SAMPLE_NUMEL)]
    both = kernels.count_symbols(some.contiguous().view(torch.uint8), 1 << 8)
    counts = both[: CERTAIN + 1].clone()
    counts[1:] += both[-CERTAIN:].flip(0)  # of -1 and less
    return float(counts.double() @ _information()) / some.numel()


@functools.cache
def _information() -> Tensor:
    """1 - h2(1 / (1 + e^-L)) of ratios 0 .. 127."""
    ratios = torch.arange(CERTAIN + 1, dtype=torch.float64, device="cpu") / UNITS
    nats = torch.nn.functional.softplus(-ratios) + torch.sigmoid(-ratios) * ratios
    return 1 - nats / math.log(2)


class _PlaneCode(NamedTuple):
    kinds: Tensor  # for `kernels.polar_quantise`
    rows: Tensor  # the free inputs


def _num_rows(n: int, rate: int) -> int:
    return max(1, rate * n // _RATE_UNITS)


@functools.lru_cache(maxsize=512)
def _code(n: int, rate: int) -> _PlaneCode:
    free = torch.zeros(n, dtype=torch.bool, device="cpu")
    free[_by_weight(n)[: _num_rows(n, rate)]] = True
    return _PlaneCode(kernels.polar_kinds(free), free.nonzero().reshape(-1))


@functools.cache
def plane_digest() -> int:
    """A digest of what both ends compute: the order of the inputs, and that of the positions."""
    orders = (
        order for make in (_by_weight, _order) for order in (make(_MAX_BLOCK), make(_MIN_BLOCK))
    )
    return functools.reduce(lambda crc, own: zlib.crc32(own.numpy().tobytes(), crc), orders, 0)


@functools.cache
def _by_weight(n: int) -> Tensor:
    return torch.argsort(scores(n), stable=True)


@functools.cache
def _order(n: int) -> Tensor:
    return Key(0).child("plane positions").permutation(n)


@functools.cache
def _inverse(n: int) -> Tensor:
    return torch.argsort(_order(n))
