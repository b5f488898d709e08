"""Wangni et al. 2018: probabilities proportional to magnitudes, cut off at one."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradwire.architecture.allreduce.allreduce import AllReduce
from gradwire.coding.indices import index_entropy_bits
from gradwire.compression import COMPRESSION
from gradwire.compression.sparsification.wangni import Wangni, _sorted_scale
from gradwire.core.errors import WireError
from gradwire.core.key import Key
from gradwire.core.lifted import lift
from gradwire.core.spec import Spec


def many(codec: Wangni, x: torch.Tensor, num_keys: int) -> torch.Tensor:
    """[num_keys, d]"""
    out = []
    for step in range(num_keys):
        key = Key(2).at(step)
        payload, _ = codec.encode(x, None, key)
        out.append(codec.decode(payload, Spec.of(x), key))
    return torch.stack(out)


def probabilities(codec: Wangni, x: torch.Tensor) -> torch.Tensor:
    return (x.abs() / codec.scale(x.abs())).nan_to_num(0.0).clamp(max=1)  # 0/0: scale 0 keeps all


def test_a_case_by_hand() -> None:
    # k = 2. In proportion to magnitude 8 would have 2 * 8 / 12 > 1, so it is certain and the
    # others share one: 1/4 each, sent as 4 times what they are.
    x = torch.tensor([1.0, -8.0, 1.0, -1.0, 1.0])
    assert probabilities(Wangni(0.4), x).tolist() == [0.25, 1.0, 0.25, 0.25, 0.25]
    found = many(Wangni(0.4), x, 1500)
    assert (found[:, 1] == -8.0).all()
    for i, value in ((0, 4.0), (2, 4.0), (3, -4.0), (4, 4.0)):
        assert set(found[:, i].tolist()) == {0.0, value}
        share = float((found[:, i] != 0).double().mean())
        assert abs(share - 0.25) < 6 * math.sqrt(0.25 * 0.75 / 1500)


@given(
    st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=60),
    st.floats(0.01, 1.0),
)
def test_probabilities_add_up_to_k_or_keep_all(numbers, density) -> None:
    x = torch.tensor(numbers, dtype=torch.float64)
    k = min(len(numbers), max(1, round(density * len(numbers))))
    if not x.any():
        return
    p = probabilities(Wangni(density), x)
    assert float(p.sum()) == pytest.approx(min(k, int(x.count_nonzero())), rel=1e-6)
    # Proportional to magnitude wherever below one.
    ratio = (p / x.abs())[(p < 1) & (x != 0)]
    assert torch.allclose(ratio, ratio[:1].expand_as(ratio), rtol=1e-9)


def test_it_is_unbiased_with_the_least_variance_and_the_expected_number() -> None:
    x, num_keys, k = Key(6).normal(100).double() ** 3, 1500, 20
    codec = Wangni(0.2)
    p = probabilities(codec, x)
    assert 0 < int((p == 1).sum()) < k
    found = many(codec, x, num_keys)
    variance = x.square() * (1 / p - 1)
    assert ((found.mean(dim=0) - x).abs() <= 6 * (variance / num_keys).sqrt() + 1e-9).all()
    total = float((found - x).square().sum(dim=1).mean())
    assert total == pytest.approx(float(variance.sum()), rel=0.05)
    # Uniform probabilities are one of the choices it is the best of.
    assert float(variance.sum()) < (100 / k - 1) * float(x.square().sum())
    counts = found.count_nonzero(dim=1).double()
    slack = 6 * math.sqrt(float((p * (1 - p)).sum()) / num_keys)
    assert abs(float(counts.mean()) - k) < slack


def test_no_other_probabilities_of_the_same_sum_have_less_variance() -> None:
    x = Key(7).normal(50).double()
    p = probabilities(Wangni(0.3), x)
    least = float((x.square() / p).sum())
    for step in range(50):
        other = (p * (1 + 0.3 * Key(8).at(step).normal(50).double())).clamp(1e-3, 1)
        other = other * min(1.0, float(p.sum() / other.sum()))
        assert float((x.square() / other).sum()) >= least


def test_only_certain_elements_carry_a_value() -> None:
    x = Key(3).normal(100_000)  # so flat that at 1% none is certain
    payload, _ = Wangni(0.01).encode(x, None, Key(0))
    count = int(Wangni(0.01).decode(payload, Spec.of(x), Key(0)).count_nonzero())
    assert payload.parts["values"].numel() == 0
    least = (index_entropy_bits(100_000, count) + count) / 8
    assert least <= payload.nbytes <= 1.05 * least + 40
    x[:100] *= 1e4
    payload, _ = Wangni(0.01).encode(x, None, Key(0))
    assert payload.parts["values"].numel() >= 90


def test_a_few_large_elements_do_not_swallow_the_small() -> None:
    x = torch.full((1000,), 1e-20)
    x[:3] = 1e10
    assert probabilities(Wangni(0.1), x)[3:].tolist() == pytest.approx([97 / 997] * 997)


def test_signs_of_another_number_are_refused() -> None:
    x = Key(3).normal(1000)
    payload, _ = Wangni(0.1).encode(x, None, Key(0))
    with pytest.raises(WireError, match="signs"):
        Wangni(0.1).decode(
            payload.replace(signs=torch.zeros(99, dtype=torch.uint8)), Spec.of(x), Key(0)
        )


@pytest.mark.parametrize("density", [0.0, 1.1, float("nan")])
def test_a_density_that_is_no_fraction_is_refused(density) -> None:
    with pytest.raises(ValueError, match="wangni: density is the fraction kept"):
        Wangni(density)


@pytest.mark.parametrize(
    ("numel", "density", "omega"), [(1000, 0.01, 99), (7, 0.3, 2.5), (9, 1, 0)]
)
def test_the_variance_is_at_most_that_of_equal_probabilities(numel, density, omega) -> None:
    guarantee = Wangni(density).guarantee(Spec((numel,), torch.float32))
    assert guarantee.omega == pytest.approx(omega)
    assert guarantee.contracts == (omega < 1)


@pytest.mark.parametrize("text", ["wangni(0.05)", "wangni(0.05) >> fp16"])
def test_owners_of_shards_do_not_feed_their_error_back(reduce, text) -> None:
    # Fed back, the error of a codec of omega = 19 grows by that factor in each step.
    x, steps = Key(9).normal(600), 30
    codec = COMPRESSION.parse(text)
    results, _ = reduce(lift(codec), [[x] * steps] * 3, None, AllReduce("scatter"))
    mean = torch.stack([result.mean for result in results[0]]).double().mean(dim=0)
    # Two encodings, each with a variance below 19 |x|^2, over all steps.
    assert float((mean - x).norm() / x.norm()) < 3 * (20 * 20 / steps) ** 0.5


@pytest.mark.parametrize("density", [0.02, 0.3, 0.9])
@pytest.mark.parametrize("base", [1.0, 1.2, 3.0])
def test_rounds_and_sorting_find_the_same_scale(density, base) -> None:
    # With base 3 every round finds one more element: it takes sorting.
    x = base ** -torch.arange(60, dtype=torch.float64)
    k = max(1, round(density * 60))
    assert float(Wangni(density).scale(x)) == pytest.approx(_sorted_scale(x, k), rel=1e-12)


@pytest.mark.few
@pytest.mark.parametrize("scale", [1e-44, 1e-38, 1e30, 1e38])
def test_the_ends_of_the_range(scale) -> None:
    x = (Key(1).normal(300).clamp(-2, 2) * scale).float()
    found = many(Wangni(0.1), x, 300)
    assert torch.isfinite(found).all()
    shrinkage = float((found.double().mean(dim=0) @ x.double()) / x.double().square().sum())
    assert abs(shrinkage - 1) < 6 * (9 / 300 / 30) ** 0.5 + 0.1
