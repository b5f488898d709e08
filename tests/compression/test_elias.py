"""Elias 1975: codewords by hand, in the order in which we send their bits."""

import pytest
import torch

from gradwire.coding._stream import StreamReader
from gradwire.coding.elias import (
    decode_elias,
    decode_integers,
    encode_elias,
    encode_integers,
    integers_bytes,
)
from gradwire.compression import COMPRESSION
from gradwire.compression.coders.elias import Elias
from gradwire.core.errors import WireError
from gradwire.core.key import Key
from gradwire.core.spec import Spec

CODES = ("gamma", "delta")


def test_gamma_by_hand() -> None:
    # 1 = "1", 5 = "00 1 01", 2 = "0 1 0", 6 = "00 1 10": unary parts, then low bits.
    unary = int("1 001 01 001".replace(" ", "")[::-1], 2)  # the first bit is the lowest
    assert encode_integers(torch.tensor([1, 5, 2, 6]), "gamma").tolist() == [
        unary & 0xFF,
        unary >> 8,
        0b10_0_01,  # of 6, 2 and 5, the first one lowest
    ]


def test_delta_by_hand() -> None:
    # 17 has five bits: gamma of 5 = "00 1 01", then 0001.
    assert encode_integers(torch.tensor([17]), "delta").tolist() == [0b100, 0b01, 0b0001]


@pytest.mark.parametrize("code", CODES)
def test_integers_of_every_size_come_back(code) -> None:
    values = torch.tensor([1, 2, 3, 4, 7, 8, 255, 256, 2**24, 2**25 + 1, 2**31, 2**40 + 12345])
    packed = encode_integers(values, code)
    assert packed.numel() == integers_bytes(values, code)
    reader = StreamReader(torch.cat([packed, torch.tensor([99], dtype=torch.uint8)]))
    assert torch.equal(decode_integers(reader, len(values), 2**41, code), values)
    assert reader.rest.tolist() == [99]  # it takes its own bytes only
    with pytest.raises(WireError):
        decode_integers(StreamReader(packed), len(values), 2**40, code)


@pytest.mark.parametrize("code", CODES)
def test_the_length_is_that_of_elias_codewords(code) -> None:
    values = (Key(1).normal(50_000).abs() * 100).long() + 1
    length = [value.bit_length() - 1 for value in values.tolist()]
    if code == "gamma":
        bits = sum(2 * n + 1 for n in length)
    else:
        bits = sum(n + 2 * ((n + 1).bit_length() - 1) + 1 for n in length)
    size = encode_integers(values, code).numel()
    assert bits / 8 <= size <= bits / 8 + 16  # a byte of padding for each stream


def test_symbols_by_hand() -> None:
    # 4 is the most frequent; distances 0 -1 1 0 0 0 0 2 are 1 2 3 1 1 1 1 5 in zigzag plus one.
    symbols = torch.tensor([4, 3, 5, 4, 4, 4, 4, 6] + [4] * 56)
    unary = "1" + "01" + "01" + "1" * 4 + "001" + "1" * 56  # first bit first
    stream = list(int(unary[::-1], 2).to_bytes(9, "little"))
    packed = encode_elias(symbols, 16, "gamma")
    assert packed.tolist() == [1, 4, *stream, 0b01_1_0]  # low bits of 5, 3 and 2
    assert torch.equal(decode_elias(packed, 64, 16, "gamma"), symbols.int())


def test_levels_near_zero_take_few_bits() -> None:
    x = Key(2).normal(100_000)
    for text, bits in (('qsgd(1, norm="l2") >> elias', 1.2), ("qsgd(bits=4) >> elias", 3.95)):
        codec = COMPRESSION.parse(text)
        payload, _ = codec.encode(x, codec.init(Spec.of(x)), Key(0))
        assert 8 * payload.nbytes / 100_000 < bits  # of which 0.0625 are norms


@pytest.mark.parametrize("code", CODES)
def test_a_symbol_beyond_the_alphabet_is_refused(code) -> None:
    symbols = torch.full((200,), 8, dtype=torch.int32)
    symbols[7] = 15
    packed = encode_elias(symbols, 16, code)
    with pytest.raises(WireError, match=r"beyond 0 \.\. 13"):
        decode_elias(packed, 200, 14, code)


def test_padding_must_be_zero() -> None:
    packed = encode_elias(torch.tensor([4] * 61 + [3, 5, 6]), 16, "gamma")
    packed[-1] |= 0x80
    with pytest.raises(WireError, match="expected zeros after its first 4 bits"):
        decode_elias(packed, 64, 16, "gamma")


def test_the_code_has_a_name() -> None:
    with pytest.raises(ValueError, match='code is "gamma" or "delta", got \'omega\''):
        Elias("omega")
    assert repr(Elias("delta")) == 'elias("delta")'
    assert Elias("gamma") == Elias()
