"""Trellis-coded quantisation: the C kernels against the reference, and what the trellis gains."""

import math

import pytest
import torch

from gradwire import kernels
from gradwire.coding.trellis import Tables
from gradwire.core.key import Key
from gradwire.kernels.native import trellis as native
from gradwire.kernels.reference import trellis as reference
from gradwire.kernels.reference import trellis_fit, trellis_tables

KEY = Key(seed=9).child("trellis")
REFERENCES = (reference, trellis_tables, trellis_fit)
NO_OFFSETS = torch.zeros(6, dtype=torch.int32)
LAYOUTS = (
    ((1, 1),),
    ((1, 300),),
    ((40, 30), (1, 30), (7, 100), (1, 1), (2, 3)),
    ((3, 700), (1, 1025), (50, 1)),
)


def numbers(count: int, step: float, name: str) -> torch.Tensor:
    """Of heavy tails, scaled."""
    x = KEY.child(name).normal(count)
    return (x * x.abs().square() * (64 / step)).round().clamp(-(2**22), 2**22).to(torch.int32)


@pytest.mark.few(3)
@pytest.mark.usefixtures("native")
@pytest.mark.parametrize(
    ("step", "signed"), [(3.0, False), (1.0, True), (0.1, True), (0.0005, False)]
)
@pytest.mark.parametrize(
    ("layout", "segments", "threads"),
    [*((layout, 1, 1) for layout in LAYOUTS), (LAYOUTS[-1], 3, 2)],
    ids=str,
)
def test_c_equals_the_reference(layout, step, signed, segments, threads) -> None:
    shapes = torch.tensor(layout)
    count = int(shapes.prod(dim=1).sum())
    scaled = numbers(count, step, f"{layout} {step}")
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        offsets = NO_OFFSETS
        contexts, counts, _ = both("trellis_contexts", scaled, None, shapes, segments)
        for offset in ([4, -8, 0, 12, 4, -4], [0, 0, 28, -32, 8, 4]):
            rates = trellis_fit.rates(kernels.trellis_tables(counts)[0], False)
            (indices,) = both("trellis_search", scaled, contexts, rates, offsets, signed)
            both("trellis_counts", scaled, indices, contexts, signed)
            contexts, counts, _ = both(
                "trellis_contexts", scaled, indices, shapes, segments, signed
            )
            offsets = torch.tensor(offset, dtype=torch.int32)
        tables = Tables(*kernels.trellis_tables(counts))
        halves, tails = tables.halves(), tables.tails()
        packed, lengths = both("trellis_encode", indices, contexts, halves, tails, segments)
        (values,) = both(
            "trellis_decode", packed, lengths, halves, tails, offsets, shapes, count, signed
        )
    finally:
        torch.set_num_threads(before)
    assert torch.equal(values.sign(), indices.sign())
    # An index is at most one cell of its quantiser from the number, unless it is zero.
    error = (values - scaled).abs()
    assert bool((error[indices != 0] <= 3 * 64 + 64).all())
    # The size that the tables promise is that of the code, but for what a state takes.
    tables = Tables(*kernels.trellis_tables(counts))
    promised = (tables.size_bits - len(tables.bits)) / 8
    assert packed.numel() <= 1.02 * promised + 6 * segments


def both(name, *arguments):
    """What the public operation gives, after a comparison of the two backends."""
    norm = next(module for module in REFERENCES if hasattr(module, name))
    own, other = getattr(native, name)(*arguments), getattr(norm, name)(*arguments)
    public = getattr(kernels, name)(*arguments)
    if isinstance(own, torch.Tensor):
        own, other, public = (own,), (other,), (public,)
    for a, b, c in zip(own, other, public, strict=True):
        if not isinstance(a, torch.Tensor):
            assert a == b == c
            continue
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
        assert torch.equal(a, c)
    return own


@pytest.mark.few(2)
@pytest.mark.usefixtures("native")
@pytest.mark.parametrize(("step", "signed"), [(3.0, False), (0.5, True), (0.0005, False)])
@pytest.mark.parametrize("segments", [5, 19])
def test_segments_side_by_side(segments, step, signed) -> None:
    shapes = torch.tensor([[1000, 3], [1, 5000], [64, 170], [1, 1], [2, 900]])
    count = int(shapes.prod(dim=1).sum())
    scaled = numbers(count, step, f"{segments} {step}")
    both("trellis_contexts", scaled, None, shapes, segments)
    indices = scaled.sign() * ((scaled.abs() + 60) >> 7)
    contexts, counts, _ = both("trellis_contexts", scaled, indices, shapes, segments, signed)
    tables = Tables(*kernels.trellis_tables(counts))
    halves, tails = tables.halves(), tables.tails()
    packed, lengths = both("trellis_encode", indices, contexts, halves, tails, segments)
    both("trellis_decode", packed, lengths, halves, tails, NO_OFFSETS, shapes, count, signed)


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("count", [0, 30, 600, 5000, 1 << 20])
def test_tables_of_all_kinds_of_counts(count) -> None:
    for i in range(20):
        key = KEY.child(f"counts {count} {i}")
        heavy = (key.child("size").normal(32 * 4) * (i % 5)).exp().double().view(32, 4)
        there = key.child("there").normal(32 * 4).view(32, 4) > i % 4 - 2
        counts = (heavy / heavy.sum() * count * there).long()
        both("trellis_tables", counts)


@pytest.mark.few
@pytest.mark.usefixtures("native")
@pytest.mark.parametrize(("step", "signed"), [(3.0, False), (0.7, True), (0.01, False)])
@pytest.mark.parametrize(
    ("layout", "segments", "stride"), [(LAYOUTS[2], 1, 1), (((100, 70), (1, 1300)), 8, 3)], ids=str
)
def test_fit_equals_the_reference(layout, segments, stride, step, signed) -> None:
    shapes = torch.tensor(layout)
    scaled = numbers(int(shapes.prod(dim=1).sum()), step, f"fit {layout} {step}")
    arguments = scaled, shapes, segments
    fresh = both("trellis_fit", *arguments, None, NO_OFFSETS, signed, 2, 2, stride)
    _, _, levels, offsets, *_ = fresh
    given = both("trellis_fit", *arguments, levels, offsets, signed, 0, 1, stride)
    error, energy = given[-2:]
    assert 0 < error < energy
    tables = Tables(given[2], given[4], given[5])
    frequencies = tables.halves(), tables.tails()
    values = kernels.trellis_decode(
        *kernels.trellis_encode(given[0], given[1], *frequencies, segments),
        *frequencies,
        given[3],
        shapes,
        scaled.numel(),
        signed,
    )
    if stride == 1:
        assert error == float((values - scaled).long().square().sum())


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_numbers_in_terms_of_a_step(dtype) -> None:
    """Ties go to even, and what is too large is clamped, as the reference does it."""
    ties = torch.arange(-40, 40, dtype=dtype) / 4
    x = torch.cat([ties, KEY.child("scale").normal(300_001).to(dtype) * 1e3, -0.0 * ties])
    for factor, most in ((2.0, 8_387_712), (1.7e-3, 100), (3e4, 8_387_712), (1e-30, 3)):
        (scaled,) = both("trellis_scale", x, factor, most)
        assert scaled.dtype == torch.int32
    assert both("trellis_scale", ties[:8], 2.0, 100)[0].tolist() == [
        -20, -20, -19, -18, -18, -18, -17, -16,
    ]  # fmt: skip
    with pytest.raises(ValueError, match="float32 or float64"):
        kernels.trellis_scale(x.half(), 1.0, 3)
    with pytest.raises(ValueError, match=r"2\^24"):
        kernels.trellis_scale(x, 1.0, 1 << 25)


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("threads", [1, 3])
def test_a_number_out_of_range_is_found_wherever_it_is(threads) -> None:
    count = 1_000_003
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for at in (0, 17, 500_000, count - 1):
            for value in (-(2**31), -1, 2**31 - 1):
                x = torch.zeros(count, dtype=torch.int32)
                x[at] = value
                found = native.trellis_range(x)
                assert found == trellis_fit.trellis_range(x) == (min(value, 0), max(value, 0))
            contexts = torch.zeros(count, dtype=torch.uint8)
            contexts[at] = 255
            assert native.trellis_range(contexts)[1] == 255
    finally:
        torch.set_num_threads(before)


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("stride", [1, 3])
def test_squares_of_some_blocks(stride) -> None:
    shapes = torch.tensor([[3, 700], [1, 5000]])
    scaled = numbers(7100, 0.5, f"squares {stride}")
    fit = kernels.trellis_fit(scaled, shapes, 1, None, NO_OFFSETS, False, 1, 1, stride)
    indices, contexts, _, offsets = fit[:4]
    assert both("trellis_squares", scaled, indices, contexts, offsets, stride) == fit[-2:]
    with pytest.raises(ValueError, match="every 1 or more"):
        kernels.trellis_squares(scaled, indices, contexts, offsets, 0)


@pytest.mark.usefixtures("native")
def test_whatever_bytes_come_nothing_breaks() -> None:
    shapes = torch.tensor([[100, 20], [1, 120]])
    tables = Tables(*kernels.trellis_tables(torch.zeros(32, 4, dtype=torch.int64)))
    halves, tails = tables.halves(), tables.tails()
    refused = 0
    for i in range(100):
        packed = KEY.child(f"bytes {i}").halfwords(2 * (4 + i % 60)).to(torch.uint8)
        words = packed.numel() // 2
        lengths = torch.tensor([words // 2, words - words // 2])
        arguments = packed, lengths, halves, tails, NO_OFFSETS, shapes, 2120
        with pytest.raises(ValueError, match="no code"):
            native.trellis_decode(*arguments)
        with pytest.raises(ValueError, match="no code"):
            reference.trellis_decode(*arguments)
        refused += 1
    assert refused == 100


def test_the_trellis_gains_one_decibel_on_a_uniform_source() -> None:
    """At high rate, over a scalar quantiser of the same rate: 1.53 dB would be all there is.

    Indices are uniform there, so the rate is that of cells of two steps: log2(range / 2 steps).
    """
    scaled = (KEY.child("uniform").uniform64(100_000) * 64 * 4000 - 64 * 2000).to(torch.int32)
    contexts = torch.zeros(scaled.numel(), dtype=torch.uint8)
    rates = torch.zeros(8, 16, dtype=torch.int32)
    indices = kernels.trellis_search(scaled, contexts, rates, NO_OFFSETS)
    state, error = 0, 0
    for k, x in zip(indices.tolist(), scaled.tolist()):
        value = 64 * (2 * abs(k) - (state & 1)) if k else 0
        error += (abs(x) - value) ** 2
        state = (state ^ state >> 1) & 1 | ((state >> 2 ^ k) & 1) << 1 | (state & 1) << 2
    scalar = (2 * 64) ** 2 / 12
    assert 10 * math.log10(scalar / (error / scaled.numel())) == pytest.approx(1.09, abs=0.06)


def test_arguments_are_checked() -> None:
    scaled = torch.zeros(10, dtype=torch.int32)
    contexts = torch.zeros(10, dtype=torch.uint8)
    rates = torch.zeros(8, 16, dtype=torch.int32)
    shapes = torch.tensor([[2, 5]])
    with pytest.raises(ValueError, match=r"torch\.int32"):
        kernels.trellis_search(scaled.long(), contexts, rates, NO_OFFSETS)
    with pytest.raises(ValueError, match="one length"):
        kernels.trellis_search(scaled, contexts[1:], rates, NO_OFFSETS)
    with pytest.raises(ValueError, match="below 32"):
        kernels.trellis_search(scaled, contexts + 32, rates, NO_OFFSETS)
    with pytest.raises(ValueError, match="must lie within"):
        kernels.trellis_search(scaled + 2**30, contexts, rates, NO_OFFSETS)
    with pytest.raises(ValueError, match="for 10 elements"):
        kernels.trellis_contexts(scaled, None, shapes[:, :1].expand(1, 2), 1)
    with pytest.raises(ValueError, match="2 segments of 10 elements"):
        kernels.trellis_contexts(scaled, None, shapes, 2)
    tables = Tables(*kernels.trellis_tables(torch.zeros(32, 4, dtype=torch.int64)))
    with pytest.raises(ValueError, match="add up"):
        kernels.trellis_encode(scaled, contexts, tables.halves(), tables.tails() + 1, 1)
    with pytest.raises(ValueError, match="leave nothing"):
        kernels.trellis_encode(scaled, contexts, tables.halves() + 2**14, tables.tails(), 1)
