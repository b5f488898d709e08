"""Vargaftik et al. 2021: signs of a rotated vector. And the rotation itself."""

import math

import pytest
import torch

from gradwire.compression.quantization._rotation import rotate, row_length, unrotate
from gradwire.compression.quantization.drive import Drive
from gradwire.core.codec import Codec
from gradwire.core.errors import WireError
from gradwire.core.key import Key
from gradwire.core.spec import Spec


def decoded(codec: Drive, x: torch.Tensor, key: Key = Key(0)) -> torch.Tensor:  # noqa: B008
    payload, _ = codec.encode(x, None, key)
    return codec.decode(payload, Spec.of(x), key)


def relative_error(found: torch.Tensor, x: torch.Tensor) -> float:
    return float((found - x).square().sum() / x.square().sum())


@pytest.mark.parametrize("numel", [0, 1, 2, 3, 7, 8, 9, 63, 64, 65, 100, 127, 128, 200, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_rotation_is_orthonormal_and_adds_no_coordinate(numel, dtype) -> None:
    identity = torch.eye(numel, dtype=dtype)
    matrix = torch.stack([rotate(e, Key(1), 64) for e in identity]) if numel else identity
    eps = 100 * torch.finfo(dtype).eps
    assert matrix.shape == (numel, numel)
    assert torch.allclose(matrix @ matrix.T, identity, rtol=0, atol=eps)
    x = Key(2).normal(numel).to(dtype)
    assert torch.allclose(unrotate(rotate(x, Key(1), 64), Key(1), 64), x, rtol=0, atol=eps)


def test_rows_are_blocks_or_what_fits_into_a_shorter_vector() -> None:
    assert [row_length(numel, 64) for numel in (0, 1, 3, 4, 63, 64, 65, 10**6)] == [
        *(1, 1, 2, 4),
        *(32, 64, 64, 64),
    ]


def test_every_rank_rotates_alike_and_every_step_anew() -> None:
    x = Key(3).normal(100)
    first = rotate(x, Key(1).private(0), 64)
    assert torch.equal(first, rotate(x, Key(1).private(5), 64))
    assert not torch.equal(first, rotate(x, Key(1).at(1).private(0), 64))


@pytest.mark.parametrize("numel", [64, 100])
def test_a_rotation_spreads_every_element(numel) -> None:
    # The worst case of sign: one element holds all the mass. Rotated, all coordinates share it.
    for position in (0, numel // 2, numel - 1):
        x = torch.zeros(numel)
        x[position] = 1.0
        assert float(rotate(x, Key(4), 64).abs().max()) <= 0.4


def test_a_one_hot_vector_is_met_exactly() -> None:
    x = torch.zeros(64)
    x[5] = -3.0
    for unbiased in (True, False):
        assert torch.allclose(decoded(Drive(unbiased, block=64), x), x, atol=1e-6)


def test_scales_are_those_of_the_paper() -> None:
    x, key = Key(5).normal(256 + 128), Key(6)
    y = rotate(x, key, 128).reshape(3, 128).double()
    for unbiased, expected in (
        (True, y.square().sum(1) / y.abs().sum(1)),
        (False, y.abs().mean(1)),
    ):
        payload, _ = Drive(unbiased, block=128).encode(x, None, key)
        assert torch.allclose(payload.parts["scale"].double(), expected, rtol=1e-5)


@pytest.mark.parametrize("scale", [1.0, 1e-20, 1e20])
def test_the_error_is_that_of_a_gaussian(scale) -> None:
    x = (Key(7).normal(3 * 4096 + 1000) * scale).double()
    heavy = x * x.abs() ** 2  # what x is makes no difference
    for y in (x, heavy):
        assert relative_error(decoded(Drive(), y), y) == pytest.approx(math.pi / 2 - 1, rel=0.05)
        biased = relative_error(decoded(Drive(unbiased=False), y), y)
        assert biased == pytest.approx(1 - 2 / math.pi, rel=0.05)


def test_the_unbiased_scale_keeps_the_projection_in_every_draw() -> None:
    x = Key(8).normal(777)
    found = decoded(Drive(block=64), x)
    assert float(found @ x) == pytest.approx(float(x @ x), rel=1e-5)


@pytest.mark.parametrize("numel", [0, 3, 8, 100, 128, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_the_short_way_to_bytes_is_the_long_one(numel, dtype) -> None:
    x, key, codec = Key(13).normal(numel).to(dtype), Key(14), Drive(block=64)
    payload, _ = codec.encode(x, None, key)
    plain, _ = Codec.encode(codec, x, None, key)
    assert torch.equal(payload.buffer, plain.buffer)
    assert torch.equal(
        codec.decode(payload, Spec.of(x), key), Codec.decode(codec, payload, Spec.of(x), key)
    )


def test_the_mean_over_rotations_tends_to_the_input() -> None:
    x, num_keys = Key(9).normal(1024).double(), 400
    found = torch.stack([decoded(Drive(), x, Key(10).at(i)) for i in range(num_keys)])
    bias = relative_error(found.mean(dim=0), x)
    assert bias <= 1.3 * (math.pi / 2 - 1) / num_keys  # independent errors would give 1.0
    short = torch.tensor([1.0, 0.5])  # but a block of two has few rotations, all alike here
    assert torch.allclose(decoded(Drive(), short), torch.tensor([1.25, 0.0]), atol=1e-6)


def test_it_contracts_by_half_on_the_worst_input() -> None:
    # Two equal elements attain Szarek's constant: a coordinate is zero half of the time.
    x = torch.zeros(64)
    x[3], x[17] = 1.0, -1.0
    codec = Drive(unbiased=False, block=64)
    assert codec.guarantee(Spec.of(x)).delta == 0.5
    errors = [relative_error(decoded(codec, x, Key(11).at(i)), x) for i in range(50)]
    assert sum(errors) / 50 == pytest.approx(0.5, abs=0.01)
    assert Drive().guarantee(Spec.of(x)).delta is None


@pytest.mark.parametrize("numel", [0, 1, 100, 4096, 4097, 50_000])
def test_the_wire_carries_one_bit_and_a_scale_per_block(numel) -> None:
    payload, _ = Drive().encode(Key(12).normal(numel), None, Key(0))
    m = row_length(numel, 4096)
    size = -(-numel // 8) + 4 * -(-numel // m)
    assert size <= payload.nbytes <= size + 24
    if numel == 50_000:
        assert 8 * payload.nbytes / numel <= 1.02


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_the_largest_elements_never_decode_to_infinity(dtype) -> None:
    x = torch.full((300,), torch.finfo(dtype).max, dtype=dtype)
    for codec in (Drive(), Drive(unbiased=False)):
        assert torch.isfinite(decoded(codec, x)).all()
        payload, _ = codec.encode(x, None, Key(0))
        scale = payload.parts["scale"]
        crafted = payload.replace(scale=torch.full_like(scale, torch.finfo(scale.dtype).max))
        assert torch.isfinite(codec.decode(crafted, Spec.of(x), Key(0))).all()


def test_a_scale_that_is_none_is_refused() -> None:
    payload, _ = Drive().encode(torch.ones(8), None, Key(0))
    for scale in ([float("nan")], [-1.0], [1.0, 1.0]):
        with pytest.raises(WireError, match="scale"):
            Drive().decode(
                payload.replace(scale=torch.tensor(scale)), Spec((8,), torch.float32), Key(0)
            )


@pytest.mark.parametrize("block", [0, 4, 100, 2**17])
def test_blocks_that_are_no_power_of_two_are_refused(block) -> None:
    with pytest.raises(ValueError, match=r"drive: block .* power of two"):
        Drive(block=block)
