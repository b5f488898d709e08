"""Means of 16-bit floats: native equals the reference in every bit, arguments are checked."""

import pytest
import torch

from gradwire import kernels
from gradwire.kernels.native import halves as native
from gradwire.kernels.reference import halves as reference

DTYPES = [torch.float16, torch.bfloat16]


def some(numel: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    draws = torch.Generator().manual_seed(seed)
    scale = 10.0 ** torch.randint(-8, 4, (numel,), generator=draws)
    return (torch.randn(numel, generator=draws) * scale).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 2, 3, 7])
@pytest.mark.parametrize("numel", [1, 7, 512, 513, 200_001])
def test_native_equals_reference(dtype, count, numel):
    pieces = [some(numel, dtype, seed) for seed in range(count)]
    out = torch.empty(numel, dtype=dtype)
    wanted = reference.mean_halves(pieces, count, out.clone())
    assert torch.equal(native.mean_halves(pieces, count, out), wanted)


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_values_do_not_overflow_and_infinity_stays(dtype):
    largest = torch.finfo(dtype).max / (1 if dtype == torch.float16 else 2)
    pieces = [torch.tensor([largest, torch.inf, torch.nan], dtype=dtype)] * 2
    mean = kernels.mean_halves(pieces, 2, torch.empty(3, dtype=dtype))
    assert mean[0] == pieces[0][0]
    assert mean[1] == torch.inf
    assert mean[2].isnan()


def test_arguments_are_checked():
    half = torch.zeros(3, dtype=torch.float16)
    with pytest.raises(ValueError, match="of one kind"):
        kernels.mean_halves([half, half[:2]], 2, half.clone())
    with pytest.raises(ValueError, match="of one kind"):
        kernels.mean_halves([half.float()], 1, half.float())
    with pytest.raises(ValueError, match="at least one"):
        kernels.mean_halves([], 1, half)
