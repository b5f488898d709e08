"""Huffman codes: lengths against his own algorithm, codewords by hand, native against reference."""

import heapq

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gradwire import kernels
from gradwire.core.key import Key
from gradwire.kernels.native import huffman as native_huffman
from gradwire.kernels.reference import huffman as reference_huffman
from sampling import slow

BACKENDS = pytest.mark.parametrize("huffman", ["reference", "native"], indirect=True)
OVER_BACKENDS = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def huffman(request):
    if request.param == "reference":
        return reference_huffman
    request.getfixturevalue("native")
    return native_huffman


def huffman_cost(counts: list[int]) -> int:
    """Bits of the best prefix code: merge the two lightest until one is left."""
    heap = [count for count in counts if count]
    heapq.heapify(heap)
    cost = 0
    while len(heap) > 1:
        merged = heapq.heappop(heap) + heapq.heappop(heap)
        cost += merged
        heapq.heappush(heap, merged)
    return cost


@BACKENDS
@OVER_BACKENDS
@given(
    counts=st.lists(st.integers(0, 300), min_size=2, max_size=60).filter(
        lambda counts: sum(map(bool, counts)) > 1
    )
)
def test_lengths_are_as_short_as_huffmans(huffman, counts):
    lengths = huffman.huffman_lengths(torch.tensor(counts)).tolist()
    assert sum(n * length for n, length in zip(counts, lengths)) == huffman_cost(counts)
    assert sum(2.0**-length for length in lengths if length) == 1
    assert [length > 0 for length in lengths] == [count > 0 for count in counts]


@BACKENDS
def test_lengths_are_limited_to_15_bits(huffman):
    fibonacci = [1, 1]
    while len(fibonacci) < 40:
        fibonacci.append(fibonacci[-1] + fibonacci[-2])
    # Huffman's own would have 39 bits.
    lengths = huffman.huffman_lengths(torch.tensor(fibonacci)).tolist()
    assert max(lengths) == 15
    assert sum(2.0**-length for length in lengths) == 1
    cost = sum(n * length for n, length in zip(fibonacci, lengths))
    assert cost <= 1.001 * huffman_cost(fibonacci)


@BACKENDS
@pytest.mark.parametrize("counts", [[], [0], [0, 5, 0], [0, 0]], ids=str)
def test_lengths_of_one_symbol_or_none(huffman, counts):
    lengths = huffman.huffman_lengths(torch.tensor(counts, dtype=torch.int64))
    assert lengths.tolist() == [int(count > 0) for count in counts]


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("alphabet", [2, 15, 300, 4096])
def test_native_lengths_equal_the_references(alphabet):
    for power in (1, 3, 8):
        counts = (Key(alphabet).normal(alphabet).abs() ** power * 100).to(torch.int64)
        expected = reference_huffman.huffman_lengths(counts)
        assert torch.equal(native_huffman.huffman_lengths(counts), expected)


def test_codewords_by_hand():
    # Lengths 2 1 3 3: the shortest first, then in order of symbols: 10, 0, 110, 111.
    words = reference_huffman.codewords(torch.tensor([2, 1, 3, 3]))
    assert words.tolist() == [0b10, 0b0, 0b110, 0b111]


@BACKENDS
@OVER_BACKENDS
@given(symbols=st.lists(st.integers(0, 5), min_size=1, max_size=100))
def test_codes_follow_the_definition(huffman, symbols):
    words = ["10", "0", "110", "1110", "11110", "11111"]
    lengths = torch.tensor([len(word) for word in words])
    bits = "".join(words[symbol] for symbol in symbols)
    padded = bits + "0" * (-len(bits) % 8)
    stream = [int(padded[i : i + 8], 2) for i in range(0, len(padded), 8)]
    packed = huffman.huffman_encode(torch.tensor(symbols), lengths, len(bits))
    assert packed.tolist() == stream
    assert huffman.huffman_decode(packed, lengths, len(symbols)).tolist() == symbols


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("count", [1, 2047, 2048, 2049, 4096, 10_241, 30_000])
def test_native_equals_reference_on_chunks(count, dtype):
    symbols = (Key(1).normal(count) * 12).round().clamp(-60, 60).to(torch.int64) + 60
    counts = torch.bincount(torch.cat([symbols, torch.arange(121)]), minlength=121)
    counts[0] += 10_000  # so that some codewords have more than eleven bits
    counts[5] += 1_000_000
    lengths = reference_huffman.huffman_lengths(counts)
    num_bits = int(lengths[symbols].sum())
    packed = native_huffman.huffman_encode(symbols.to(dtype), lengths, num_bits)
    assert torch.equal(packed, reference_huffman.huffman_encode(symbols, lengths, num_bits))
    for huffman in (native_huffman, reference_huffman):
        assert torch.equal(huffman.huffman_decode(packed, lengths, count), symbols.int())


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("seed", [*range(4), *map(slow, range(4, 40))])
def test_both_refuse_the_same_bytes(seed):
    """Damage in chunk lengths and codewords of a message of six chunks, and cut off ends."""
    lengths = torch.tensor([2, 1, 3, 15, 15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4])
    count = 10_300
    symbols = Key(3).words(count).to(torch.int64) & 3
    symbols = torch.where(symbols == 3, 1, symbols)
    packed = reference_huffman.huffman_encode(symbols, lengths, int(lengths[symbols].sum()))
    damage = Key(seed).words(3).to(torch.int64).abs().tolist()
    span = 12 if seed % 2 else packed.numel()
    packed[damage[0] % span] ^= 1 << damage[1] % 8
    if seed % 5 == 0:
        packed = packed[: -1 - damage[2] % 1000]
    found = []
    for huffman in (native_huffman, reference_huffman):
        try:
            found.append(huffman.huffman_decode(packed, lengths, count).tolist())
        except ValueError as error:
            found.append(str(error))
    assert found[0] == found[1]


@BACKENDS
@pytest.mark.parametrize("lengths", [[1, 1, 1], [2, 2, 2], [0, 0], [1], [16, 1, 1], [-1, 1, 1]])
def test_lengths_that_are_no_code_are_refused(huffman, lengths):
    table = torch.tensor(lengths)
    with pytest.raises(ValueError, match="no Huffman code has"):
        huffman.huffman_decode(torch.zeros(4, dtype=torch.uint8), table, 9)
    with pytest.raises(ValueError, match="no Huffman code has"):
        huffman.huffman_encode(torch.tensor([0, 0]), table, 2)


@BACKENDS
@pytest.mark.parametrize(
    ("symbols", "num_bits"),
    [([0, 3], 2), ([0, -1], 2), ([0, 2], 2), ([0, 1], 3), ([0] * 90, 40), ([0] * 90, 400)],
)
def test_symbols_without_a_codeword_are_refused(huffman, symbols, num_bits):
    with pytest.raises(ValueError, match="without a codeword, or other than"):
        huffman.huffman_encode(torch.tensor(symbols), torch.tensor([1, 1, 0]), num_bits)


def test_arguments_are_checked():
    lengths, packed = torch.tensor([1, 1]), torch.zeros(3, dtype=torch.uint8)
    with pytest.raises(ValueError, match="int64"):
        kernels.huffman_lengths(torch.ones(3))
    with pytest.raises(ValueError, match="32768 symbols"):
        kernels.huffman_lengths(torch.ones(40_000, dtype=torch.int64))
    with pytest.raises(ValueError, match="int64 lengths"):
        kernels.huffman_encode(packed, lengths.int(), 3)
    with pytest.raises(ValueError, match="count"):
        kernels.huffman_decode(packed, lengths, 0)
    with pytest.raises(ValueError, match="uint8"):
        kernels.huffman_decode(packed.int(), lengths, 1)
    with pytest.raises(ValueError, match="4 bytes of chunk lengths"):
        kernels.huffman_decode(packed, lengths, 5000)
