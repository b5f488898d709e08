"""Sums over a vector: C gives the bits of the torch reference, and the reference what it says."""

import math

import pytest
import torch

from gradwire import kernels
from gradwire.kernels.native import moments as native
from gradwire.kernels.reference import moments as reference

COUNTS = pytest.mark.parametrize("count", [1, 2, 511, 512, 513, 1025, 70_007, 300_001])


@pytest.fixture(params=[1, 2])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def data(count: int, seed: int = 0) -> torch.Tensor:
    x = torch.randn(count, generator=torch.Generator().manual_seed(seed))
    x[::7] *= 1e-3
    x[::11] = 0.0
    x[5::13] = -0.5  # ties
    x[3::1001] = 3e38
    x[4::1001] = -1e-42
    return x


@COUNTS
def test_moments_are_those_of_the_reference(native_or_skip, threads, count) -> None:
    x = data(count)
    assert native.moments(x) == reference.moments(x)


@COUNTS
@pytest.mark.parametrize("threshold", [1e-45, 1e-3, 0.5, 2.0, 3e38, math.inf])
def test_tails_are_those_of_the_reference(native_or_skip, threads, count, threshold) -> None:
    x = data(count)
    assert native.tails(x, threshold) == reference.tails(x, threshold)


@pytest.fixture
def native_or_skip(native) -> None:
    """The fixture `native` of this folder, under another name than the module."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_by_hand(dtype) -> None:
    x = torch.tensor([1.0, -2.0, 0.0, 0.5, -0.5, 3.0], dtype=dtype)
    assert kernels.moments(x) == (2.0, 14.5)
    assert kernels.tails(x, 1.0) == (2, 1, 6.0, 1.0)
    assert kernels.tails(x, 0.0) == (3, 2, 7.0, 0.0)  # zero itself lies inside
    assert kernels.tails(x, 1e300) == (0, 0, 0.0, 7.0)
    assert kernels.tails(x[:0], 1.0) == (0, 0, 0.0, 0.0)
    assert kernels.moments(x[:0]) == (0.0, 0.0)


def test_what_is_not_finite_shows() -> None:
    for bad in (math.nan, math.inf):
        assert not math.isfinite(kernels.moments(torch.tensor([1.0, bad]))[1])


@pytest.mark.parametrize("threshold", [-1.0, math.nan])
def test_no_threshold_is_refused(threshold) -> None:
    with pytest.raises(ValueError, match="tails takes a threshold"):
        kernels.tails(torch.ones(3), threshold)
