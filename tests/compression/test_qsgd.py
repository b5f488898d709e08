"""Alistarh et al. 2017: random rounding to multiples of norm / s."""

import math

import pytest
import torch

from gradwire.compression.quantization.qsgd import QSGD
from gradwire.core.errors import WireError
from gradwire.core.key import Key
from gradwire.core.spec import Spec


def decoded(codec: QSGD, x: torch.Tensor, key: Key = Key(0)) -> torch.Tensor:  # noqa: B008
    payload, _ = codec.encode(x, None, key)
    return codec.decode(payload, Spec.of(x), key)


def many(codec: QSGD, x: torch.Tensor, num_keys: int = 500) -> torch.Tensor:
    """[num_keys, d]"""
    return torch.stack([decoded(codec, x, Key(2).at(step)) for step in range(num_keys)])


def test_levels_are_met_exactly() -> None:
    # With s = 4 and the maximum 8 the levels are multiples of 2, so nothing is random here.
    x = torch.tensor([8.0, -6.0, 4.0, -2.0, 0.0])
    for step in range(20):
        assert torch.equal(decoded(QSGD(4), x, Key(1).at(step)), x)


def test_the_bytes_of_a_case_by_hand() -> None:
    payload, _ = QSGD(4).encode(torch.tensor([8.0, -6.0, 4.0, -2.0, 0.0]), None, Key(0))
    assert payload.parts["scale"].tolist() == [8.0]
    # Symbols 8 1 6 3 4 (level + s) at four bits each, lowest first.
    assert payload.parts["values"].tolist() == [0x18, 0x36, 0x04]


def test_an_element_between_two_levels_goes_to_one_of_them_with_the_right_probability() -> None:
    x = torch.tensor([8.0, 2.5, -5.5])  # 2.5 is a quarter of the way from 2 to 4
    found = many(QSGD(4), x, 2000)
    assert set(found[:, 1].tolist()) == {2.0, 4.0}
    assert set(found[:, 2].tolist()) == {-6.0, -4.0}
    up = float((found[:, 1] == 4.0).double().mean())
    assert abs(up - 0.25) < 6 * math.sqrt(0.25 * 0.75 / 2000)
    down = float((found[:, 2] == -6.0).double().mean())
    assert abs(down - 0.75) < 6 * math.sqrt(0.25 * 0.75 / 2000)


def test_bits_are_another_way_to_say_levels() -> None:
    x = Key(4).normal(100)
    assert QSGD(bits=4).num_levels == 7
    assert QSGD(bits=2).num_levels == 1
    assert QSGD(bits=16).num_levels == 2**15 - 1
    assert torch.equal(decoded(QSGD(bits=4), x), decoded(QSGD(7), x))


@pytest.mark.parametrize("norm", ["max", "l2"])
@pytest.mark.parametrize("levels", [1, 3, 7, 100])
def test_every_output_is_a_multiple_of_the_step_and_next_to_its_input(levels, norm) -> None:
    x = Key(5).normal(64).double()
    scale = x.abs().max() if norm == "max" else x.norm()
    step = scale / levels
    found = decoded(QSGD(levels, norm=norm), x) / step
    assert torch.allclose(found, found.round(), rtol=0, atol=1e-9)
    assert ((found - x / step).abs() < 1 + 1e-9).all()
    assert (found.abs() <= levels + 1e-9).all()


@pytest.mark.few
@pytest.mark.parametrize("norm", ["max", "l2"])
@pytest.mark.parametrize("levels", [1, 4])
def test_it_is_unbiased_and_its_variance_is_that_of_random_rounding(levels, norm) -> None:
    x = Key(6).normal(128).double()
    num_keys = 600
    found = many(QSGD(levels, norm=norm), x, num_keys)
    step = (x.abs().max() if norm == "max" else x.norm()) / levels
    fraction = (x / step) % 1
    variance = step**2 * fraction * (1 - fraction)  # [128]
    standard_error = (variance / num_keys).sqrt() + 1e-9 + step * 2.0**-16
    assert ((found.mean(dim=0) - x).abs() < 6 * standard_error).all()
    total = float((found - x).square().sum(dim=1).mean())
    assert total == pytest.approx(float(variance.sum()), rel=0.1)
    omega = QSGD(levels, norm=norm).guarantee(Spec.of(x)).omega
    assert float(variance.sum()) <= omega * float(x.square().sum())


@pytest.mark.parametrize(
    ("codec", "numel", "omega"),
    [
        (QSGD(10, norm="l2"), 512, math.sqrt(512) / 10),
        (QSGD(100, norm="l2"), 512, 512 / 100**2),
        (QSGD(10), 512, 512 / (4 * 10**2)),
        (QSGD(1), 512, math.sqrt(512)),
        (QSGD(10), 10**6, 512 / (4 * 10**2)),  # per bucket, not per tensor
        (QSGD(10), 16, 16 / (4 * 10**2)),  # a short tensor is one short bucket
        (QSGD(10, bucket=64), 512, 64 / (4 * 10**2)),
    ],
)
def test_the_variance_bound_is_lemma_3_1(codec, numel, omega) -> None:
    assert codec.guarantee(Spec((numel,), torch.float32)).omega == pytest.approx(omega)


def test_each_bucket_has_its_own_norm() -> None:
    x = torch.tensor([1.0, -1.0, 1000.0, 0.0, 0.0, 0.0, -5.0])
    codec = QSGD(1, bucket=2)
    payload, _ = codec.encode(x, None, Key(0))
    assert payload.parts["scale"].tolist() == [1.0, 1000.0, 0.0, 5.0]
    assert torch.equal(decoded(codec, x), x)


@pytest.mark.parametrize("bits", [2, 3, 4, 8, 16])
@pytest.mark.parametrize("bucket", [1, 64, 512])
@pytest.mark.parametrize("numel", [0, 1, 511, 512, 5000])
def test_the_wire_carries_the_bits_and_a_norm_per_bucket(bits, bucket, numel) -> None:
    payload, _ = QSGD(bits=bits, bucket=bucket).encode(torch.ones(numel), None, Key(0))
    norms = 4 * -(-numel // bucket)
    assert payload.nbytes <= -(-bits * numel // 8) + norms + 40
    entropy = math.log2(2**bits - 1)  # two bits are three levels, five of them in a byte
    assert payload.nbytes >= entropy * numel / 8 + norms


def test_ranks_round_differently_and_steps_too() -> None:
    x, codec = Key(7).normal(100), QSGD(2)
    first = decoded(codec, x, Key(1).private(0))
    assert not torch.equal(first, decoded(codec, x, Key(1).private(1)))
    assert not torch.equal(first, decoded(codec, x, Key(1).at(1).private(0)))


def test_an_element_above_its_own_rounded_norm_goes_to_the_top_level() -> None:
    # The squares of these have a digit or two left, so some norms come out too small. A larger
    # element beside them keeps the vector from being scaled.
    x = torch.zeros(200, 2, dtype=torch.float64)
    x[:, 0] = torch.linspace(1.0, 2.0, 200, dtype=torch.float64) * 1e-161
    x[0, 0] = 1.0
    codec = QSGD(100, bucket=2, norm="l2")
    payload, _ = codec.encode(x, None, Key(0))
    norms = payload.parts["scale"]
    below = norms < x[:, 0]
    assert below.any()
    found = codec.decode(payload, Spec.of(x), Key(0))[:, 0]
    assert torch.allclose(found[below], norms[below], rtol=1e-12, atol=0)


def test_the_l2_norm_of_large_elements_may_lie_beyond_them_but_not_overflow_alone() -> None:
    x = torch.full((512,), 1e30)
    assert torch.isfinite(decoded(QSGD(7, norm="l2"), x)).all()


def test_half_precision_never_decodes_to_infinity() -> None:
    x = torch.full((512,), 60_000.0, dtype=torch.float16)
    for step in range(20):
        found = decoded(QSGD(1, norm="l2"), x, Key(3).at(step))  # the norm is 1.4 million
        assert torch.isfinite(found).all()


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), -1.0])
def test_a_norm_that_is_none_is_refused(scale) -> None:
    payload, _ = QSGD(3).encode(torch.ones(9), None, Key(0))
    with pytest.raises(WireError, match="scale"):
        QSGD(3).decode(
            payload.replace(scale=torch.tensor([scale])), Spec((9,), torch.float32), Key(0)
        )


def test_a_symbol_beyond_the_levels_is_refused() -> None:
    payload, _ = QSGD(4).encode(torch.ones(4), None, Key(0))  # nine symbols in four bits
    crafted = payload.replace(values=torch.tensor([0xFF, 0xFF], dtype=torch.uint8))
    with pytest.raises(WireError, match=r"symbol 15, expected 0 \.\. 8"):
        QSGD(4).decode(crafted, Spec((4,), torch.float32), Key(0))


@pytest.mark.parametrize(
    "make",
    [
        lambda: QSGD(),
        lambda: QSGD(3, 4),
        lambda: QSGD(0),
        lambda: QSGD(2**15),
        lambda: QSGD(bits=1),
        lambda: QSGD(bits=17),
        lambda: QSGD(3, bucket=0),
        lambda: QSGD(3, norm="l1"),
    ],
)
def test_parameters_out_of_range_are_refused(make) -> None:
    with pytest.raises(ValueError, match="qsgd"):
        make()
