"""Rounding to tables: C gives the bits of the torch reference, and the reference what it says."""

import math

import pytest
import torch

from gradwire import kernels
from gradwire.kernels.native import _library
from gradwire.kernels.native import tables as native
from gradwire.kernels.reference import tables as reference

DRAW = (0x1234567890ABCDEF, (3, 0xFFFFFFFE, 7))
COUNTS = pytest.mark.parametrize("count", [0, 1, 513, 1921, 70_007])
BUCKETS = pytest.mark.parametrize("bucket", [1, 33, 512, 4096, 70_007])


@pytest.fixture(params=[1, 2])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def data(count: int, seed: int = 0) -> torch.Tensor:
    """Gaussian of many magnitudes, with zeros of both signs, denormals, ties and the largest."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(count, generator=g)
    x[::7] *= 1e-3
    for i, special in enumerate((0.0, -0.0, 1e-45, -1e-40, 2.0**-126, 3e38, -3.4e38, 1.0, -0.5)):
        x[5 + 11 * i :: 401] = special
    return x


def scales(x: torch.Tensor, bucket: int) -> torch.Tensor:
    scale = reference.bucket_maxima(x, bucket)
    scale[1::3] *= 0.25  # elements beyond their scale are clamped
    scale[2::5] = 0.0
    return scale


def packing(alphabet: int) -> tuple[int, int, int]:
    digits = {3: 5, 5: 3, 6: 3}.get(alphabet, 0)
    return alphabet, max(1, (alphabet - 1).bit_length()), digits


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(
        a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)
    )


@COUNTS
@BUCKETS
def test_statistics(native_only, threads, count, bucket):
    x, bucket = data(count), min(bucket, max(1, count))
    for name in ("bucket_maxima", "bucket_squares"):
        got, expected = getattr(native, name)(x, bucket), getattr(reference, name)(x, bucket)
        assert same(got, expected), name
    for name in ("bucket_sides", "bucket_extremes"):
        pairs = zip(getattr(native, name)(x, bucket), getattr(reference, name)(x, bucket))
        assert all(same(got, expected) for got, expected in pairs), name


@COUNTS
@pytest.mark.parametrize("level", [0, 2])
def test_sums_do_not_depend_on_the_instructions(native_only, count, level):
    x = data(count).clamp(-1e26, 1e26)
    bits, bucket = kernels.pack_signs(data(count, 1)), max(8, count + -count % 8)
    _library.load().gw_polar_widest(level)
    try:
        assert same(native.bucket_squares(x, bucket), reference.bucket_squares(x, bucket))
        for pair in ((-0.7, 0.7), (0.3, -0.3), (-0.7, 0.5)):
            values = torch.tensor(pair)
            sums = native.cell_products(x, bits, bucket, values, (2, 1, 0))
            expected = reference.cell_products(x, bits, bucket, values, (2, 1, 0))
            assert all(same(a, b) for a, b in zip(sums, expected))
    finally:
        _library.load().gw_polar_widest(2)


@pytest.fixture
def native_only(native):
    """`native` under a name that is free."""


@pytest.fixture(params=["one", "thirds", "few", "sixteen", "many", "powers", "equal", "edge"])
def levels(request):
    inner = {
        "one": [],
        "thirds": [0.3, 0.7],
        "few": [0.05, 0.1, 0.2, 0.35, 0.5, 0.75],
        "sixteen": [j / 16 for j in range(1, 16)],
        "many": [(j / 127) ** 2 for j in range(1, 127)],
        "powers": [2.0**-j for j in range(6, 0, -1)],
        "equal": [0.25, 0.25, 0.5, 1.0],
        "edge": [1e-30, 1.5e-30, *(0.5 + j * 1e-6 for j in range(20))],
    }[request.param]
    return torch.tensor([0.0, *inner, 1.0])


@COUNTS
@BUCKETS
def test_levels(native_only, threads, count, bucket, levels):
    x, bucket, how = data(count), min(bucket, max(1, count)), packing(2 * len(levels) - 1)
    scale = scales(x, bucket)
    got = native.to_levels(x, scale, bucket, levels, DRAW, how)
    assert same(got, reference.to_levels(x, scale, bucket, levels, DRAW, how))
    table = torch.cat([-levels.flip(0), levels[1:]])
    start = scale.flip(0)
    for moved in (None, start):
        heard, ok = native.from_table(got, how, table, scale, moved, bucket, count)
        expected, _ = reference.from_table(got, how, table, scale, moved, bucket, count)
        assert ok
        assert same(heard, expected)


@COUNTS
def test_powers_without_a_scale(native_only, threads, count):
    x, how = data(count), packing(2 * 254 + 1)
    levels = torch.tensor([0.0, *(2.0**e for e in range(-126, 128))])
    got = native.to_levels(x, None, 1, levels, DRAW, how)
    assert same(got, reference.to_levels(x, None, 1, levels, DRAW, how))
    table = torch.cat([-levels.flip(0), levels[1:]])
    heard, ok = native.from_table(got, how, table, None, None, 1, count)
    assert ok
    assert same(heard, reference.from_table(got, how, table, None, None, 1, count)[0])


@COUNTS
@BUCKETS
@pytest.mark.parametrize("draw", [DRAW, None], ids=["random", "nearest"])
@pytest.mark.parametrize("span", [(-1, 1), (-7, 7), (-127, 127), (0, 1), (0, 15), (0, 1023)])
def test_whole(native_only, threads, count, bucket, draw, span):
    x, bucket, how = data(count), min(bucket, max(1, count)), packing(span[1] - span[0] + 1)
    step = scales(x, bucket) / span[1]
    for start in (None, -scales(x, bucket)):
        got = native.to_whole(x, step, start, bucket, *span, draw, how)
        assert same(got, reference.to_whole(x, step, start, bucket, *span, draw, how))


def test_nearest_ties_go_to_even(native_only):
    x = torch.arange(-14, 15) / 2
    got = kernels.unpack_uints(
        native.to_whole(x, torch.ones(1), None, 29, -7, 7, None, packing(15)), 4, 29
    )
    assert torch.equal(got - 7, x.round().to(torch.int32))


@COUNTS
@pytest.mark.parametrize("bucket", [8, 64, 512, 4096])
@pytest.mark.parametrize("cells", [2, 3, 4, 8, 16])
def test_cells(native_only, threads, count, bucket, cells):
    x, how = data(count).clamp(-1e26, 1e26), packing(cells)
    bucket = min(bucket, max(1, count))
    scale = scales(x, bucket)
    edges = torch.linspace(-1, 1, cells + 1)[1:-1]
    got = native.to_cells(x, scale, bucket, edges, how)
    assert same(got, reference.to_cells(x, scale, bucket, edges, how))
    values = torch.linspace(-2, 2, cells)
    sums = native.cell_products(x, got, bucket, values, how)
    for a, b in zip(sums, reference.cell_products(x, got, bucket, values, how)):
        assert same(a, b)


@COUNTS
@BUCKETS
def test_pairs(native_only, threads, count, bucket):
    bucket, bits = min(bucket, max(1, count)), kernels.pack_signs(data(count))
    pairs = data(2 * -(-count // bucket), 1).reshape(-1, 2)
    got = native.from_pairs(bits, pairs, bucket, count)
    assert same(got, reference.from_pairs(bits, pairs, bucket, count))


@COUNTS
@BUCKETS
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_fp8(native_only, threads, count, bucket, dtype):
    x, bucket = data(count), min(bucket, max(1, count))
    scale = scales(x, bucket)
    got = native.to_fp8(x, scale, bucket, dtype)
    assert same(got, reference.to_fp8(x, scale, bucket, dtype))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_fp8_numbers_and_the_middles_between_them(native_only, dtype):
    most = torch.finfo(dtype).max
    numbers = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    numbers = numbers[numbers.isfinite()].sort().values
    x = torch.cat([numbers, (numbers[1:] + numbers[:-1]) / 2]) / most
    scale = torch.ones(1)
    got = native.to_fp8(x, scale, x.numel(), dtype)
    assert same(got, reference.to_fp8(x, scale, x.numel(), dtype))


@pytest.mark.parametrize("alphabet", [2, 3, 5, 6, 4, 7, 15, 16, 31, 100, 255, 256, 509])
def test_every_byte_is_read_or_refused(native_only, alphabet):
    how = packing(alphabet)
    _, width, digits = how
    packed = torch.arange(256, dtype=torch.uint8).repeat(3)
    count = packed.numel() * digits if digits else packed.numel() * 8 // width
    packed = packed[: -(-count * width // 8)] if not digits else packed
    table = torch.arange(alphabet) * 0.5 - 3
    for piece in (packed, packed.flip(0)):
        heard, ok = native.from_table(piece, how, table, None, None, count, count)
        expected, expected_ok = reference.from_table(piece, how, table, None, None, count, count)
        assert ok == expected_ok
        if ok:
            assert same(heard, expected)


@pytest.mark.parametrize("count", [0, 1, 2, 13, 14, 15, 28, 29, 5000])
@pytest.mark.parametrize("share", [0.0, 0.5, 0.98, 1.0])
def test_runs(native_only, count, share):
    g = torch.Generator().manual_seed(count)
    packed = torch.randint(0, 243, (count,), generator=g, dtype=torch.uint8)
    packed[torch.rand(count, generator=g) < share] = 121
    code = native.shorten_runs(packed, 121, 14)
    assert same(code, reference.shorten_runs(packed, 121, 14))
    for module in (native, reference):
        back, total = module.lengthen_runs(code, 121, 14, count)
        assert total == count
        assert same(back, packed)
        assert module.lengthen_runs(code, 121, 14, count + 3)[1] == count
        assert module.lengthen_runs(code, 121, 14, count // 2)[1] == count


def test_an_entry_that_is_not_finite_is_told():
    table = torch.tensor([0.0, math.inf, 1.0, math.nan])
    for byte, fine in ((0b00, True), (0b10, True), (0b01, False), (0b11, False)):
        packed = torch.tensor([byte], dtype=torch.uint8)
        assert kernels.from_table(packed, packing(4), table, None, None, 1, 1)[1] == fine


def test_rounding_is_unbiased():
    levels = torch.tensor([0.0, 0.1, 0.4, 1.0])
    x, scale = torch.full((200_000,), -0.25), torch.ones(1)
    packed = kernels.to_levels(x, scale, x.numel(), levels, DRAW, packing(7))
    table = torch.cat([-levels.flip(0), levels[1:]])
    heard, _ = kernels.from_table(packed, packing(7), table, scale, None, x.numel(), x.numel())
    assert set(heard.unique().tolist()) == set(torch.tensor([-0.1, -0.4]).tolist())
    assert float(heard.mean()) == pytest.approx(-0.25, abs=0.001)


def test_sums_do_not_depend_on_what_fills_up_a_bucket():
    x = data(1000).clamp(-1e18, 1e18)
    assert same(kernels.bucket_squares(x, 1000), kernels.bucket_squares(x, 10**12))
    expected = x.double().square().sum()
    assert float(kernels.bucket_squares(x, 1000)) == pytest.approx(float(expected), rel=1e-12)


def test_arguments_are_checked():
    x, one = torch.zeros(8), torch.ones(1)
    with pytest.raises(ValueError, match="flat vector"):
        kernels.bucket_maxima(x.half(), 8)
    with pytest.raises(ValueError, match="at least one"):
        kernels.bucket_maxima(x, 0)
    with pytest.raises(ValueError, match="2 scales"):
        kernels.to_levels(x, one, 4, torch.tensor([0.0, 1.0]), DRAW, packing(3))
    with pytest.raises(ValueError, match="two levels"):
        kernels.to_levels(x, one, 8, torch.tensor([0.0, 1.0]), DRAW, packing(5))
    with pytest.raises(ValueError, match=r"-7 \.\. 7"):
        kernels.to_whole(x, one, None, 8, -7, 7, DRAW, packing(7))
    with pytest.raises(ValueError, match="edges"):
        kernels.to_cells(x, one, 8, torch.zeros(2), packing(4))
    with pytest.raises(ValueError, match="bytes"):
        kernels.from_table(torch.zeros(3, dtype=torch.uint8), packing(4), x[:4], None, None, 8, 8)
