"""Horvath et al. 2019: dithering to levels 1, 1/2, 1/4, ... of a bucket's norm."""

import math

import pytest
import torch
from torch import Tensor

from gradwire.compression.quantization.natural_dithering import NaturalDithering
from gradwire.core.errors import WireError
from gradwire.core.key import Key
from gradwire.core.spec import Spec

KEY = Key(0)


def decoded(codec: NaturalDithering, x: Tensor, key: Key = KEY) -> Tensor:
    payload, _ = codec.encode(x, None, key)
    return codec.decode(payload, Spec.of(x), key)


def test_a_case_by_hand() -> None:
    # Levels 8, 4, 2 and 0: 3 lies between 2 and 4, -7 between -8 and -4, 0.5 between 0 and 2.
    x, num_steps = torch.tensor([8.0, 3.0, -7.0, 0.5, -4.0, 0.0]), 600
    codec = NaturalDithering(3)
    found = torch.stack([decoded(codec, x, Key(1).at(step)) for step in range(num_steps)])
    expected = ({8.0}, {2.0, 4.0}, {-8.0, -4.0}, {0.0, 2.0}, {-4.0}, {0.0})
    assert [set(column.tolist()) for column in found.T] == list(expected)
    variance = torch.tensor([0, 1 * 1, 1 * 3, 0.5 * 1.5, 0, 0])
    assert ((found.mean(dim=0) - x).abs() <= 6 * (variance / num_steps).sqrt()).all()


def test_the_euclidean_norm() -> None:
    codec = NaturalDithering(2, norm="l2")
    payload, _ = codec.encode(torch.tensor([3.0, -4.0]), None, KEY)
    assert payload.parts["scale"].tolist() == [5.0]
    assert set(decoded(codec, torch.tensor([3.0, -4.0])).abs().tolist()) <= {2.5, 5.0}


@pytest.mark.parametrize("norm", ["max", "l2"])
@pytest.mark.parametrize("levels", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("bucket", [1, 16, 512])
def test_the_guarantee_is_no_weaker_than_the_papers(norm, levels, bucket) -> None:
    codec = NaturalDithering(levels, bucket, norm)
    step = math.sqrt(bucket) * 2.0 ** (1 - levels)
    paper = 1 / 8 + step * min(1, step)
    assert codec.guarantee(Spec((1000,), torch.float32)).omega <= paper


@pytest.mark.parametrize("norm", ["max", "l2"])
@pytest.mark.parametrize("levels", [1, 2, 4, 8])
def test_the_variance_stays_below_the_guarantee(norm, levels) -> None:
    codec = NaturalDithering(levels, 64, norm)
    for x in (Key(2).normal(6400), torch.full((6400,), 0.3), Key(2).normal(6400) ** 5):
        error = float((decoded(codec, x) - x).square().sum() / x.square().sum())
        omega = codec.guarantee(Spec.of(x)).omega
        # A hundred buckets average out most of the randomness; one of them could exceed it.
        assert error <= 1.5 * omega


def test_with_many_levels_only_the_eighth_of_rounding_remains() -> None:
    codec, x = NaturalDithering(20), Key(3).normal(50_000)
    assert codec.guarantee(Spec.of(x)).omega == pytest.approx(1 / 8, rel=1e-4)
    error = float((decoded(codec, x) - x).square().sum() / x.square().sum())
    assert 0.05 < error < 1 / 8


@pytest.mark.parametrize(("levels", "bits"), [(1, 1.6), (3, 3), (7, 4), (15, 5), (127, 8)])
@pytest.mark.parametrize("numel", [0, 1, 513, 100_001])
def test_the_wire_carries_the_levels_and_a_norm_per_bucket(levels, bits, numel) -> None:
    payload, _ = NaturalDithering(levels).encode(torch.ones(numel), None, KEY)
    assert payload.nbytes <= math.ceil(bits * numel / 8) + 4 * -(-numel // 512) + 24


def test_half_precision_never_decodes_to_infinity() -> None:
    x = torch.full((512,), 60_000.0, dtype=torch.float16)
    for step in range(20):
        assert torch.isfinite(decoded(NaturalDithering(1, norm="l2"), x, Key(3).at(step))).all()


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), -1.0])
def test_a_norm_that_is_none_is_refused(scale) -> None:
    codec = NaturalDithering(3)
    payload, _ = codec.encode(torch.ones(9), None, KEY)
    with pytest.raises(WireError, match="scale"):
        codec.decode(payload.replace(scale=torch.tensor([scale])), Spec((9,), torch.float32), KEY)


@pytest.mark.parametrize(
    "make",
    [
        lambda: NaturalDithering(0),
        lambda: NaturalDithering(128),
        lambda: NaturalDithering(3, bucket=0),
        lambda: NaturalDithering(3, norm="l1"),
    ],
)
def test_parameters_out_of_range_are_refused(make) -> None:
    with pytest.raises(ValueError, match="natural_dithering"):
        make()
