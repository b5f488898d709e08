"""The Walsh-Hadamard transform: the matrix by hand, native against reference, its own inverse."""

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gradwire import kernels
from gradwire.core.key import Key
from gradwire.kernels.native import hadamard as native_hadamard
from gradwire.kernels.reference import hadamard as reference_hadamard

DTYPES = (torch.float32, torch.float64)


def matrix(n: int) -> torch.Tensor:
    """H_2n = [[H, H], [H, -H]], normalised."""
    h = torch.ones(1, 1, dtype=torch.float64)
    while len(h) < n:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    return h / math.sqrt(n)


def bits(key: Key, count: int) -> torch.Tensor:
    return kernels.pack_signs(key.normal(count))


@pytest.mark.parametrize("n", [1, 2, 4, 8, 16, 128, 512])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_is_the_matrix(n, dtype) -> None:
    x = Key(1).normal(3 * n).reshape(3, n).to(dtype)
    expected = x.double() @ matrix(n)
    found = kernels.hadamard(x)
    assert found.dtype == dtype
    assert torch.allclose(found.double(), expected, rtol=0, atol=50 * torch.finfo(dtype).eps)


def test_a_case_by_hand() -> None:
    x = torch.tensor([[1.0, 2.0, 3.0, 4.0], [1.0, 0.0, 0.0, 0.0]])
    expected = torch.tensor([[5.0, -1.0, -2.0, 0.0], [0.5, 0.5, 0.5, 0.5]])
    assert torch.equal(kernels.hadamard(x), expected)


@pytest.mark.parametrize("n", [1, 2, 8, 4096, 2**15])
def test_it_is_its_own_inverse_and_keeps_the_norm(n) -> None:
    x = Key(2).normal(2 * n).reshape(2, n)
    y = kernels.hadamard(x)
    assert torch.allclose(y.norm(dim=1), x.norm(dim=1), rtol=1e-5)
    assert torch.allclose(kernels.hadamard(y), x, rtol=0, atol=1e-5)


@pytest.mark.parametrize("n", [1, 4, 16, 64])
def test_flips_before_and_after_are_diagonal_matrices(n) -> None:
    x = Key(3).normal(5 * n).reshape(5, n)
    flips = bits(Key(4), 5 * n)
    signs = kernels.unpack_signs(flips, 5 * n).reshape(5, n)
    assert torch.equal(kernels.hadamard(x, before=flips), kernels.hadamard(x * signs))
    assert torch.equal(kernels.hadamard(x, after=flips), kernels.hadamard(x) * signs)
    there = kernels.hadamard(x, before=flips)
    assert torch.allclose(kernels.hadamard(there, after=flips), x, rtol=0, atol=1e-5)


@pytest.mark.usefixtures("native")
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    log=st.integers(0, 14),
    rows=st.integers(0, 5),
    dtype=st.sampled_from(DTYPES),
    flip=st.tuples(st.booleans(), st.booleans()),
    seed=st.integers(0, 2**32),
)
def test_native_equals_reference_to_the_bit(log, rows, dtype, flip, seed) -> None:
    n = 2**log
    x = Key(seed).normal(rows * n).reshape(rows, n).to(dtype) / 3
    before, after = (bits(Key(seed).child(i), rows * n) if flip[i] else None for i in (0, 1))
    ours = native_hadamard.hadamard(x, before, after)
    reference = reference_hadamard.hadamard(x, before, after)
    integers = torch.int32 if dtype == torch.float32 else torch.int64
    assert torch.equal(ours.view(integers), reference.view(integers))


@pytest.mark.usefixtures("native")
def test_native_takes_any_layout() -> None:
    x = Key(5).normal(64 * 32).reshape(64, 32)
    assert torch.equal(
        native_hadamard.hadamard(x.t(), None, None), kernels.hadamard(x.t().contiguous())
    )


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(2, 3), r"2\^k elements, got a tensor of \[2, 3\]"),
        (torch.zeros(4), r"got a tensor of \[4\]"),
        (torch.zeros(2, 0), "got a tensor"),
        (torch.zeros(2, 4, dtype=torch.float16), "float32 or float64, got torch.float16"),
    ],
)
def test_other_inputs_are_refused(x, message) -> None:
    with pytest.raises(ValueError, match=message):
        kernels.hadamard(x)


def test_flips_of_another_length_are_refused() -> None:
    with pytest.raises(ValueError, match="expects 1 bytes for 8 bits, got 2"):
        kernels.hadamard(torch.zeros(2, 4), before=torch.zeros(2, dtype=torch.uint8))


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(log=st.integers(0, 14), rows=st.integers(0, 4), seed=st.integers(0, 2**32))
@pytest.mark.usefixtures("native")
def test_native_signs_of_rotated_rows_equal_the_reference(log, rows, seed) -> None:
    n = 2**log
    x = Key(seed).normal(rows * n).reshape(rows, n)
    flips = bits(Key(seed).child("flips"), rows * n)
    packed, *norms = native_hadamard.rotated_signs(x, flips)
    expected, *expected_norms = reference_hadamard.rotated_signs(x, flips)
    assert torch.equal(packed, expected)
    assert all(map(torch.equal, norms, expected_norms))
    scale = Key(seed).child("scale").uniform(rows)
    ours = native_hadamard.unrotated_signs(packed, scale, n, flips)
    assert torch.equal(ours, reference_hadamard.unrotated_signs(packed, scale, n, flips))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_signs_and_norms_of_a_rotated_row(dtype) -> None:
    x = Key(6).normal(3 * 16).reshape(3, 16).to(dtype)
    flips = bits(Key(7), 48)
    y = kernels.hadamard(x, before=flips)
    packed, total, squares = kernels.rotated_signs(x, flips)
    assert torch.equal(kernels.unpack_uints(packed, 1, 48).reshape(3, 16) == 1, y >= 0)
    assert torch.allclose(total, y.double().abs().sum(dim=1))
    assert torch.allclose(squares, y.double().square().sum(dim=1))
    back = kernels.unrotated_signs(packed, torch.ones(3, dtype=dtype), 16, flips)
    assert torch.equal(
        back, kernels.hadamard(torch.where(y >= 0, 1.0, -1.0).to(dtype), after=flips)
    )


def test_norms_of_rows_of_any_length() -> None:
    total, squares = kernels.row_norms(torch.tensor([[1.0, -2.0, 3.0], [0.0, 0.0, -1.0]]))
    assert total.tolist() == [6.0, 1.0]
    assert squares.tolist() == [14.0, 1.0]


def test_the_result_may_replace_the_input() -> None:
    x = Key(8).normal(2 * 64).reshape(2, 64)
    expected = kernels.hadamard(x)
    assert kernels.hadamard(x, out=x) is x
    assert torch.equal(x, expected)
    with pytest.raises(ValueError, match="out must be contiguous"):
        kernels.hadamard(x, out=torch.zeros(64, 2))
