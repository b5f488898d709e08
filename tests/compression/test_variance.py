"""Tsuzuku et al. 2018: elements wait until they stand out from their noise."""

import io

import pytest
import torch

from gradwire.compression.sparsification.topk import TopK
from gradwire.compression.sparsification.variance import Variance
from gradwire.core.fusion import encode_feedback
from gradwire.core.key import Key
from gradwire.core.lifted import lift
from gradwire.core.spec import Spec

KEY = Key(0)


def run(codec: Variance, gradients: torch.Tensor) -> torch.Tensor:
    """What is heard in each step under feedback: [num_steps, d], as `gradients`."""
    spec = Spec.of(gradients[0])
    residual, state, heard = torch.zeros_like(gradients[0]), codec.init(spec), []
    for gradient in gradients:
        payload, residual, state = encode_feedback(codec, gradient, residual, state, KEY)
        heard.append(codec.decode(payload, spec, KEY))
    return torch.stack(heard)


def test_a_case_by_hand() -> None:
    # One that agrees with itself, one that changes its sign, one that is zero. Without decay
    # r^2 / v is 1, 2, 3 for the first: with alpha = 2.5 it is sent in the third step.
    gradients = torch.tensor([[1.0, 1.0, 0.0], [1.0, -1.0, 0.0], [1.0, 1.0, 0.0]] * 2)
    heard = run(Variance(2.5, zeta=1.0), gradients)
    assert heard[:, 0].tolist() == [0, 0, 3, 0, 0, 3]
    assert not heard[:, 1:].any()


def test_decay_lets_the_variance_of_what_waits_fade() -> None:
    # v: 1, then 0.5 + 1 = 1.5 against r^2 = 4, so alpha = 2 is passed in the second step.
    heard = run(Variance(2.0, zeta=0.5), torch.ones(4, 1))
    assert heard[:, 0].tolist() == [0, 2, 0, 2]


def test_the_paper_s_recursion_step_by_step() -> None:
    gradients = torch.stack([Key(1).at(s).normal(50) for s in range(30)]).double() + 0.5
    alpha, zeta = 1.5, 0.9
    r, v = torch.zeros(50).double(), torch.zeros(50).double()
    for gradient, heard in zip(gradients, run(Variance(alpha, zeta=zeta), gradients)):
        r, v = r + gradient, v + gradient**2
        sent = r**2 > alpha * v
        assert torch.allclose(heard, torch.where(sent, r, 0.0))
        r, v = torch.where(sent, 0.0, r), torch.where(sent, 0.0, zeta * v)


def test_what_is_clear_is_sent_more_often_than_noise() -> None:
    noise = torch.stack([Key(1).at(s).normal(500) for s in range(40)])
    share = [float((run(Variance(2.0), noise + mean) != 0).double().mean()) for mean in (0.0, 1.0)]
    assert share[0] < 0.15 < 0.2 < share[1]


def test_a_saved_state_goes_on_as_if_nothing_had_happened() -> None:
    codec, spec = Variance(1.5), Spec((40,), torch.float32)
    gradients = torch.stack([Key(1).at(s).normal(40) for s in range(10)])
    residual, state = torch.zeros(40), codec.init(spec)
    for gradient in gradients[:5]:
        _, residual, state = encode_feedback(codec, gradient, residual, state, KEY)
    assert torch.equal(state["residual"], residual)
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    for gradient in gradients[5:]:
        ours, next_residual, state = encode_feedback(codec, gradient, residual, state, KEY)
        theirs, residual, loaded = encode_feedback(codec, gradient, residual, loaded, KEY)
        assert torch.equal(ours.buffer, theirs.buffer)
        assert torch.equal(next_residual, residual)


def test_squares_beyond_float32_do_no_harm() -> None:
    for factor in (1e-30, 1e30):
        heard = run(Variance(2.5, zeta=1.0), torch.full((3, 2), factor))
        assert (heard[:, 0] / factor).tolist() == pytest.approx([0, 0, 3], rel=1e-6)


def test_an_inner_stage_has_no_memory_and_needs_none() -> None:
    chain, x = TopK(0.5) >> Variance(0.5), Key(3).normal(40)
    state = chain.init(Spec.of(x))
    first, state = chain.encode(x, state, KEY)
    again, _ = chain.encode(x, state, KEY)
    assert torch.equal(first.buffer, again.buffer)
    assert int(chain.decode(first, Spec.of(x), KEY).count_nonzero()) == 20


def test_nothing_to_send_costs_a_header() -> None:
    codec, x = Variance(1.5), Key(3).normal(100_000)
    payload, _ = codec.encode(x, codec.init(Spec.of(x)), KEY)
    assert payload.nbytes <= 24


@pytest.mark.parametrize("alpha", [0.0, -1.0, float("nan"), float("inf")])
def test_an_alpha_that_is_none_is_refused(alpha) -> None:
    with pytest.raises(ValueError, match="variance: alpha must be positive"):
        Variance(alpha)


@pytest.mark.parametrize("zeta", [0.0, 1.1, float("nan")])
def test_a_zeta_that_is_no_decay_is_refused(zeta) -> None:
    with pytest.raises(ValueError, match="variance: zeta is a decay"):
        Variance(1.5, zeta)


def test_without_feedback_it_is_refused(reduce) -> None:
    assert Variance(1.5).traits.needs_feedback
    with pytest.raises(ValueError, match=r"write ef\("):
        reduce(lift(Variance(1.5)), [[torch.ones(10)]])
