"""The fused kernels: native against the reference, to the bit, and cases by hand."""

import gc

import pytest
import torch
from torch import Tensor

from gradwire import kernels
from gradwire.kernels import _pool
from gradwire.kernels.native import halves as native_halves
from gradwire.kernels.native import levels as native_levels
from gradwire.kernels.native import selection as native_selection
from gradwire.kernels.native import signs as native_signs
from gradwire.kernels.native import strata as native_strata
from gradwire.kernels.reference import halves as reference_halves
from gradwire.kernels.reference import levels as reference_levels
from gradwire.kernels.reference import selection as reference_selection
from gradwire.kernels.reference import signs as reference_signs
from gradwire.kernels.reference import strata as reference_strata

STREAM = (3, 1, 4)
CPU = torch.device("cpu")
# Around bytes, blocks and the random bits drawn at a time.
NUMELS = [0, 1, 7, 8, 9, 255, 256, 257, 511, 512, 513, 3071, 3080, 10_001]
LARGE = 2_200_000  # results beyond the caches, and a sample for the selection
WITH_RESIDUAL = pytest.mark.parametrize("with_residual", [False, True])
NON_FINITE = pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Unlike `torch.equal`, this tells -0.0 from 0.0."""
    if a.is_floating_point():
        integer = {2: torch.int16, 4: torch.int32}[a.element_size()]
        a, b = a.contiguous().view(integer), b.contiguous().view(integer)
    return torch.equal(a, b)


def vector(numel: int, seed: int = 0) -> Tensor:
    """Half of it rounded, so that there are zeros of both signs and equal magnitudes."""
    x = torch.randn(numel, generator=torch.Generator().manual_seed(seed))
    x[: numel // 2] = x[: numel // 2].round()
    return x


def both(native, reference, numel: int, with_residual: bool, *arguments):
    """Results and what was lost, of the C kernel and of the reference."""
    x, residual = vector(numel), vector(numel, 1) if with_residual else None
    results = []
    for kernel in (native, reference):
        lost = torch.full((numel,), torch.nan)
        found = kernel(x, residual, *arguments, lost)
        results.append((*found, lost))
        assert all(map(same_bits, kernel(x, residual, *arguments, None), found))
    assert same_bits(x, vector(numel)), "a kernel changed its input"
    return results


@pytest.mark.usefixtures("native")
@WITH_RESIDUAL
@pytest.mark.parametrize("numel", [*NUMELS, LARGE])
@pytest.mark.parametrize("bucket", [8, 264, 4096, 2**40])
def test_native_signs_equal_reference(numel, bucket, with_residual):
    encode = native_signs.encode_signs, reference_signs.encode_signs
    if numel == LARGE and bucket == 8:
        return
    c, torch_ops = both(*encode, numel, with_residual, min(bucket, max(1, numel)))
    assert all(map(same_bits, c, torch_ops))


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("numel", [*NUMELS, LARGE])
@pytest.mark.parametrize("n", [1, 3, 4])
def test_native_means_of_signs_equal_reference(numel, n):
    payloads = [reference_signs.encode_signs(vector(numel, r), None, 512, None) for r in range(n)]
    scale, packed = zip(*payloads)
    c = native_signs.mean_signs(packed, scale, numel, 512, None)
    assert same_bits(c, reference_signs.mean_signs(packed, scale, numel, 512, None))


def test_signs_of_a_case_by_hand():
    lost = torch.empty(4)
    x, residual = torch.tensor([2.0, -1.5, 0.0, -2.0]), torch.tensor([1.0, 0.5, 0.0, 0.0])
    scale, packed = kernels.encode_signs(x, residual, 4, lost)
    assert (scale.tolist(), packed.tolist()) == ([1.5], [0b1010])
    assert lost.tolist() == [1.5, 0.5, -1.5, -0.5]
    mean = kernels.mean_signs([packed, packed.new_tensor([0])], [scale, 2 * scale], 4, 4)
    assert mean.tolist() == [2.25, 0.75, 2.25, 0.75]


@pytest.mark.usefixtures("native")
@WITH_RESIDUAL
@pytest.mark.parametrize("numel", NUMELS)
@pytest.mark.parametrize("bucket", [8, 512, 1000, 2**14])
@pytest.mark.parametrize(("num_levels", "width"), [(1, 2), (3, 3), (7, 4), (20, 6), (127, 8)])
def test_native_levels_equal_reference(numel, bucket, num_levels, width, with_residual):
    encode = native_levels.encode_levels, reference_levels.encode_levels
    arguments = num_levels, bucket, width, 2**63 + 5, STREAM
    c, torch_ops = both(*encode, numel, with_residual, *arguments)
    assert all(map(same_bits, c, torch_ops))
    scale, packed, _ = c
    decoded = [
        module.decode_levels(packed, scale, num_levels, bucket, width, numel, None)
        for module in (native_levels, reference_levels)
    ]
    assert same_bits(decoded[0][0], decoded[1][0])
    assert decoded[0][1] == decoded[1][1]


@pytest.mark.usefixtures("native")
@WITH_RESIDUAL
@pytest.mark.parametrize("bucket", [8, 512, 2**14])
def test_native_levels_of_tiny_buckets_equal_reference(bucket, with_residual):
    # Maxima from below the smallest normal number to well above 2^-100, and buckets of zeros.
    exponents = torch.linspace(-145, -60, 2000).repeat_interleave(8)
    x = vector(16_000) * torch.exp2(exponents.double()).float()
    x[:1024] = 0
    residual = x.flip(0) / 4 if with_residual else None
    arguments = 7, bucket, 4, 2**63 + 5, STREAM
    found = []
    for module in (native_levels, reference_levels):
        lost = torch.empty_like(x)
        scale, packed = module.encode_levels(x, residual, *arguments, lost)
        heard, _ = module.decode_levels(packed, scale, 7, bucket, 4, x.numel(), None)
        found.append((scale, packed, lost, heard))
    assert all(map(same_bits, *found))
    total = x if residual is None else x + residual
    assert torch.equal(found[0][0], total.reshape(-1, 8).abs().amax(1)) or bucket != 8


@pytest.mark.usefixtures("native")
@WITH_RESIDUAL
@pytest.mark.parametrize("numel", [*NUMELS, LARGE])
@pytest.mark.parametrize("density", [0.0, 0.001, 0.01, 0.3, 0.6, 1.0])
def test_native_selection_equals_reference(numel, density, with_residual):
    select = native_selection.select_largest, reference_selection.select_largest
    c, torch_ops = both(*select, numel, with_residual, round(density * numel))
    assert all(map(same_bits, c, torch_ops))


@pytest.mark.usefixtures("native")
@WITH_RESIDUAL
@pytest.mark.parametrize("numel", [*NUMELS, LARGE])
@pytest.mark.parametrize("threshold", [0.0, 1.0, 2.5, 1e9])
def test_native_threshold_equals_reference(numel, threshold, with_residual):
    select = native_selection.select_above, reference_selection.select_above
    c, torch_ops = both(*select, numel, with_residual, threshold, 10)
    assert all(map(same_bits, c, torch_ops))


def misleading(name: str, numel: int) -> Tensor:
    """A vector of which the sample of `guess` in selection.c tells too little or too much."""
    num_runs = min(1 << 16, numel // 48 // 8 * 8) // 8  # that are sampled, of eight elements each
    places, x = torch.arange(numel), vector(numel)
    sampled = places % (numel // num_runs) < 8
    match name:
        case "equal":
            return torch.ones(numel)
        case "few levels":
            return (places % 3 - 1).float()
        case "sorted":
            return x.abs().sort().values
        case "falling":
            return x.abs().sort(descending=True).values
        case "sparse":
            return torch.where((places >= 1000) & (places < 1100), 1.0, 0.0)
        case "one block":  # as many as are wanted lie in a row, and almost none are sampled
            return torch.where((places >= numel // 3) & (places < numel // 3 + numel // 50), 9.0, x)
        case "not finite":
            return torch.where(places % 5000 == 4999, torch.nan, x)
        case "hidden from the sample":
            return x * torch.where(sampled, 0.001, 1000.0)
    assert name == "shown to it"
    return x * torch.where(sampled, 1000.0, 0.001)


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("numel", [1 << 18, (1 << 18) - 1, (1 << 18) + 1, 1_000_003, LARGE])
@pytest.mark.parametrize(
    "name",
    [
        "equal",
        "few levels",
        "sorted",
        "falling",
        "sparse",
        "one block",
        "not finite",
        "hidden from the sample",
        "shown to it",
    ],
)
def test_selection_is_exact_where_a_sample_misleads(name, numel):
    x = misleading(name, numel)
    residual = vector(numel, 1).flip(0)
    for k in (1, numel // 1000, numel // 100, numel // 2 - 1, numel // 2):
        for added in (None, residual) if k == numel // 100 else (None,):
            lost, expected_lost = torch.empty(numel), torch.empty(numel)
            found = kernels.select_largest(x, added, k, lost)
            expected = reference_selection.select_largest(x, added, k, expected_lost)
            assert all(map(torch.equal, found[:1], expected[:1]))
            assert all(map(same_bits, (*found[1:], lost), (*expected[1:], expected_lost)))


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("shift", [1, 2, 3])
def test_results_may_begin_anywhere_in_a_vector(shift):
    """Stores past the caches need aligned addresses; the shards of a vector have none."""
    x, residual = vector(LARGE), vector(LARGE, 1)

    def selected(out: Tensor) -> None:
        kernels.select_largest(x, residual, LARGE // 100, out)

    def signs(out: Tensor) -> None:
        kernels.encode_signs(x, residual, 512, out)

    def levels(out: Tensor) -> None:
        kernels.encode_levels(x, residual, 7, 512, 4, 5, STREAM, out)

    def decoded(out: Tensor) -> None:
        scale, packed = kernels.encode_levels(x, None, 7, 512, 4, 5, STREAM)
        kernels.decode_levels(packed, scale, 7, 512, 4, LARGE, out)

    def mean(out: Tensor) -> None:
        scale, packed = kernels.encode_signs(x, None, 512)
        kernels.mean_signs([packed], [scale], LARGE, 512, out)

    for operation in (selected, signs, levels, decoded, mean):
        whole, expected = torch.full((LARGE + 8,), 7.0), torch.empty(LARGE)
        operation(whole[shift : shift + LARGE])
        operation(expected)
        assert same_bits(whole[shift : shift + LARGE], expected), operation
        assert bool((whole[:shift] == 7).all() and (whole[shift + LARGE :] == 7).all()), operation


def test_of_equal_magnitudes_the_first_are_selected():
    lost = torch.empty(6)
    x = torch.tensor([1.0, -2.0, 2.0, -1.0, 2.0, 0.0])
    indices, values = kernels.select_largest(x, None, 2, lost)
    assert (indices.tolist(), values.tolist()) == ([1, 2], [-2.0, 2.0])
    assert lost.tolist() == [1.0, 0.0, 0.0, -1.0, 2.0, 0.0]


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("numel", NUMELS)
@pytest.mark.parametrize("density", [0.0, 0.01, 0.3, 1.0])
def test_native_strata_equal_reference(numel, density):
    k, x = round(density * numel), vector(numel)
    positions = native_strata.strata_positions(numel, k, 7, STREAM, CPU)
    assert same_bits(positions, reference_strata.strata_positions(numel, k, 7, STREAM, CPU))
    for scaled in (False, True):
        values = native_strata.strata_values(x, k, 7, STREAM, scaled)
        assert same_bits(values, reference_strata.strata_values(x, k, 7, STREAM, scaled))


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("numel", [*NUMELS, 6_000_000])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_native_halves_equal_reference(numel, dtype):
    largest = torch.finfo(torch.float32).max
    exponents = torch.rand(numel, generator=torch.Generator().manual_seed(2)) * 76 - 38
    x = (vector(numel) * 10**exponents).clamp(-largest, largest)
    a, b = torch.empty(numel, dtype=dtype), torch.empty(numel, dtype=dtype)
    assert native_halves.narrow(x, a)
    assert reference_halves.narrow(x, b)
    assert same_bits(a, b)
    assert torch.isfinite(a).all()


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("numel", NUMELS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_halves_of_a_sum_leave_what_is_lost(numel, dtype):
    x, residual = vector(numel) * 3e4, vector(numel, 1) * 3e4
    total, expected = x + residual, torch.empty(numel, dtype=dtype)
    reference_halves.narrow(total, expected)
    for halves in (native_halves, reference_halves):
        out, lost = torch.empty(numel, dtype=dtype), torch.empty(numel)
        assert halves.narrow_sum(x, residual, out, lost)
        assert same_bits(out, expected)
        assert same_bits(lost, total - expected.float())


@NON_FINITE
@pytest.mark.parametrize("numel", [1, 100, 5000])
def test_what_is_not_finite_shows(numel, bad):
    x = vector(numel)
    x[numel // 2] = bad
    half = torch.empty(numel, dtype=torch.float16)
    assert not kernels.encode_signs(x, None, 512)[0].isfinite().all()
    assert not kernels.encode_levels(x, None, 7, 512, 4, 0, STREAM)[0].isfinite().all()
    assert not kernels.select_largest(x, None, 1)[1].isfinite().all()
    assert not kernels.select_above(x, None, 1.0)[1].isfinite().all()
    assert not kernels.narrow(x, half)
    assert not kernels.narrow_sum(x, torch.zeros(numel), half, torch.empty(numel))


def test_a_result_over_an_input_is_refused():
    x, residual = vector(100), vector(100, 1)
    with pytest.raises(ValueError, match="over an input"):
        kernels.encode_signs(x, residual, 100, out=residual)
    with pytest.raises(ValueError, match=r"float32 \[100\]"):
        kernels.encode_signs(x, residual, 100, out=torch.empty(99))
    with pytest.raises(ValueError, match="on cpu to meta"):
        kernels.encode_signs(x, residual, 100, out=torch.empty(100, device="meta"))


@pytest.mark.parametrize("bucket", [8, 64, 2**40])
def test_rows_are_encoded_like_vectors_and_into_given_memory(bucket):
    x, residual = vector(300).reshape(3, 100), vector(300, 1).reshape(3, 100)
    bucket, lost = min(bucket, 104), torch.empty(3, 100)
    scale, packed = kernels.encode_signs_rows(x, residual, bucket, lost)
    for row in range(3):
        own, into = torch.empty(100), (torch.empty_like(scale[row]), torch.empty_like(packed[row]))
        kernels.encode_signs(x[row], residual[row], bucket, own, into)
        assert all(map(same_bits, (*into, own), (scale[row], packed[row], lost[row])))
    scale, packed = kernels.encode_levels_rows(x, residual, 7, bucket, 4, 5, STREAM, lost)
    for row in range(3):
        own, into = torch.empty(100), (torch.empty_like(scale[row]), torch.empty_like(packed[row]))
        stream = (*STREAM[:2], STREAM[2] + row)
        kernels.encode_levels(x[row], residual[row], 7, bucket, 4, 5, stream, own, into)
        assert all(map(same_bits, (*into, own), (scale[row], packed[row], lost[row])))
    with pytest.raises(ValueError, match="equal shape"):
        kernels.encode_signs_rows(x, residual[:2], bucket)


def test_memory_is_used_again_once_nobody_holds_it():
    numel = 6_000_000
    _pool._free.clear()
    x = kernels.empty(numel)
    address, view = x.data_ptr(), x[5:10]
    view.fill_(1.0)
    del x
    gc.collect()
    other = kernels.empty(numel)
    assert other.data_ptr() != address, "a view still holds the memory"
    other.zero_()
    assert view.tolist() == [1.0] * 5
    del view
    gc.collect()
    assert kernels.empty(numel).data_ptr() == address
    kept = [kernels.empty(numel) for _ in range(3 * _pool._KEPT)]
    del kept, other
    gc.collect()
    assert len(_pool._free) <= _pool._KEPT
    _pool._free.clear()
