"""Quantisers that a plane names: the C kernels against the reference."""

import pytest
import torch

from gradwire import kernels
from gradwire.coding.trellis import Tables
from gradwire.core.key import Key
from gradwire.kernels.native import plane as native
from gradwire.kernels.native import trellis as native_code
from gradwire.kernels.reference import plane as reference
from gradwire.kernels.reference import trellis as reference_code
from gradwire.kernels.reference import trellis_fit

KEY = Key(seed=9).child("plane")
LAYOUTS = (
    ((1, 1),),
    ((1, 300),),
    ((40, 30), (1, 30), (7, 100), (1, 1), (2, 3)),
    ((1000, 3), (1, 5000), (64, 170), (1, 1), (2, 900)),
)


def numbers(count: int, step: float) -> torch.Tensor:
    """Of heavy tails, scaled."""
    x = KEY.child(f"{count} {step}").normal(count)
    return (x * x.abs().square() * (64 / step)).round().clamp(-(2**22), 2**22).to(torch.int32)


@pytest.mark.few(3)
@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("step", [3.0, 0.3, 0.0005])
@pytest.mark.parametrize(
    ("layout", "segments", "threads"),
    [*((layout, 1, 1) for layout in LAYOUTS), (LAYOUTS[-1], 5, 1), (LAYOUTS[-1], 17, 2)],
    ids=str,
)
def test_c_equals_the_reference(layout, step, segments, threads) -> None:
    shapes = torch.tensor(layout)
    count = int(shapes.prod(dim=1).sum())
    scaled = numbers(count, step)
    plane = KEY.child("bits").halfwords(-(-count // 8)).to(torch.uint8)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        contexts, counts, _ = kernels.trellis_contexts(scaled, None, shapes, segments)
        offsets = torch.tensor([4, -8, 0, 12, 4, -32], dtype=torch.int32)
        rates = trellis_fit.rates(kernels.trellis_tables(counts)[0], False)
        rates[4, 9:] = 1 << 17
        ratios = kernels.plane_ratios(scaled, contexts, rates, offsets)
        for backend in (native, reference):
            assert torch.equal(ratios, backend.plane_ratios(scaled, contexts, rates, offsets))
        arguments = scaled, plane, rates, offsets, shapes, segments
        indices, contexts, counts, errors = kernels.plane_choose(*arguments)
        for backend in (native, reference):
            for a, b in zip((indices, contexts, counts, errors), backend.plane_choose(*arguments)):
                assert a.dtype == b.dtype
                assert torch.equal(a, b)
        tables = Tables(*kernels.trellis_tables(counts))
        halves, tails = tables.halves(), tables.tails()
        packed, lengths = kernels.trellis_encode(indices, contexts, halves, tails, segments)
        given = packed, lengths, halves, tails, offsets, shapes, count, False, plane
        values = kernels.trellis_decode(*given)
        for backend in (native_code, reference_code):
            assert torch.equal(values, backend.trellis_decode(*given))
    finally:
        torch.set_num_threads(before)
    q = kernels.unpack_uints(plane, 1, count).to(torch.int32)
    assert torch.equal(contexts.to(torch.int32) & 1, q)
    size = indices.abs()
    expected = 128 * size - 64 * q - offsets[3 * q + size.clamp(1, 3) - 1]
    assert torch.equal(values, torch.where(size == 0, 0, indices.sign() * expected))
    # An index that is not zero is one of the two around the number.
    assert bool(((values - scaled).abs()[size > 0] <= 128 + 64).all())


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("threads", [1, 3])
def test_words_of_pieces_equal_the_reference(threads) -> None:
    pieces = []
    for i, (n, lanes) in enumerate([(64, 8), (256, 64), (128, 32), (8, 16), (512, 8), (256, 64)]):
        key = KEY.child(f"words {i}")
        ratios = (key.normal(n * lanes) * 40).clamp(-127, 127).to(torch.int8).view(n, lanes)
        free = key.child("free").permutation(n) < (n * (i + 1)) // 7
        pieces.append(kernels.PlanePiece(ratios, kernels.polar_kinds(free), key.permutation(n)))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = kernels.plane_words(pieces)
    finally:
        torch.set_num_threads(before)
    for piece, own, expected in zip(pieces, found, reference.plane_words(pieces), strict=True):
        for a, b in zip(own, expected, strict=True):
            assert a.dtype == b.dtype
            assert torch.equal(a, b)
        # Ratios that are certain decide their bits, if all inputs are free.
        free = kernels.polar_kinds(torch.ones(len(piece.ratios), dtype=torch.bool))
        (_, word), *_ = kernels.plane_words([piece._replace(kinds=free)])
        assert torch.equal(
            word.reshape(-1), kernels.pack_uints((piece.ratios < 0).reshape(-1).to(torch.int32), 1)
        )
    with pytest.raises(ValueError, match="8 positions or more"):
        kernels.plane_words([pieces[0]._replace(ratios=pieces[0].ratios[:4])])
    with pytest.raises(ValueError, match="an order of int64"):
        kernels.plane_words([pieces[0]._replace(order=pieces[0].order[1:])])
    with pytest.raises(ValueError, match="kinds"):
        kernels.plane_words([pieces[0]._replace(kinds=pieces[0].kinds[1:])])


def test_a_ratio_is_the_difference_of_squares_without_rates() -> None:
    scaled = torch.tensor([0, 32, 64, -64, -128, 96, 640 + 16], dtype=torch.int32)
    nothing = torch.zeros(8, 16, dtype=torch.int32)
    nothing[4] = 1 << 17  # no zero in quantiser 1
    contexts, offsets = torch.zeros(7, dtype=torch.uint8), torch.zeros(6, dtype=torch.int32)
    ratios = kernels.plane_ratios(scaled, contexts, nothing, offsets)
    assert ratios.tolist() == [32, 0, -32, -32, 32, 0, 16]


def test_arguments_are_checked() -> None:
    scaled, contexts = torch.zeros(10, dtype=torch.int32), torch.zeros(10, dtype=torch.uint8)
    rates, offsets = torch.zeros(8, 16, dtype=torch.int32), torch.zeros(6, dtype=torch.int32)
    shapes, plane = torch.tensor([[1, 10]]), torch.zeros(2, dtype=torch.uint8)
    with pytest.raises(ValueError, match="below 32"):
        kernels.plane_ratios(scaled, contexts + 32, rates, offsets)
    with pytest.raises(ValueError, match="one length"):
        kernels.plane_ratios(scaled, contexts[:9], rates, offsets)
    with pytest.raises(ValueError, match="rates must lie"):
        kernels.plane_ratios(scaled, contexts, rates - 1, offsets)
    with pytest.raises(ValueError, match="2 bytes for 10 bits"):
        kernels.plane_choose(scaled, plane[:1], rates, offsets, shapes, 1)
    with pytest.raises(ValueError, match="for 10 elements"):
        kernels.plane_choose(scaled, plane, rates, offsets, shapes + 1, 1)
    tables = Tables(*kernels.trellis_tables(torch.zeros(32, 4, dtype=torch.int64)))
    code = torch.zeros(4, dtype=torch.uint8), torch.tensor([2]), tables.halves(), tables.tails()
    with pytest.raises(ValueError, match="2 bytes for 10 bits"):
        kernels.trellis_decode(*code, offsets, shapes, 10, False, plane[:1])
