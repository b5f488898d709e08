"""Threads: every kernel gives the same bits for any number of them, wherever its parts begin."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from gradwire import kernels
from gradwire.coding.trellis import Tables
from gradwire.kernels.native import _library
from gradwire.kernels.reference import hadamard as reference_hadamard
from gradwire.kernels.reference import trellis_fit

pytestmark = pytest.mark.usefixtures("native")

STREAM = (3, 1, 4)
CPU = torch.device("cpu")
THREADS = [2, 3, 7]
# Around blocks of 256 and 512, the random bits drawn at a time, several of each, and not a byte.
NUMELS = [0, 1, 255, 257, 1024, 1537, 3073, 6145, 20_003]
SHARED = 2**18  # buckets and rows from here on are shared by the threads
LONG = SHARED + 5003


@pytest.fixture
def small_parts() -> Iterator[None]:
    """Parts as small as they can be: else these sizes would not be divided."""
    _library.load().gw_least_items(1)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    _library.load().gw_least_items(0)


def vector(numel: int, seed: int = 0) -> Tensor:
    """Half of it rounded, so that there are zeros of both signs and equal magnitudes."""
    x = torch.randn(numel, generator=torch.Generator().manual_seed(seed))
    x[: numel // 2] = x[: numel // 2].round()
    return x


def bytes_of(results: object) -> list[object]:
    """Results in a form that compares as their bits do."""
    if isinstance(results, Tensor):
        return [results.contiguous().view(torch.uint8).numpy().tobytes()]
    if isinstance(results, tuple | list):
        return [each for result in results for each in bytes_of(result)]
    return [results]


def check(operation: Callable[[], object]) -> None:
    """`operation` allocates what it writes: a part that nobody does leaves NaN or chance."""
    torch.set_num_threads(1)
    expected = bytes_of(operation())
    for threads in THREADS:
        torch.set_num_threads(threads)
        assert bytes_of(operation()) == expected, f"{threads} threads"


def with_lost(operation: Callable[[Tensor], tuple[Tensor, ...]], numel: int) -> tuple[Tensor, ...]:
    lost = torch.full((numel,), torch.nan)
    return (*operation(lost), lost)


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize(
    ("numel", "bucket"),
    [*((numel, bucket) for numel in NUMELS for bucket in (8, 264, 4096)), (LONG, SHARED)],
)
def test_signs(numel, bucket, residual):
    bucket = min(bucket, max(numel, 1))
    x, r = vector(numel), vector(numel, 1) if residual else None
    check(lambda: with_lost(lambda lost: kernels.encode_signs(x, r, bucket, lost), numel))
    payloads = [kernels.encode_signs(vector(numel, i), None, bucket) for i in range(3)]
    scale, packed = zip(*payloads)
    check(lambda: kernels.mean_signs(packed, scale, numel, bucket, torch.full_like(x, torch.nan)))


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize(("num_levels", "width"), [(3, 3), (7, 4), (127, 8)])
@pytest.mark.parametrize(
    ("numel", "bucket"),
    [*((numel, bucket) for numel in NUMELS for bucket in (8, 512, 1000, 10_000)), (LONG, SHARED)],
)
def test_levels(numel, bucket, num_levels, width, residual):
    x, r = vector(numel), vector(numel, 1) if residual else None
    levels = num_levels, bucket, width

    def encode(lost: Tensor) -> tuple[Tensor, Tensor]:
        return kernels.encode_levels(x, r, *levels, 2**63 + 5, STREAM, lost)

    check(lambda: with_lost(encode, numel))
    scale, packed = encode(torch.empty(numel))
    check(
        lambda: kernels.decode_levels(packed, scale, *levels, numel, torch.full_like(x, torch.nan))
    )


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("numel", [*NUMELS, 300_001])
@pytest.mark.parametrize("density", [0.001, 0.01, 0.3, 0.6, 1.0])
def test_the_largest(numel, density, residual):
    x, r = vector(numel), vector(numel, 1) if residual else None
    k = round(density * numel)
    check(lambda: with_lost(lambda lost: kernels.select_largest(x, r, k, lost), numel))


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("numel", [1025, 300_001])
def test_equal_magnitudes_in_several_parts(numel):
    x = torch.ones(numel)
    x[::3] = -1.0
    x[::1000] = 2.0
    for k in (1, numel // 1000, numel // 3, numel - 1):
        check(lambda k=k: with_lost(lambda lost: kernels.select_largest(x, None, k, lost), numel))


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("numel", NUMELS)
@pytest.mark.parametrize("threshold", [0.0, 1.0, 2.5, 1e9])
@pytest.mark.parametrize("capacity", [0, 10, 100_000])
def test_what_exceeds_a_threshold(numel, threshold, capacity):
    x = vector(numel)

    def select(lost: Tensor) -> tuple[Tensor, Tensor]:
        return kernels.select_above(x, None, threshold, capacity, lost)

    check(lambda: with_lost(select, numel))


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("at", [0, 9_000, 19_000])
def test_all_of_a_selection_in_one_part(at):
    """More than the part's share of the results, though all of them have room."""
    x = torch.zeros(20_003)
    x[at : at + 1000] = vector(1000).abs() + 1
    check(lambda: with_lost(lambda lost: kernels.select_above(x, None, 1.0, 1000, lost), 20_003))
    check(lambda: with_lost(lambda lost: kernels.select_largest(x, None, 900, lost), 20_003))


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("numel", NUMELS)
def test_strata(numel):
    x = vector(numel)
    for k in {numel // 10, numel // 3, numel}:
        check(lambda k=k: kernels.strata_positions(numel, k, 7, STREAM, CPU))
        check(lambda k=k: kernels.strata_values(x, k, 7, STREAM, True))


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("numel", NUMELS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_halves(numel, dtype):
    x = vector(numel) * 1e30

    def narrow() -> tuple[Tensor, bool]:
        out = torch.full((numel,), torch.nan, dtype=dtype)
        return out, kernels.narrow(x, out)

    check(narrow)


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("at", [0, 512, 10_000, 20_002])
def test_one_element_that_is_not_finite(at):
    x = vector(20_003)
    x[at] = torch.nan

    def finite() -> list[bool]:
        scales = kernels.encode_levels(x, None, 7, 512, 4, 0, STREAM)[0]
        half = torch.empty(20_003, dtype=torch.float16)
        return [bool(scales.isfinite().any()), kernels.narrow(x, half)]

    check(finite)
    assert finite() == [False, False]


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("rows", "n"), [(0, 8), (1, 64), (9, 1), (9, 4), (50, 128), (3, 2**14), (2, SHARED)]
)
def test_hadamard(rows, n, dtype):
    x = vector(rows * n).reshape(rows, n).to(dtype)
    flips = kernels.pack_signs(vector(rows * n, 2))
    check(lambda: kernels.hadamard(x, flips, flips, torch.full_like(x, torch.nan)))
    check(lambda: kernels.rotated_signs(x, flips))
    scale = vector(rows, 3).to(dtype).abs()
    check(
        lambda: kernels.unrotated_signs(flips, scale, n, flips, out=torch.full_like(x, torch.nan))
    )


@pytest.mark.parametrize("log", [18, 19, 20, 21])
def test_a_row_that_threads_share_equals_the_reference(log):
    x = vector(2**log).reshape(1, -1)
    flips = kernels.pack_signs(vector(2**log, 2))
    assert bytes_of(kernels.hadamard(x, flips, flips)) == bytes_of(
        reference_hadamard.hadamard(x, flips, flips)
    )
    assert bytes_of(kernels.rotated_signs(x, flips)) == bytes_of(
        reference_hadamard.rotated_signs(x, flips)
    )


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("count", [0, 1, 95, 97, 1000, 20_003])
def test_random_words(count):
    check(lambda: kernels.philox_words(1, STREAM, count, CPU, 2**32 - 100))


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("count", NUMELS)
@pytest.mark.parametrize("width", [1, 3, 4, 8, 12, 17, 32])
def test_bits(count, width):
    values = torch.randint(0, 2**width, (count,), generator=torch.Generator().manual_seed(count))
    check(lambda: kernels.pack_uints(values, width))
    packed = kernels.pack_uints(values, width)
    check(lambda: kernels.unpack_uints(packed, width, count))
    check(lambda: kernels.ones_positions(packed, count * width))


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("count", NUMELS)
@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str
)
def test_packed_signs(count, dtype):
    x = vector(count).to(dtype)
    check(lambda: kernels.pack_signs(x))
    packed = kernels.pack_signs(x)
    check(lambda: kernels.unpack_signs(packed, count, dtype))


@pytest.mark.usefixtures("small_parts")
def test_a_value_out_of_range_in_any_part():
    torch.set_num_threads(3)
    for at in (0, 5_000, 9_999):
        values = torch.zeros(10_000, dtype=torch.int32)
        values[at] = 16
        with pytest.raises(ValueError, match="16"):
            kernels.pack_uints(values, 4)


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("segments", [1, 4, 16, 17, 37, 49])
def test_segments_of_a_trellis(segments):
    """Whatever the number of threads, how many go side by side in one of them depends on it."""
    numel = 50 * 1024 + 77
    shapes = torch.tensor([[1, 1024], [3000, 16], [1, numel - 49_024]])
    scaled = kernels.trellis_scale(vector(numel), 100.0, 1 << 20)
    check(lambda: kernels.trellis_scale(vector(numel), 100.0, 1 << 20))
    check(lambda: kernels.trellis_contexts(scaled, None, shapes, segments))
    contexts, counts, _ = kernels.trellis_contexts(scaled, None, shapes, segments)
    rates = trellis_fit.rates(kernels.trellis_tables(counts)[0], False)
    offsets = torch.tensor([4, 0, -4, 8, 0, 4], dtype=torch.int32)
    check(lambda: kernels.trellis_search(scaled, contexts, rates, offsets))
    plane = kernels.pack_signs(vector(numel, 1))
    check(lambda: kernels.plane_ratios(scaled, contexts, rates, offsets))
    check(lambda: kernels.plane_choose(scaled, plane, rates, offsets, shapes, segments))
    found = kernels.plane_choose(scaled, plane, rates, offsets, shapes, segments)
    indices, contexts, counts, _ = found
    check(lambda: kernels.trellis_contexts(scaled, indices, shapes, segments, True))
    tables = Tables(*kernels.trellis_tables(counts))
    coded = tables.halves(), tables.tails()
    check(lambda: kernels.trellis_encode(indices, contexts, *coded, segments))
    code = kernels.trellis_encode(indices, contexts, *coded, segments)
    check(lambda: kernels.trellis_decode(*code, *coded, offsets, shapes, numel, False, plane))
