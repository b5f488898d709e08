"""Sattler et al. 2019: the top k as plus or minus their mean, Golomb-coded."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradwire.coding.indices import index_entropy_bits
from gradwire.compression.coders.golomb import Golomb
from gradwire.compression.sparsification.stc import STC
from gradwire.compression.sparsification.topk import TopK
from gradwire.core.key import Key
from gradwire.core.spec import Spec

KEY = Key(0)


def decoded(codec: STC, x: torch.Tensor) -> torch.Tensor:
    payload, _ = codec.encode(x, None, KEY)
    return codec.decode(payload, Spec.of(x), KEY)


def test_a_case_by_hand() -> None:
    x = torch.tensor([0.5, -3.0, 1.0, 0.0, 2.0, -4.0])
    assert decoded(STC(0.5), x).tolist() == [0.0, -3.0, 0.0, 0.0, 3.0, -3.0]


def test_zeros_among_the_top_k_stay_zero() -> None:
    x = torch.tensor([0.0, -3.0, 0.0, 0.0, 1.0, 0.0])
    assert decoded(STC(0.5), x).tolist() == [0.0, -2.0, 0.0, 0.0, 2.0, 0.0]


@given(st.lists(st.floats(-100, 100, width=16), min_size=1, max_size=40), st.floats(0.01, 1.0))
def test_the_contraction_holds_for_every_vector(numbers, density) -> None:
    x = torch.tensor(numbers, dtype=torch.float64)
    delta = STC(density).guarantee(Spec.of(x)).delta
    energy = float(x.square().sum())
    lost = float((decoded(STC(density), x) - x).square().sum())
    assert lost <= (1 - delta) * energy * (1 + 1e-9) + 1e-12


@pytest.mark.parametrize("density", [0.05, 0.5])
def test_the_contraction_is_met_with_equality_at_both_ends(density) -> None:
    k = round(100 * density)
    flat = torch.ones(100, dtype=torch.float64)
    steep = torch.full((100,), 1e-9, dtype=torch.float64)
    steep[7] = 1.0
    kept = [
        1 - float((decoded(STC(density), x) - x).square().sum() / x.square().sum())
        for x in (flat, steep)
    ]
    assert kept == pytest.approx([k / 100, 1 / k], rel=1e-6)
    assert STC(density).guarantee(Spec.of(flat)).delta == min(k / 100, 1 / k)


def test_golomb_is_the_default_coder() -> None:
    x, spec = Key(3).normal(5000), Spec((5000,), torch.float32)
    plain, named = STC(0.01), STC(0.01) >> Golomb()
    payload, other = plain.encode(x, None, KEY)[0], named.encode(x, None, KEY)[0]
    assert torch.equal(payload.buffer, other.buffer)
    assert torch.equal(plain.decode(payload, spec, KEY), named.decode(other, spec, KEY))


def test_a_position_and_a_bit_each() -> None:
    payload, _ = STC(0.01).encode(Key(3).normal(100_000), None, KEY)
    least = (index_entropy_bits(100_000, 1000) + 1000) / 8
    assert least <= payload.nbytes <= 1.05 * least + 40


@pytest.mark.parametrize("density", [0.0, 1.1, float("nan")])
def test_a_density_that_is_no_fraction_is_refused(density) -> None:
    with pytest.raises(ValueError, match="stc: density is the fraction kept"):
        STC(density)


def test_the_default_coder_keeps_out_of_the_state() -> None:
    codec, x = TopK(0.5) >> STC(0.1), Key(3).normal(300)
    state = codec.init(Spec.of(x))
    first, after = codec.encode(x, state, KEY)
    again, _ = codec.encode(x, after, KEY)
    assert after == state
    assert torch.equal(first.buffer, again.buffer)
    assert STC(0.1).encode(x, None, KEY)[1] is None
