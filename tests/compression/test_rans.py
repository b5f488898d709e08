"""Duda 2013: within a per cent of the entropy, in any distribution."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradwire.coding.rans import decode_rans, encode_rans, quantise_counts
from gradwire.compression import COMPRESSION
from gradwire.core.errors import WireError
from gradwire.core.key import Key
from gradwire.core.spec import Spec


def drawn(probabilities: torch.Tensor, count: int, key: Key) -> torch.Tensor:
    edges = torch.cumsum(probabilities.double(), 0) / float(probabilities.sum())
    uniform = (key.words(count).to(torch.int64) & 0xFFFFFFFF).double() / 2**32
    return torch.searchsorted(edges, uniform).clamp(max=len(probabilities) - 1).to(torch.int32)


def entropy_bits(symbols: torch.Tensor) -> float:
    counts = torch.bincount(symbols).double()
    counts = counts[counts > 0]
    return float((counts * (counts.sum().log2() - counts.log2())).sum())


@pytest.mark.parametrize(
    ("weights", "count"),
    [
        ([0.5, 0.5 - 1e-3, 1e-3], 100_000),
        ([0.9, 0.1], 100_000),
        ([0.99, 0.01], 100_000),
        ([0.998, 0.001, 0.001], 100_000),
        ([1.0] * 15, 100_000),
        ([0.7**i for i in range(15)], 100_000),
        ([0.98**i for i in range(300)], 300_000),
    ],
    ids=str,
)
def test_it_comes_within_a_per_cent_of_the_entropy(weights, count) -> None:
    symbols = drawn(torch.tensor(weights), count, Key(7))
    packed = encode_rans(symbols, len(weights))
    assert torch.equal(decode_rans(packed, count, len(weights)), symbols)
    table = 8 + 8 + 32 + 15 * len(weights)  # bits: mode, parameters, a state, frequencies
    assert entropy_bits(symbols) <= 8 * packed.numel() <= 1.01 * entropy_bits(symbols) + table


@given(st.lists(st.integers(0, 10**7), min_size=1, max_size=200).filter(any), st.integers(8, 14))
def test_quantised_frequencies_add_up_and_none_is_lost(counts, precision) -> None:
    found = quantise_counts(torch.tensor(counts), precision)
    assert int(found.sum()) == 1 << precision
    assert [f > 0 for f in found.tolist()] == [c > 0 for c in counts]


def test_frequencies_by_hand() -> None:
    # 3/7 and 4/7 of 16 are 6.86 and 9.14: the larger fraction is rounded up.
    assert quantise_counts(torch.tensor([3, 4]), 4).tolist() == [7, 9]
    # A symbol that is rarer than 1/16 takes one, which the others give.
    assert quantise_counts(torch.tensor([1000, 1, 1, 0]), 4).tolist() == [14, 1, 1, 0]


@pytest.mark.parametrize(
    ("text", "bits"),
    [
        ("qsgd(bits=4) >> rans", 3.23 + 32 / 512),
        ("sign >> rans", 1.001),
        ("topk(0.01) >> qsgd(bits=4) >> rans", 0.01 * (8.2 + 3.2 + 32 / 512) + 0.003),
        ('qsgd(1, norm="l2") >> rans', 0.27 + 32 / 512),
    ],
)
def test_bits_per_element_off_the_wire(text, bits) -> None:
    x = Key(2).normal(300_000)
    codec = COMPRESSION.parse(text)
    payload, _ = codec.encode(x, codec.init(Spec.of(x)), Key(0))
    assert 8 * payload.nbytes / 300_000 <= bits


def test_gradients_decode_to_what_the_quantiser_alone_gives() -> None:
    x = Key(4).normal(50_000)
    spec = Spec.of(x)
    plain, coded = (COMPRESSION.parse(t) for t in ("qsgd(bits=4)", "qsgd(bits=4) >> rans"))
    a = plain.decode(plain.encode(x, None, Key(1).child(0))[0], spec, Key(1).child(0))
    b = coded.decode(coded.encode(x, None, Key(1))[0], spec, Key(1))
    assert torch.equal(a, b)


def test_half_of_the_symbols_have_a_word_each_and_no_more() -> None:
    """A flipped bit in any word changes symbols, and then the states do not end at 2^16."""
    symbols = drawn(torch.tensor([0.6, 0.2, 0.1, 0.1]), 4000, Key(9))
    packed = encode_rans(symbols, 4)
    refused = 0
    for position in range(20, packed.numel(), 7):
        damaged = packed.clone()
        damaged[position] ^= 0x10
        try:
            assert not torch.equal(decode_rans(damaged, 4000, 4), symbols)
        except WireError:
            refused += 1
    assert refused == len(range(20, packed.numel(), 7))


@pytest.mark.parametrize("head", [0x0F, 0x0F + 0x10, 0x0C + 0xD0, 0x0C + 0xC0, 0x00], ids=hex)
def test_precisions_and_lanes_out_of_range_are_refused(head) -> None:
    symbols = drawn(torch.tensor([0.6, 0.2, 0.1, 0.1]), 2000, Key(9))
    packed = encode_rans(symbols, 4)
    packed[1] = head
    with pytest.raises(WireError):
        decode_rans(packed, 2000, 4)
