"""Index coding: round trips, the bytes of a set worked by hand, length against entropy, and
bytes from the wire that nobody encoded."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradwire.coding.elias import encode_integers, integers_bytes
from gradwire.coding.indices import decode_indices, encode_indices, index_entropy_bits
from gradwire.core.errors import WireError
from gradwire.core.key import Key


def tensor(indices: list[int]) -> torch.Tensor:
    return torch.tensor(indices, dtype=torch.int64)


def random_set(universe: int, count: int) -> torch.Tensor:
    return Key(seed=1).permutation(universe)[:count].sort().values


@st.composite
def index_sets(draw):
    universe = draw(st.one_of(st.integers(0, 40), st.integers(0, 5000), st.just(2**40)))
    indices = draw(st.sets(st.integers(0, universe - 1), max_size=60)) if universe else set()
    return sorted(indices), universe


def assert_index_set(indices: torch.Tensor, universe: int, count: int) -> None:
    assert indices.dtype == torch.int64
    assert indices.shape == (count,)
    if count:
        assert int(indices[0]) >= 0
        assert int(indices[-1]) < universe
        assert bool((torch.diff(indices) > 0).all())


@given(index_sets())
def test_decode_inverts_encode(case):
    indices, universe = case
    packed = encode_indices(tensor(indices), universe)
    assert packed.dtype == torch.uint8
    assert packed.numel() <= 1 + -(-universe // 8)
    assert decode_indices(packed, universe, len(indices)).tolist() == indices


@pytest.mark.parametrize("density", [0.001, 0.01, 0.1, 0.25, 0.5, 1.0])
def test_large_sets(density):
    universe = 30_000
    indices = random_set(universe, round(density * universe))
    packed = encode_indices(indices, universe)
    assert torch.equal(decode_indices(packed, universe, len(indices)), indices)


def test_a_rice_code_by_hand():
    """Indices 5, 6, 20 of 64 have gaps 5, 0, 13 with mean 6, so r is 1, 2 or 3.

    r = 2 takes 6 low bits and 3 + 4 unary bits, two bytes; r = 1 needs 3 + 8 unary bits and
    r = 3 needs 9 low bits, three bytes either way.
    """
    packed = encode_indices(tensor([5, 6, 20]), 64).tolist()
    low_parts = 0b01_00_01  # 13 % 4, 0 % 4, 5 % 4 from the highest bit down
    quotients = 0b1000_1_10  # "3", "0", "1" in unary from the highest bit down
    assert packed == [1 + 2, low_parts, quotients]


def test_a_bitmap_by_hand():
    assert encode_indices(tensor([0, 1, 3, 8]), 10).tolist() == [0, 0b1011, 0b1]


def test_gamma_codes_win_on_clustered_sets_by_hand():
    """Twenty neighbours and a step of 12, thirty times: 27 bits in gamma, 32 in unary."""
    indices = torch.cumsum(torch.tensor(([1] * 20 + [12]) * 30), 0) - 1
    packed = encode_indices(indices, 960)
    assert packed[0] == 33
    assert packed.numel() == 1 + 30 * 24 // 8 + -(-30 * 3 // 8)  # unary parts, low bits
    assert torch.equal(decode_indices(packed, 960, 630), indices)


def test_delta_codes_win_where_gaps_are_of_every_size():
    indices = torch.cumsum(torch.tensor([2**i for i in range(25) for _ in range(4)]), 0)
    packed = encode_indices(indices, 2**40)
    assert packed[0] == 34
    assert torch.equal(decode_indices(packed, 2**40, len(indices)), indices)


def test_the_shortest_mode_is_chosen():
    for density in (0.001, 0.01, 0.1, 0.4):
        for clustered in (False, True):
            indices = random_set(20_000, round(20_000 * density))
            if clustered:
                indices = torch.unique(indices // 500 * 500 + indices % 37)
            packed = encode_indices(indices, 20_000)
            gaps = torch.diff(indices, prepend=indices.new_full((1,), -1))
            others = [integers_bytes(gaps, code) for code in ("gamma", "delta")]
            assert packed.numel() <= 1 + min(*others, 2500)
            assert torch.equal(decode_indices(packed, 20_000, len(indices)), indices)


@pytest.mark.parametrize("universe", [0, 1, 8, 100, 30_000])
def test_of_no_index_and_of_all_no_byte_is_sent(universe):
    for count in (0, universe):
        packed = encode_indices(torch.arange(count), universe)
        assert packed.tolist() == []
        assert torch.equal(decode_indices(packed, universe, count), torch.arange(count))
        with pytest.raises(WireError, match=f"1 bytes, expected none for {count} of {universe}"):
            decode_indices(torch.zeros(1, dtype=torch.uint8), universe, count)


def test_one_index_short_of_all_or_none():
    assert encode_indices(tensor([1]), 2).tolist() == [0, 0b10]
    assert decode_indices(encode_indices(tensor([63]), 64), 64, 1).tolist() == [63]


def test_universes_beyond_what_elias_codes_here():
    for indices in ([0, 2**60], [5, 6, 7, 8, 2**57]):
        packed = encode_indices(tensor(indices), 2**61)
        assert packed[0] <= 32
        assert decode_indices(packed, 2**61, len(indices)).tolist() == indices
    with pytest.raises(WireError, match="as index mode"):
        decode_indices(torch.tensor([33, 1], dtype=torch.uint8), 2**61, 1)


@pytest.mark.parametrize("density", [0.001, 0.01, 0.1])
def test_random_sets_cost_little_more_than_their_entropy(density):
    universe = 1_000_000
    count = round(density * universe)
    bits = 8 * encode_indices(random_set(universe, count), universe).numel()
    entropy = -math.log2(density) - (1 - density) / density * math.log2(1 - density)
    assert bits / count <= 1.05 * entropy
    assert bits >= index_entropy_bits(universe, count)


def test_the_entropy_is_the_logarithm_of_the_number_of_sets():
    assert index_entropy_bits(10, 3) == pytest.approx(math.log2(120))
    assert index_entropy_bits(5, 0) == pytest.approx(0)
    assert index_entropy_bits(0, 0) == 0


def test_a_clustered_set_never_costs_more_than_a_bitmap():
    indices = torch.cat([torch.arange(1000), torch.tensor([99_999])])
    packed = encode_indices(indices, 100_000)
    assert packed.numel() < 1 + 100_000 // 8
    assert torch.equal(decode_indices(packed, 100_000, 1001), indices)


@pytest.mark.parametrize(
    ("indices", "message"),
    [([3, 3], "strictly increasing"), ([4, 1], "strictly"), ([-1], "0 .. 9"), ([10], "to 10")],
)
def test_what_is_not_a_sorted_set_is_refused(indices, message):
    with pytest.raises(ValueError, match=message):
        encode_indices(tensor(indices), 10)


def test_encoding_takes_flat_int64():
    with pytest.raises(ValueError, match=r"int64 \[count\], got torch.int32 \[3\]"):
        encode_indices(torch.arange(3, dtype=torch.int32), 10)


RICE = [3, 0b010001, 0b1000110]  # 5, 6, 20 of 64, as above


@pytest.mark.parametrize(
    ("packed", "universe", "count", "message"),
    [
        ([], 64, 3, "mode byte, got 0 bytes"),
        ([0, 0b1011, 0b1, 0], 10, 4, "3 bitmap bytes, expected 2"),
        ([0, 0b1011], 10, 4, "1 bitmap bytes, expected 2"),
        ([0, 0b1011, 0b1], 10, 3, "4 indices in the bitmap, expected 3"),
        ([0, 0b1011, 0b101], 10, 4, "expected zeros after its first 2 bits"),
        ([200, *RICE[1:]], 64, 3, "200 as index mode, expected 0 .. 6"),
        ([7, *RICE[1:]], 64, 3, "7 as index mode, expected 0 .. 6"),
        (RICE[:2], 64, 3, "1 Rice bytes, expected 2 .. 7"),
        ([*RICE, *[0] * 6], 64, 3, "8 Rice bytes, expected 2 .. 7"),
        ([*RICE, 0], 64, 3, "2 bytes of quotients, expected 1"),
        (RICE, 64, 4, "3 quotients, expected 4"),
        ([3, 0b11010001, 0b1000110], 64, 3, "expected zeros after its first 6 bits"),
        ([3, 0b010001, 0b10000110, 0], 64, 3, "2 bytes of quotients, expected 1"),
        (RICE, 20, 3, "20 as last index, expected at most 19"),
        ([5, 0, 0, 0b10000011], 64, 3, "5 as sum of quotients, expected at most 3"),
        (RICE, 2, 3, "2 elements cannot hold 3"),
        (RICE, 2, -1, "cannot hold -1"),
        ([1, 0], 100, 0, "2 bytes, expected none"),
        ([0], 0, 0, "1 bytes, expected none"),
        ([33, 1], 8, 1, "1 Elias bytes, expected at most 0"),
        ([33, 0, 0], 100, 1, "fewer than 1 ones"),
        ([33, 3], 100, 1, "2 ones in the unary part"),
        ([33, 1, 0], 100, 1, "too many"),
        ([33, 0b10000000, 0], 100, 1, "8 bits, at most 7"),
        ([33, 0b1000000, 0x3F], 100, 1, "127 in an Elias code, expected at most 100"),
        ([33, 0b1000000, 0xC0], 100, 1, "expected zeros after its first 6 bits"),
        ([34, 0b1000000], 100, 1, "bits"),
        ([35, 1], 100, 1, "35 as index mode"),
    ],
)
def test_bytes_that_nobody_encoded(packed, universe, count, message):
    with pytest.raises(WireError, match=message):
        decode_indices(torch.tensor(packed, dtype=torch.uint8), universe, count)


def test_an_index_beyond_the_universe():
    packed = encode_indices(tensor([5, 6, 60]), 64)
    with pytest.raises(WireError, match="60 as last index, expected at most 59"):
        decode_indices(packed, 60, 3)


def test_gaps_that_lead_beyond_the_universe():
    body = encode_integers(tensor([90, 90]), "gamma")
    packed = torch.cat([torch.tensor([33], dtype=torch.uint8), body])
    with pytest.raises(WireError, match="179 as last index, expected at most 99"):
        decode_indices(packed, 100, 2)
    body = encode_integers(tensor([2**45] * 4), "delta")
    packed = torch.cat([torch.tensor([34], dtype=torch.uint8), body])
    with pytest.raises(WireError, match="as last index"):
        decode_indices(packed, 2**46, 4)


def test_the_wrong_kind_of_tensor():
    with pytest.raises(WireError, match=r"uint8 \[size\], got torch.int64 \[1\]"):
        decode_indices(torch.tensor([0]), 0, 0)


@given(
    st.binary(max_size=40),
    st.integers(0, 300),
    st.integers(-1, 300),
    st.sampled_from((b"", b"\x21", b"\x22")),
)
def test_random_bytes_give_a_wire_error_or_an_index_set(data, universe, count, mode):
    packed = torch.tensor(list(mode + data), dtype=torch.uint8)
    try:
        indices = decode_indices(packed, universe, count)
    except WireError:
        return
    assert_index_set(indices, universe, count)


@given(st.data())
def test_flipped_and_missing_bits_give_a_wire_error_or_an_index_set(data):
    universe = data.draw(st.integers(1, 2000))
    wanted = data.draw(st.sets(st.integers(0, universe - 1), max_size=50))
    packed = encode_indices(tensor(sorted(wanted)), universe)
    if not packed.numel():
        return
    bit = data.draw(st.integers(0, 8 * packed.numel() - 1))
    flipped = packed.clone()
    flipped[bit // 8] ^= 1 << bit % 8
    try:
        indices = decode_indices(flipped, universe, len(wanted))
    except WireError:
        pass
    else:
        assert_index_set(indices, universe, len(wanted))
        assert indices.tolist() != sorted(wanted)
    with pytest.raises(WireError):
        decode_indices(packed[:-1], universe, len(wanted))
