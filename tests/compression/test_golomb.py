"""Golomb 1966: where the most frequent symbol is not, and what is there."""

import pytest
import torch

from gradwire.coding.golomb import decode_golomb, encode_golomb
from gradwire.coding.indices import index_entropy_bits
from gradwire.compression import COMPRESSION
from gradwire.compression.coders.golomb import Golomb
from gradwire.compression.quantization.qsgd import QSGD
from gradwire.core.codec import unpack
from gradwire.core.errors import WireError
from gradwire.core.key import Key
from gradwire.core.spec import Spec

KEY = Key(3)


def test_a_message_by_hand() -> None:
    """Of 64 symbols in 0 .. 8 all are 4 but those at 5, 6 and 20: 8, 3 and 0."""
    symbols = torch.full((64,), 4)
    symbols[[5, 6, 20]] = torch.tensor([8, 3, 0])
    others = 0o037  # 8, 3 and 0 are 7, 3 and 0 of the eight without 4: three bits each
    positions = [3, 0b010001, 0b1000110]  # tests/coding/test_indices.py
    expected = [1, 4, 3, others & 0xFF, others >> 8, *positions]
    assert encode_golomb(symbols, 9).tolist() == expected
    assert torch.equal(decode_golomb(torch.tensor(expected, dtype=torch.uint8), 64, 9), symbols)


def test_two_symbols_need_positions_only() -> None:
    symbols = torch.ones(64, dtype=torch.int32)
    symbols[[5, 6, 20]] = 0
    assert encode_golomb(symbols, 2).tolist() == [1, 1, 3, 3, 0b010001, 0b1000110]


@pytest.mark.parametrize("density", [0.002, 0.01, 0.05])
@pytest.mark.parametrize("zero", [0, 1, 2])
def test_a_mostly_zero_ternary_vector_costs_little_more_than_its_entropy(density, zero) -> None:
    numel, num_others = 200_000, round(density * 200_000)
    places = Key(1).permutation(numel)[:num_others]
    symbols = torch.full((numel,), zero)
    rest = torch.tensor([symbol for symbol in range(3) if symbol != zero])
    symbols[places] = rest[Key(2).words(num_others).to(torch.int64) & 1]
    bits = 8 * encode_golomb(symbols, 3).numel()
    entropy = index_entropy_bits(numel, num_others) + num_others
    assert entropy <= bits <= 1.03 * entropy + 64
    assert torch.equal(decode_golomb(encode_golomb(symbols, 3), numel, 3), symbols.int())


def test_after_coarse_qsgd_zero_is_found_although_it_is_not_the_first_symbol() -> None:
    x = Key(5).normal(100_000)
    spec, codec = Spec.of(x), QSGD(1, norm="l2") >> Golomb()
    payload, _ = codec.encode(x, None, KEY)
    plain, _ = QSGD(1, norm="l2").encode(x, None, KEY)
    scales = 32 / 512  # bits per element
    assert 8 * payload.nbytes / 100_000 - scales < 0.28  # 1.6 at fixed width
    decoded = codec.decode(unpack(codec, payload.buffer, spec), spec, KEY)
    fixed = QSGD(1, norm="l2") >> Golomb()
    assert torch.equal(decoded, fixed.decode(payload, spec, KEY))
    assert payload.nbytes < plain.nbytes / 4


def test_dense_symbols_fall_back_to_fixed_width() -> None:
    symbols = Key(1).words(1000).to(torch.int64) & 15
    assert encode_golomb(symbols, 16).numel() == 1 + 500


@pytest.mark.parametrize(
    ("packed", "message"),
    [
        ([1], "0 bytes are left for 1 bytes of the frequent symbol"),
        ([1, 9, 0, 1], "9 as the frequent symbol"),
        ([1, 4, 64, 1], "64 as the number of other symbols"),
        ([1, 4, 63, 0], "bytes of other symbols"),
        ([1, 4, 3, 31, 0, 3, 0b010001], "index part"),
        ([1, 4, 3, 31, 0, 3, 0b010001, 0b1000110, 0], "index part"),
    ],
)
def test_bytes_that_nobody_encoded(packed, message) -> None:
    with pytest.raises(WireError, match=message):
        decode_golomb(torch.tensor(packed, dtype=torch.uint8), 64, 9)


def test_alone_it_has_nothing_to_encode() -> None:
    with pytest.raises(ValueError, match=r"Write qsgd\(bits=4\) >> golomb"):
        Golomb().encode(torch.ones(3), None, KEY)
    with pytest.raises(ValueError, match="golomb leaves nothing"):
        COMPRESSION.parse("golomb >> sign")
