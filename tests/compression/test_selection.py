"""What sparsifiers share, against what sorting finds; and the ends of the range for all of them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradwire.compression import COMPRESSION
from gradwire.compression.sparsification import _selection
from gradwire.compression.sparsification._selection import above, extremes, largest
from gradwire.core.key import Key
from gradwire.core.spec import Spec

KEY = Key(3)
NUMBERS = st.lists(st.integers(-4, 4), min_size=1, max_size=300)


def sorted_out(x: torch.Tensor, count: int, sign: int) -> list[float]:
    """The `count` largest of sign * x above zero, descending."""
    side = (sign * x).sort(descending=True).values[:count]
    return side[side > 0].tolist()


@given(NUMBERS, st.integers(0, 20), st.integers(0, 20))
def test_extremes_are_the_largest_of_each_sign(numbers, num_high, num_low) -> None:
    x = torch.tensor(numbers, dtype=torch.float32)
    indices, values = extremes(x, min(num_high, len(x)), min(num_low, len(x)))
    assert torch.equal(x[indices], values)
    assert (indices.diff() > 0).all()
    for count, sign in ((num_high, 1), (num_low, -1)):
        side = (sign * values)[sign * values > 0].sort(descending=True).values
        assert side.tolist() == sorted_out(x, count, sign)


def test_extremes_of_one_side_that_is_smaller_than_all_of_the_other() -> None:
    x = Key(1).normal(5000).abs() + 10
    x[::100] = -Key(2).normal(50).abs()
    indices, values = extremes(x, 20, 20)
    assert (values > 0).sum() == (values < 0).sum() == 20
    expected = torch.cat([x.topk(20).indices, (-x).topk(20).indices]).sort().values
    assert torch.equal(indices, expected)


@given(NUMBERS, st.floats(0, 1))
def test_largest_takes_zeros_and_negative_elements_if_it_must(numbers, fraction) -> None:
    x = torch.tensor(numbers, dtype=torch.float32)
    count = round(fraction * len(x))
    indices, values = largest(x, count)
    assert torch.equal(x[indices], values)
    assert values.sort().values.tolist() == sorted(numbers)[len(x) - count :]
    assert (indices.diff() > 0).all()


@given(NUMBERS, st.integers(1, 30), st.sampled_from((0.0, 0.5, 3.0, 9.0, 1e60, float("nan"))))
def test_what_is_not_above_stays_in_the_residual(numbers, most, threshold) -> None:
    x = torch.tensor(numbers, dtype=torch.float32)
    out = torch.empty_like(x)
    indices, values = above(x, threshold, min(most, 3), most, torch.zeros_like(x), out)
    assert torch.equal(out.index_put((indices,), values), x)
    assert (out[indices] == 0).all()
    assert len(indices) <= most
    assert (values != 0).all()
    if len(indices) < len(x):
        assert not len(values) or out.abs().max() <= values.abs().min()


SELECTORS = (
    "topk(0.1)",
    "sampledk(0.1)",
    "aji(0.1)",
    "gaussiank(0.1)",
    "sidco(0.1)",
    "stc(0.1)",
    "sbc(0.1)",
    "dryden(0.1)",
    "adacomp",
    "wangni(0.1)",
    "threshold(1.0)",
)


@pytest.mark.parametrize("text", SELECTORS)
def test_sums_of_the_largest_float64_do_not_overflow(text) -> None:
    codec, x = COMPRESSION.parse(text), Key(5).normal(1000).double().clamp(-1.5, 1.5) * 1e308
    payload, _ = codec.encode(x, codec.init(Spec.of(x)), KEY)
    decoded = codec.decode(payload, Spec.of(x), KEY)
    assert torch.isfinite(decoded).all()
    assert 0 < int(decoded.count_nonzero()) <= 1000
    # As many as of a vector of ordinary size, but where tau or the largest number stand in between.
    small, _ = codec.encode(x / 2.0**1000, codec.init(Spec.of(x)), KEY)
    if not text.startswith(("threshold", "wangni")):
        assert small.nbytes == payload.nbytes


def test_results_come_from_memory_that_is_used_again() -> None:
    # Fresh pages for a large vector take longer than everything else.
    spec = Spec((1 << 21,), torch.float32)
    one = _selection.scatter(torch.ones(1), torch.tensor([5]), spec)
    where = one.data_ptr()
    del one
    again = _selection.scatter(torch.ones(1), torch.tensor([7]), spec)
    assert again.data_ptr() == where
    assert again.nonzero().tolist() == [[7]]
