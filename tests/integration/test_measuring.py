"""What measured times make of a schedule, with times that are given."""

import pytest

from gradwire.core.replica import Bucket
from gradwire.integration.measuring import price, priced_numels, profile_of
from gradwire.scheduling.mgwfbp import MGWFBP

TENSORS = [
    Bucket("a.weight", 0, 1000),
    Bucket("a.bias", 1000, 1010),
    Bucket("b.weight", 1010, 2010),
    Bucket("c.weight", 2010, 2020),
]
# The backward pass leaves c first, then b, and much later a.
SECONDS = {"c.weight": 0.0, "b.weight": 0.001, "a.bias": 0.05, "a.weight": 0.051}


@pytest.mark.parametrize(
    ("small_s", "large_s", "groups"),
    [
        (2e-3, 0.02, (2,)),  # what is there before the slow layer leaves before it
        (10.0, 10.02, ()),  # each exchange costs more than the whole backward pass
    ],
)
def test_groups_depend_on_what_exchanges_cost(small_s, large_s, groups):
    prices = (price(10, small_s, 4 * small_s), price(2020, large_s, 4 * large_s))
    profile = profile_of(TENSORS, SECONDS, prices)
    assert MGWFBP().resolve(TENSORS, profile) == MGWFBP(groups=groups)


def test_times_of_layers():
    profile = profile_of(TENSORS, SECONDS, ())
    assert [layer.name for layer in profile.layers] == ["a", "b", "c"]
    assert profile.backward_s == pytest.approx((0.05, 0.001, 1e-9))
    unmeasured = profile_of(TENSORS, dict.fromkeys(SECONDS, 0.0), ())
    assert min(unmeasured.backward_s) > 0


def test_prices():
    assert price(5, 0.5, 1.1) == pytest.approx((5, 0.2, 0.3))
    assert price(5, 0.5, 0.4) == pytest.approx((5, 0.0, 0.5))
    assert priced_numels(1) == [1]
    assert priced_numels(5000) == [625, 5000]
    assert priced_numels(1 << 30)[-1] == 1 << 17
