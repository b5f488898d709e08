"""Huffman 1952: a message by hand, redundancy, bad tables. Codewords: tests/kernels."""

import math

import pytest
import torch

from gradwire.coding.elias import encode_integers
from gradwire.coding.huffman import decode_huffman, encode_huffman
from gradwire.compression import COMPRESSION
from gradwire.core.errors import WireError
from gradwire.core.key import Key
from gradwire.core.spec import Spec


def test_a_message_by_hand() -> None:
    symbols = torch.tensor([1] * 16 + [0] * 8 + [2] * 4 + [3] * 4)
    table = encode_integers(torch.tensor([3, 2, 4, 4]), "gamma").tolist()
    bits = "0" * 16 + "10" * 8 + "110" * 4 + "111" * 4
    stream = [int(bits[i : i + 8], 2) for i in range(0, 56, 8)]
    packed = encode_huffman(symbols.repeat(8), 4)
    assert packed.tolist() == [1, *table, *(stream * 8)]
    assert torch.equal(decode_huffman(packed, 256, 4), symbols.repeat(8).int())
    # Once, with its table, it is no shorter than at fixed width, so that is what is sent.
    assert encode_huffman(symbols, 4).tolist()[0] == 0


@pytest.mark.parametrize("decay", [0.1, 0.5, 1.5])
def test_the_redundancy_is_below_what_theory_allows(decay) -> None:
    x = torch.exp(-decay * torch.arange(15.0))
    edges = torch.cumsum(x, 0) / x.sum()
    uniform = (Key(1).words(100_000).to(torch.int64) & 0xFFFFFFFF).float() / 2**32
    symbols = torch.searchsorted(edges, uniform).clamp(max=14)
    p = torch.bincount(symbols).double() / 100_000
    p = p[p > 0]
    entropy = float(-(p * p.log2()).sum())
    bits = 8 * encode_huffman(symbols, 15).numel() / 100_000
    # Gallager 1978: redundancy at most p_max + 0.086. Table and chunks take less than 0.01.
    assert max(1.0, entropy) <= bits <= entropy + float(p.max()) + 0.096


def test_qsgd_at_four_bits() -> None:
    x = Key(2).normal(200_000)
    codec = COMPRESSION.parse("qsgd(bits=4) >> huffman")
    payload, _ = codec.encode(x, codec.init(Spec.of(x)), Key(0))
    assert 8 * payload.nbytes / 200_000 < 3.26 + 32 / 512


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([1, 1, 1, 0], "no Huffman code has"),
        ([2, 2, 2, 0], "no Huffman code has"),
        ([0, 0, 0, 0], "no Huffman code has"),
        ([0, 2, 0, 0], "one symbol in 2 bits"),
        ([15, 1, 1, 2], "no Huffman code has"),
        ([16, 1, 1, 2], "Elias code"),
    ],
)
def test_tables_that_are_no_code_are_refused(lengths, message) -> None:
    table = encode_integers(torch.tensor(lengths) + 1, "gamma").tolist()
    packed = torch.tensor([1, *table, 0, 0], dtype=torch.uint8)
    with pytest.raises(WireError, match=message):
        decode_huffman(packed, 100, 4)


def test_ones_behind_the_last_codeword_are_refused() -> None:
    symbols = torch.tensor([0, 0, 0, 0, 0, 1, 2] * 13)  # 117 bits
    packed = encode_huffman(symbols, 4)
    assert packed[0] == 1
    packed[-1] |= 1
    with pytest.raises(WireError, match="behind the last"):
        decode_huffman(packed, 91, 4)


def test_chunks_must_meet() -> None:
    symbols = torch.cat([torch.zeros(5000), torch.ones(1000)]).int()
    packed = encode_huffman(symbols, 4)
    assert math.ceil(6000 / 2048) == 3
    table = encode_integers(torch.tensor([2, 2, 1, 1]), "gamma").numel()
    packed[1 + table] ^= 1  # the first chunk's length
    with pytest.raises(WireError, match="end where they should"):
        decode_huffman(packed, 6000, 4)
