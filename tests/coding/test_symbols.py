"""What holds of every coder of symbols: round trips, lengths, and bytes that nobody encoded."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gradwire.coding.elias import decode_elias, encode_elias
from gradwire.coding.golomb import decode_golomb, encode_golomb
from gradwire.coding.huffman import decode_huffman, encode_huffman
from gradwire.coding.rans import decode_rans, encode_rans
from gradwire.core.errors import WireError
from gradwire.core.key import Key
from gradwire.core.symbols import packed_bytes

CODERS = {
    "golomb": (encode_golomb, decode_golomb),
    "gamma": (
        lambda x, m: encode_elias(x, m, "gamma"),
        lambda p, n, m: decode_elias(p, n, m, "gamma"),
    ),
    "delta": (
        lambda x, m: encode_elias(x, m, "delta"),
        lambda p, n, m: decode_elias(p, n, m, "delta"),
    ),
    "huffman": (encode_huffman, decode_huffman),
    "rans": (encode_rans, decode_rans),
}
ALPHABETS = (1, 2, 3, 4, 15, 256, 511, 4096, 4097, 65535)


@pytest.fixture(params=CODERS)
def coder(request):
    return CODERS[request.param]


def drawn(weights: Tensor, count: int, key: Key) -> Tensor:
    """Symbols with these relative frequencies, int32 [count]."""
    edges = torch.cumsum(weights.double(), 0) / float(weights.sum())
    uniform = (key.words(count).to(torch.int64) & 0xFFFFFFFF).double() / 2**32
    return torch.searchsorted(edges, uniform).clamp(max=len(weights) - 1).to(torch.int32)


def entropy(symbols: Tensor) -> float:
    p = torch.bincount(symbols).double() / symbols.numel()
    p = p[p > 0]
    return float(-(p * p.log2()).sum())


def round_trip(coder, symbols: Tensor, alphabet: int) -> Tensor:
    encode, decode = coder
    packed = encode(symbols, alphabet)
    assert packed.dtype == torch.uint8
    assert packed.numel() <= 1 + packed_bytes(symbols.numel(), alphabet)
    found = decode(packed, symbols.numel(), alphabet)
    assert found.dtype == torch.int32
    assert torch.equal(found, symbols.to(torch.int32))
    return packed


@st.composite
def messages(draw):
    alphabet = draw(st.sampled_from(ALPHABETS))
    count = draw(st.sampled_from((0, 1, 2, 7, 64, 300, 1000)))
    decay = draw(st.sampled_from((0.0, 0.01, 0.5, 5.0)))
    distance = (torch.arange(alphabet) - draw(st.integers(0, alphabet - 1))).abs()
    key = Key(draw(st.integers(0, 2**32)))
    return drawn(torch.exp(-decay * distance), count, key), alphabet


@given(data=st.data())
@pytest.mark.parametrize("name", CODERS)
def test_decode_inverts_encode(name, data):
    round_trip(CODERS[name], *data.draw(messages()))


@given(data=st.data(), alphabet=st.integers(1, 40))
@pytest.mark.parametrize("name", CODERS)
def test_any_symbols_come_back(name, alphabet, data):
    symbols = data.draw(st.lists(st.integers(0, alphabet - 1), max_size=80))
    round_trip(CODERS[name], torch.tensor(symbols, dtype=torch.int32), alphabet)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64], ids=str)
def test_any_integer_type_gives_the_same_bytes(coder, dtype):
    symbols = drawn(torch.tensor([80, 10, 5, 5]), 3000, Key(1))
    assert torch.equal(round_trip(coder, symbols.to(dtype), 4), round_trip(coder, symbols, 4))


@pytest.mark.parametrize("count", [1, 2047, 2048, 2049, 10_000, 70_001])
@pytest.mark.parametrize("alphabet", [2, 15, 300, 65535])
def test_long_messages_of_every_length(coder, count, alphabet):
    weights = torch.exp(-((torch.arange(alphabet) - alphabet / 2) * 6 / alphabet).square())
    round_trip(coder, drawn(weights, count, Key(count)), alphabet)


@pytest.mark.parametrize("alphabet", [2, 15, 4097])
@pytest.mark.parametrize("name", CODERS)
def test_equal_symbols_cost_next_to_nothing(name, alphabet):
    symbols = torch.full((100_000,), alphabet - 1, dtype=torch.int32)
    bits = 8 * round_trip(CODERS[name], symbols, alphabet).numel()
    # Elias' shortest codeword has one bit; of 4097 symbols a table leaves the lowest bit alone.
    one_each = name in ("gamma", "delta") or (name in ("huffman", "rans") and alphabet > 4096)
    assert bits <= (100_000 if one_each else 0) + 600 + 0.6 * alphabet


@pytest.mark.parametrize("alphabet", ALPHABETS)
def test_uniform_symbols_cost_a_byte_more_than_fixed_width_at_most(coder, alphabet):
    symbols = drawn(torch.ones(alphabet), 5000, Key(3))
    assert round_trip(coder, symbols, alphabet).numel() <= 1 + packed_bytes(5000, alphabet)


def test_known_symbols_take_no_byte(coder):
    encode, decode = coder
    assert encode(torch.zeros(0, dtype=torch.int32), 15).numel() == 0
    assert encode(torch.zeros(9, dtype=torch.int32), 1).numel() == 0
    assert decode(torch.zeros(0, dtype=torch.uint8), 9, 1).tolist() == [0] * 9
    for count, alphabet in ((0, 15), (9, 1)):
        with pytest.raises(WireError, match="too many"):
            decode(torch.zeros(1, dtype=torch.uint8), count, alphabet)


def survives(decode, packed: Tensor, count: int, alphabet: int) -> None:
    try:
        symbols = decode(packed, count, alphabet)
    except WireError:
        return
    assert symbols.dtype == torch.int32
    assert symbols.shape == (count,)
    if count:
        assert 0 <= int(symbols.min()) <= int(symbols.max()) < alphabet


@given(
    data=st.binary(max_size=80),
    count=st.sampled_from((0, 1, 5, 64, 300)),
    alphabet=st.sampled_from(ALPHABETS),
    mode=st.sampled_from((b"", b"\0", b"\1")),
)
@pytest.mark.parametrize("name", CODERS)
def test_random_bytes_are_refused_or_symbols(name, data, count, alphabet, mode):
    packed = torch.tensor(list(mode + data), dtype=torch.uint8)
    survives(CODERS[name][1], packed, count, alphabet)


@pytest.mark.few(2)
@given(data=st.data())
@pytest.mark.parametrize("name", CODERS)
def test_damaged_bytes_are_refused_or_symbols(name, data):
    encode, decode = CODERS[name]
    symbols, alphabet = data.draw(messages())
    packed = encode(symbols, alphabet)
    if not packed.numel():
        return
    for _ in range(data.draw(st.integers(1, 4))):
        packed[data.draw(st.integers(0, packed.numel() - 1))] = data.draw(st.integers(0, 255))
    survives(decode, packed, symbols.numel(), alphabet)


@pytest.mark.parametrize("alphabet", [2, 15])
def test_every_truncation_and_every_byte_too_many_is_refused(coder, alphabet):
    encode, decode = coder
    symbols = drawn(0.3 ** torch.arange(float(alphabet)), 400, Key(5))
    packed = encode(symbols, alphabet)
    for length in range(packed.numel()):
        with pytest.raises(WireError):
            decode(packed[:length], 400, alphabet)
    for extra in ([0], [255], [0] * 4, [1] * 400):
        with pytest.raises(WireError):
            decode(torch.cat([packed, torch.tensor(extra, dtype=torch.uint8)]), 400, alphabet)


def test_another_number_of_symbols_or_alphabet_never_crashes(coder):
    encode, decode = coder
    packed = encode(drawn(torch.tensor([70, 20, 5, 5]), 3000, Key(6)), 4)
    for count in (1, 2999, 3001, 6000):
        survives(decode, packed, count, 4)
    for alphabet in (2, 3, 5, 15, 4097):
        survives(decode, packed, 3000, alphabet)


def test_a_mode_that_does_not_exist_is_refused(coder):
    with pytest.raises(WireError, match="2 as mode"):
        coder[1](torch.tensor([2, 0], dtype=torch.uint8), 9, 4)


def test_the_wrong_kind_of_tensor_is_refused(coder):
    with pytest.raises(WireError, match="uint8"):
        coder[1](torch.zeros(3), 9, 4)


def test_a_message_of_many_symbols_in_few_bytes_is_no_reason_to_allocate(coder):
    """The receiver's own number of symbols bounds the work, whatever the bytes say."""
    for head in range(256):
        survives(coder[1], torch.tensor([1, head, 255, 255, 255], dtype=torch.uint8), 20, 15)


@pytest.mark.parametrize("seed", range(3))
def test_a_skewed_source_is_coded_close_to_its_entropy(seed):
    """4-bit levels of a Gaussian, where the coders differ."""
    levels = torch.exp(-((torch.arange(15) - 7.0) / 2.2).square() / 2)
    symbols = drawn(levels, 200_000, Key(seed))
    bits = {name: 8 * encode(symbols, 15).numel() / 200_000 for name, (encode, _) in CODERS.items()}
    h = entropy(symbols)
    assert h <= bits["rans"] <= 1.01 * h
    assert h <= bits["huffman"] <= h + 0.06
    assert bits["gamma"] <= 4
    assert bits["golomb"] <= 4 + 1e-3
    assert math.isclose(h, 3.17, abs_tol=0.05)
