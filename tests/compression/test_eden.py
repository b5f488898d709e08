"""Vargaftik et al. 2022: a rotated vector rounded to the centroids of a Gaussian."""

import math
from itertools import pairwise

import pytest
import torch

from gradwire.compression.quantization.drive import Drive
from gradwire.compression.quantization.eden import Eden
from gradwire.core.key import Key
from gradwire.core.spec import Spec

# Distortion of the Lloyd-Max quantiser of a standard normal (Max 1960, table 1).
DISTORTION = {1: 0.3634, 2: 0.1175, 3: 0.03454, 4: 0.009497}
# beta and gamma with distance^2 <= alpha + beta u^2 + gamma u^4.
CERTIFICATE = {2: (0.0573, 0.02036), 3: (0.0076, 0.01293), 4: (-0.0087, 0.00864)}


def decoded(codec, x: torch.Tensor, key: Key = Key(0)) -> torch.Tensor:  # noqa: B008
    payload, _ = codec.encode(x, None, key)
    return codec.decode(payload, Spec.of(x), key)


def relative_error(found: torch.Tensor, x: torch.Tensor) -> float:
    return float((found - x).square().sum() / x.square().sum())


def density(t: float) -> float:
    return math.exp(-t * t / 2) / math.sqrt(2 * math.pi)


def below(t: float) -> float:
    return math.erfc(-t / math.sqrt(2)) / 2


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_each_centroid_is_the_mean_of_its_cell(bits) -> None:
    centroids = Eden(bits).centroids
    assert len(centroids) == 2**bits
    middles = [(a + b) / 2 for a, b in pairwise(centroids)]
    edges = [-math.inf, *middles, math.inf]
    for centroid, low, high in zip(centroids, edges, edges[1:]):
        mean = (density(low) - density(high)) / (below(high) - below(low))
        assert centroid == pytest.approx(mean, abs=1e-9)


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
@pytest.mark.parametrize("numel", [40_000, 4096])
def test_the_error_is_that_of_max(bits, numel) -> None:
    gaussian = Key(1).normal(numel).double()
    for x in (gaussian, gaussian**3):  # the rotation makes them alike
        least = relative_error(decoded(Eden(bits, unbiased=False), x), x)
        assert least == pytest.approx(DISTORTION[bits], rel=0.07)
        unbiased = relative_error(decoded(Eden(bits), x), x)
        assert unbiased == pytest.approx(DISTORTION[bits] / (1 - DISTORTION[bits]), rel=0.07)
        assert least < unbiased


@pytest.mark.parametrize("numel", [64, 100, 5000])
@pytest.mark.parametrize("unbiased", [True, False])
def test_one_bit_is_drive(numel, unbiased) -> None:
    x = Key(2).normal(numel)
    found = decoded(Eden(1, unbiased), x)
    assert torch.allclose(found, decoded(Drive(unbiased), x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bits", [2, 4])
def test_the_mean_over_rotations_tends_to_the_input(bits) -> None:
    x, num_keys = Key(3).normal(1024).double(), 200
    found = torch.stack([decoded(Eden(bits), x, Key(4).at(i)) for i in range(num_keys)])
    variance = DISTORTION[bits] / (1 - DISTORTION[bits])
    assert relative_error(found.mean(dim=0), x) <= 1.3 * variance / num_keys
    along = found @ x / (x @ x)  # holds in every draw, not only on average
    assert torch.allclose(along, torch.ones_like(along), atol=1e-5)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_the_contraction_follows_from_two_moments(bits) -> None:
    # With gamma > 0 the bound is beyond any cell's parabola for large u: a grid up to 100 will do.
    beta, gamma = CERTIFICATE[bits]
    u = torch.linspace(0, 100, 1_000_001, dtype=torch.float64)
    half = torch.tensor(Eden(bits).centroids[2 ** (bits - 1) :], dtype=torch.float64)
    distance = torch.stack([(u - c).square() for c in half]).amin(dim=0)
    alpha = float((distance - beta * u**2 - gamma * u**4).max())
    loss = alpha + beta + 3 * gamma
    delta = Eden(bits, unbiased=False).guarantee(Spec((9,), torch.float32)).delta
    assert loss + 1e-4 <= 1 - delta
    assert Eden(bits).guarantee(Spec((9,), torch.float32)).delta is None


@pytest.mark.few(2)
@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("numel", [64, 65, 96, 127])
def test_it_contracts_on_sparse_inputs(bits, numel) -> None:
    codec = Eden(bits, unbiased=False, block=64)
    delta = codec.guarantee(Spec((numel,), torch.float32)).delta
    for num_nonzero in (1, 2, 3):
        x = torch.zeros(numel)
        x[-1], x[: num_nonzero - 1] = 1.0, -1.0
        errors = [relative_error(decoded(codec, x, Key(5).at(i)), x) for i in range(60)]
        assert sum(errors) / len(errors) <= 1 - delta


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_the_wire_carries_the_bits_and_a_scale_per_block(bits) -> None:
    numel = 50_000
    payload, _ = Eden(bits).encode(Key(6).normal(numel), None, Key(0))
    assert payload.parts["values"].numel() == bits * numel // 8
    assert payload.parts["scale"].numel() == 13
    assert 8 * payload.nbytes / numel <= bits + 0.02


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_largest_elements_never_decode_to_infinity(dtype) -> None:
    x = torch.full((300,), torch.finfo(dtype).max, dtype=dtype)
    for unbiased in (True, False):
        assert torch.isfinite(decoded(Eden(4, unbiased), x)).all()


@pytest.mark.parametrize("bits", [0, 5, -1])
def test_other_bits_are_refused(bits) -> None:
    with pytest.raises(ValueError, match=r"eden: bits must lie in 1 \.\. 4, got"):
        Eden(bits)


def test_other_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match="eden: block"):
        Eden(2, block=1000)
