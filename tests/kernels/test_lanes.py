"""Blocks in rows and side by side: C against torch, and both against what is defined."""

import pytest
import torch

from gradwire import kernels
from gradwire.core.key import Key
from gradwire.kernels import _dispatch
from gradwire.kernels.native import _library
from gradwire.kernels.native import lanes as native
from gradwire.kernels.reference import lanes as reference

needs_library = pytest.mark.skipif(
    _dispatch.cpu_backend() != "native", reason="the C library was not built"
)
SHAPES = [(0, 5), (3, 0), (1, 1), (64, 7), (64, 64), (65, 513), (70, 100), (130, 1024), (63, 575)]


def random_bits(blocks: int, n: int) -> torch.Tensor:
    return (Key(blocks).words(blocks * n) & 1).to(torch.uint8).view(blocks, n)


@pytest.fixture(params=[0, 2], ids=["plain", "avx512"])
def level(request):
    """The instructions that C may use."""
    if _dispatch.cpu_backend() != "native":
        pytest.skip("the C library was not built")
    _library.load().gw_polar_widest(request.param)
    yield
    _library.load().gw_polar_widest(2)


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize(("blocks", "n"), SHAPES)
def test_the_backends_agree(blocks, n) -> None:
    bits = random_bits(blocks, n)
    lanes = native.bits_to_lanes(bits)
    assert torch.equal(lanes, reference.bits_to_lanes(bits))
    assert torch.equal(native.bits_from_lanes(lanes, blocks), bits)
    assert torch.equal(reference.bits_from_lanes(lanes, blocks), bits)
    rows = native.rows_from_lanes(lanes, blocks)
    assert torch.equal(rows, reference.rows_from_lanes(lanes, blocks))
    assert torch.equal(native.rows_to_lanes(rows, n), lanes)
    assert torch.equal(reference.rows_to_lanes(rows, n), lanes)


@needs_library
@pytest.mark.parametrize(("blocks", "n"), SHAPES)
def test_the_backends_agree_on_ratios(blocks, n) -> None:
    ratios = 8 * Key(n).normal(blocks * n).view(blocks, n)
    ratios[:, ::3] = (ratios[:, ::3] * 16).round() / 16  # halves, which round to even
    found = native.ratios_to_lanes(ratios, 8)
    assert torch.equal(found, reference.ratios_to_lanes(ratios, 8))


def test_ratios_are_rounded_and_cut_off() -> None:
    ratios = torch.tensor([[0.25, -0.375, 100.0, -3e38, 0.0625, 0.1875]])
    lanes = kernels.ratios_to_lanes(ratios, 8)
    assert lanes.shape == (1, 6, 64)
    assert lanes[0, :, 0].tolist() == [2, -3, 127, -127, 0, 2]
    assert not lanes[0, :, 1:].any()
    for bad in (float("nan"), float("inf"), -float("inf")):
        with pytest.raises(ValueError, match="finite"):
            kernels.ratios_to_lanes(torch.full((3, 5), bad), 8)


@needs_library
@pytest.mark.parametrize("blocks", [1, 2, 3, 7, 8, 13, 16, 31, 32, 33, 61, 63, 64, 65, 127, 200])
@pytest.mark.parametrize("used", [1, 60, 64])
def test_the_backends_agree_on_elements(blocks, used) -> None:
    lanes = kernels.polar_width(blocks)
    groups = -(-blocks // lanes)
    for empty in (0, blocks - 1):
        count = used * blocks - empty
        if count <= (groups - 1) * lanes * used:
            continue
        ratios = (Key(count).words(count) % 255 - 127).to(torch.int8)
        found = native.polar_fill(ratios, blocks, 64, lanes, 127)
        assert torch.equal(found, reference.polar_fill(ratios, blocks, 64, lanes, 127))
    for rows in (0, 1, 5, 100):
        count = -(-rows * blocks // 8)
        packed = Key(rows).words(count + 4).view(torch.uint8)[:count].clone()
        if rows * blocks % 8:
            packed[-1] &= (1 << rows * blocks % 8) - 1
        cut = native.cut_lanes(packed, blocks, rows, lanes)
        assert torch.equal(cut, reference.cut_lanes(packed, blocks, rows, lanes))
        assert torch.equal(native.join_lanes(cut, blocks), packed)
        full = torch.full_like(cut, 255)  # what lanes without a block hold does not matter
        joined = native.join_lanes(full, blocks)
        assert torch.equal(joined, reference.join_lanes(full, blocks))


def test_elements_by_hand() -> None:
    ratios = torch.tensor([1, 2, 3, 4, 5, 6, 7], dtype=torch.int8)
    filled = kernels.polar_fill(ratios, 3, 4, 8, 99)
    assert filled[0, :, :4].tolist() == [[1, 2, 3, 0], [4, 5, 6, 0], [7, 0, 0, 0], [99] * 4]
    joined = kernels.join_lanes(torch.tensor([[[0b11101], [0b010], [0b100]]]).byte(), 3)
    assert joined.tolist() == [0b00_010_101, 0b1]
    assert kernels.cut_lanes(joined, 3, 3, 8).flatten().tolist() == [0b101, 0b010, 0b100]


@needs_library
def test_the_number_of_threads_changes_nothing() -> None:
    bits, before = random_bits(64 * 9 + 3, 1024), torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            lanes = native.bits_to_lanes(bits)
            assert torch.equal(native.bits_from_lanes(lanes, len(bits)), bits)
            found.append(lanes)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_position_i_of_block_b_is_bit_b_of_row_i() -> None:
    bits = torch.zeros(65, 3, dtype=torch.bool)
    bits[10, 2] = bits[64, 1] = True
    lanes = kernels.bits_to_lanes(bits)
    assert lanes.shape == (2, 3, 8)
    assert lanes[0, 2].tolist() == [0, 4, 0, 0, 0, 0, 0, 0]
    assert lanes[1, 1].tolist() == [1, 0, 0, 0, 0, 0, 0, 0]
    assert int(lanes.to(torch.int64).sum()) == 5


def test_padding_is_ignored() -> None:
    rows = torch.full((2, 2), 255, dtype=torch.uint8)
    lanes = kernels.rows_to_lanes(rows, 9)
    assert kernels.rows_from_lanes(lanes, 2).tolist() == [[255, 1]] * 2


@pytest.mark.parametrize("n", [5, 100])
def test_only_zeros_and_ones(n) -> None:
    bits = torch.zeros(3, n, dtype=torch.uint8)
    bits[2, n - 1] = 2
    with pytest.raises(ValueError, match="zeros and ones"):
        kernels.bits_to_lanes(bits)


def test_bad_arguments_are_refused() -> None:
    lanes = torch.zeros(1, 4, 8, dtype=torch.uint8)
    with pytest.raises(ValueError, match="uint8 or bool"):
        kernels.bits_to_lanes(torch.zeros(2, 2))
    with pytest.raises(ValueError, match="2 groups for 65 blocks"):
        kernels.bits_from_lanes(lanes, 65)
    with pytest.raises(ValueError, match=r"\[groups, n, 8\]"):
        kernels.rows_from_lanes(lanes[..., :7], 3)
    with pytest.raises(ValueError, match="8 elements do not fill 2 blocks of up to 3"):
        kernels.polar_fill(torch.zeros(8, dtype=torch.int8), 2, 3, 8, 127)
    with pytest.raises(ValueError, match=r"int8 \[count\]"):
        kernels.polar_fill(torch.zeros(8), 2, 4, 8, 127)
    with pytest.raises(ValueError, match="in 8, 16, 32 or 64 lanes, got 2 in 7"):
        kernels.polar_fill(torch.zeros(8, dtype=torch.int8), 2, 4, 7, 127)
    with pytest.raises(ValueError, match="2 groups for 65 blocks"):
        kernels.join_lanes(lanes, 65)
    with pytest.raises(ValueError, match="takes 2 bytes of uint8 for 4 rows of 3 blocks"):
        kernels.cut_lanes(torch.zeros(3, dtype=torch.uint8), 3, 4, 8)
    with pytest.raises(ValueError, match=r"\[blocks, 2\] for 9 bits"):
        kernels.rows_to_lanes(torch.zeros(2, 3, dtype=torch.uint8), 9)
