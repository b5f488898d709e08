"""Ramezani-Kebrya et al. 2021: random rounding to levels that shrink by a ratio."""

import math

import pytest
import torch

from gradwire.compression.quantization.nuq import NUQ
from gradwire.compression.quantization.qsgd import QSGD
from gradwire.core.errors import WireError
from gradwire.core.key import Key
from gradwire.core.spec import Spec


def decoded(codec, x: torch.Tensor, key: Key = Key(0)) -> torch.Tensor:  # noqa: B008
    payload, _ = codec.encode(x, None, key)
    return codec.decode(payload, Spec.of(x), key)


def many(codec, x: torch.Tensor, num_keys: int) -> torch.Tensor:
    """[num_keys, d]"""
    return torch.stack([decoded(codec, x, Key(2).at(step)) for step in range(num_keys)])


# The norm is 16, so with four levels every element is one: 0, 2, 4, 8 or 16 times a sign.
EXACT = torch.tensor([8.0, -8.0, 8.0, -4.0, 4.0, 4.0, 2.0, -2.0, 2.0, 2.0, 0.0])


def test_levels_are_met_exactly() -> None:
    assert float(EXACT.norm()) == 16.0
    for step in range(20):
        assert torch.equal(decoded(NUQ(4), EXACT, Key(1).at(step)), EXACT)


def test_the_bytes_of_a_case_by_hand() -> None:
    payload, _ = NUQ(4).encode(EXACT[[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10]], None, Key(0))
    assert payload.parts["scale"].tolist() == [16.0]
    # Levels 1 2 3 stand for 2 4 8; symbols are the signed level + 4, four bits each, lowest first.
    assert payload.parts["values"].tolist() == [0x17, 0x27, 0x66, 0x35, 0x55, 0x04]


def test_an_element_between_two_levels_goes_to_one_of_them_with_the_right_probability() -> None:
    x = torch.tensor([0.6, -0.8])  # norm 1; 0.6 is a fifth of the way from 1/2 to 1
    found = many(NUQ(3), x, 2000)
    assert set(found[:, 0].tolist()) == {0.5, 1.0}
    assert set(found[:, 1].tolist()) == {-0.5, -1.0}
    for column, probability in ((0, 0.2), (1, 0.6)):
        up = float((found[:, column].abs() == 1.0).double().mean())
        assert abs(up - probability) < 6 * math.sqrt(probability * (1 - probability) / 2000)


@pytest.mark.few
@pytest.mark.parametrize("codec", [NUQ(3), NUQ(7), NUQ(7, ratio=0.7), NUQ(2, ratio=0.1)], ids=repr)
def test_it_is_unbiased_and_its_variance_that_of_rounding_between_neighbours(codec) -> None:
    x, num_keys = Key(3).normal(128).double(), 600
    table = torch.tensor([0.0, *(codec.ratio**j for j in reversed(range(codec.num_levels)))])
    r = (x / x.norm()).abs()
    high = torch.searchsorted(table.double(), r).clamp(min=1)
    low, high = table.double()[high - 1], table.double()[high]
    variance = x.norm() ** 2 * (r - low) * (high - r)
    found = many(codec, x, num_keys)
    standard_error = (variance / num_keys).sqrt() + x.norm() * 2.0**-16
    assert ((found.mean(dim=0) - x).abs() < 6 * standard_error).all()
    total = float((found - x).square().sum(dim=1).mean())
    assert total == pytest.approx(float(variance.sum()), rel=0.1)
    assert float(variance.sum()) <= codec.guarantee(Spec.of(x)).omega * float(x.square().sum())


def test_the_worst_element_between_two_levels_attains_its_share_of_omega() -> None:
    for p in (0.3, 0.5, 0.8):
        low, high = p, 1.0
        r = 2 * low * high / (low + high)
        assert (r - low) * (high - r) / r**2 == pytest.approx((1 - p) ** 2 / (4 * p))


@pytest.mark.parametrize(
    ("codec", "numel", "omega"),
    [
        (NUQ(7), 10**6, 1 / 8 + 512 * 2**-12 / 4),
        (NUQ(7, bucket=64), 10**6, 1 / 8 + 64 * 2**-12 / 4),
        (NUQ(3), 512, 1 / 8 + math.sqrt(512) / 4),
        (NUQ(1), 512, math.sqrt(512)),
        (NUQ(1), 1, 1 / 4),
        (NUQ(9, ratio=0.8), 4, 0.04 / 3.2 + 0.8**16),
    ],
)
def test_the_variance_bound(codec, numel, omega) -> None:
    assert codec.guarantee(Spec((numel,), torch.float32)).omega == pytest.approx(omega)


def test_it_beats_even_levels_of_the_same_number_and_norm() -> None:
    x = Key(4).normal(5000)
    errors = [
        float((decoded(codec, x) - x).square().sum()) for codec in (NUQ(7), QSGD(7, norm="l2"))
    ]
    assert errors[0] < errors[1] / 5


@pytest.mark.parametrize("bits", [3, 4, 6])
@pytest.mark.parametrize("bucket", [64, 512])
def test_the_wire_carries_the_bits_and_a_norm_per_bucket(bits, bucket) -> None:
    numel = 5000
    payload, _ = NUQ(bits=bits, bucket=bucket).encode(Key(5).normal(numel), None, Key(0))
    size = -(-bits * numel // 8) + 4 * -(-numel // bucket)
    assert size <= payload.nbytes <= size + 24


def test_a_norm_or_symbol_that_is_none_is_refused() -> None:
    payload, _ = NUQ(4).encode(torch.ones(4), None, Key(0))
    spec = Spec((4,), torch.float32)
    with pytest.raises(WireError, match="scale"):
        NUQ(4).decode(payload.replace(scale=torch.tensor([-1.0])), spec, Key(0))
    crafted = payload.replace(values=torch.tensor([0xFF, 0xFF], dtype=torch.uint8))
    with pytest.raises(WireError, match=r"symbol 15, expected 0 \.\. 8"):
        NUQ(4).decode(crafted, spec, Key(0))


@pytest.mark.parametrize("codec", [NUQ(4), QSGD(3, norm="l2")], ids=repr)
@pytest.mark.parametrize("exponent", [-900, 900])
def test_norms_of_float64_do_not_run_out_of_range(codec, exponent) -> None:
    x = Key(5).normal(300).double()
    assert torch.equal(decoded(codec, x * 2.0**exponent), decoded(codec, x) * 2.0**exponent)


@pytest.mark.parametrize(
    "make",
    [
        lambda: NUQ(),
        lambda: NUQ(3, 4),
        lambda: NUQ(0),
        lambda: NUQ(200),
        lambda: NUQ(bits=1),
        lambda: NUQ(bits=9),
        lambda: NUQ(3, bucket=0),
        lambda: NUQ(3, ratio=1.0),
        lambda: NUQ(3, ratio=0.0),
    ],
)
def test_parameters_out_of_range_are_refused(make) -> None:
    with pytest.raises(ValueError, match="nuq"):
        make()
