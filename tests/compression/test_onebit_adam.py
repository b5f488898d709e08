"""1-bit Adam: Adam at first, then Adam with a frozen variance, and one bit per element."""

import pytest
import torch
from torch import Tensor

from gradwire.architecture.allreduce.allreduce import AllReduce
from gradwire.compression import COMPRESSION
from gradwire.core.errors import NonFiniteError
from gradwire.core.key import Key
from gradwire.core.reducer import Reduced
from gradwire.core.spec import Spec
from gradwire.training.optimizer import SGD, Adam

NUMEL, STEPS, WARMUP, LR = 61, 12, 5, 0.01


def gradients(size: int, dtype: torch.dtype = torch.float64) -> list[list[Tensor]]:
    """Of different sizes by element, as those of a network are."""
    scale = torch.logspace(-4, 2, NUMEL, dtype=dtype)
    return [
        [scale * Key(5).at(step).private(rank).normal(NUMEL).to(dtype) for step in range(STEPS)]
        for rank in range(size)
    ]


def means(inputs: list[list[Tensor]]) -> list[Tensor]:
    return [sum(step) / len(inputs) for step in zip(*inputs)]


def descended(results: list[Reduced]) -> list[Tensor]:
    """Where plain SGD goes along the directions."""
    sgd, params, path = SGD(LR), torch.zeros(NUMEL, dtype=torch.float64), []
    for result in results:
        params, _ = sgd.update(params, result.mean, {}, LR)
        path.append(params)
    return path


@pytest.mark.parametrize("size", [1, 2, 3])
def test_with_identity_it_is_adam_with_a_frozen_variance(reduce, size) -> None:
    inputs = gradients(size)
    results, _ = reduce(COMPRESSION.parse(f"onebit_adam(identity, warmup={WARMUP})"), inputs)
    ours = descended(results[0])
    # Adam, and the same moments by hand once the variance is frozen.
    adam, params = Adam(LR), torch.zeros(NUMEL, dtype=torch.float64)
    state = adam.init(params)
    for step, gradient in enumerate(means(inputs)):
        if step < WARMUP:
            params, state = adam.update(params, gradient, state, LR)
            momentum = state["mean"]
        else:
            momentum = 0.9 * momentum + 0.1 * gradient
            corrected = (state["square"] / (1 - 0.999**WARMUP)).sqrt()
            params = params - LR * momentum / (1 - 0.9 ** (step + 1)) / (corrected + 1e-8)
        assert torch.allclose(ours[step], params, rtol=1e-13, atol=1e-14), step


def test_its_warm_up_is_torchs_adam(reduce) -> None:
    inputs = gradients(2)
    results, _ = reduce(COMPRESSION.parse(f"onebit_adam(sign, warmup={STEPS})"), inputs)
    params = torch.nn.Parameter(torch.zeros(NUMEL, dtype=torch.float64))
    adam = torch.optim.Adam([params], lr=LR)
    for gradient, ours in zip(means(inputs), descended(results[0])):
        params.grad = gradient
        adam.step()
        assert torch.allclose(ours, params.detach(), rtol=1e-13, atol=1e-14)


def test_a_warm_up_that_never_ends_differs_from_one_that_does(reduce) -> None:
    """So that the test above means something: the variance does go on in Adam."""
    inputs = gradients(1)
    frozen, _ = reduce(COMPRESSION.parse("onebit_adam(identity, warmup=2)"), inputs)
    adam, _ = reduce(COMPRESSION.parse(f"onebit_adam(identity, warmup={STEPS})"), inputs)
    assert torch.equal(frozen[0][1].mean, adam[0][1].mean)
    assert not torch.allclose(frozen[0][2].mean, adam[0][2].mean, rtol=0.01)


@pytest.mark.parametrize("codec", ["sign", "topk(0.1)", "topk(0.2) >> qsgd(bits=4)"])
@pytest.mark.parametrize("size", [1, 3])
def test_what_the_momentum_lacks_is_in_the_residuals(reduce, codec, size) -> None:
    """m + mean of e_i = beta1 m' + (1 - beta1) g + mean of e_i', of the step before."""
    inputs = gradients(size)
    reducer = COMPRESSION.parse(f"onebit_adam({codec}, warmup={WARMUP})")
    results, _ = reduce(reducer, inputs, architecture=AllReduce("gather"))
    for step, gradient in list(enumerate(means(inputs)))[WARMUP:]:
        old, new = ([steps[i].state for steps in results] for i in (step - 1, step))
        expected = 0.9 * old[0]["momentum"] + 0.1 * gradient
        expected = expected + sum(state["residual"] for state in old) / size
        ours = new[0]["momentum"] + sum(state["residual"] for state in new) / size
        assert torch.allclose(ours, expected, rtol=0, atol=1e-11)
        assert torch.equal(new[0]["variance"], results[0][WARMUP - 1].state["variance"])


def test_a_trajectory_by_hand(reduce) -> None:
    """Two workers, one element each way; beta1 = 1/2, beta2 = 0, so v is the last mean's square."""
    first = [torch.tensor([3.0, 1.0]), torch.tensor([4.0, -2.0])]
    second = [torch.tensor([1.0, 3.0]), torch.tensor([0.0, 6.0])]
    reducer = COMPRESSION.parse("onebit_adam(sign, warmup=1, beta1=0.5, beta2=0.0, eps=1.0)")
    results, _ = reduce(reducer, [first, second])
    # g = (2, 2), m = (1, 1), m_hat = (2, 2), v = (4, 4): 2 / (2 + 1).
    assert torch.allclose(results[0][0].mean, torch.tensor([2 / 3, 2 / 3]))
    # m_1 = (2.5, -0.5), m_2 = (0.5, 3.5): signs times 1.5 and 2.
    assert results[0][1].own().tolist() == [1.5, -1.5]
    assert results[1][1].own().tolist() == [2, 2]
    assert results[0][1].state["residual"].tolist() == [1, 1]
    assert results[1][1].state["residual"].tolist() == [-1.5, 1.5]
    # m = (1.75, 0.25), corrected by 1 - 1/4.
    assert results[0][1].state["momentum"].tolist() == [1.75, 0.25]
    expected = torch.tensor([1.75, 0.25]) / 0.75 / 3
    assert torch.allclose(results[0][1].mean, expected)


@pytest.mark.parametrize("codec", ["sign", "sign(bucket=8)", "qsgd(bits=4)", "identity"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_elements_that_had_no_gradient_in_the_warm_up_stay(reduce, codec, dtype) -> None:
    inputs = [[x.to(dtype) for x in own] for own in gradients(2)]
    for own in inputs:
        for x in own[:WARMUP]:
            x[20:30] = 0
    results, _ = reduce(COMPRESSION.parse(f"onebit_adam({codec}, warmup={WARMUP})"), inputs)
    for step in results[0]:
        assert torch.isfinite(step.mean).all()
        assert torch.equal(step.mean[20:30], torch.zeros(10, dtype=dtype))
    assert all(torch.isfinite(steps[-1].state["residual"]).all() for steps in results)


def test_the_floor_bounds_what_small_variances_make_of_a_sign(reduce) -> None:
    inputs = [[x + 1.0 for x in own] for own in gradients(2)]
    for own in inputs:
        for x in own[:WARMUP]:
            x[:10] *= 1e-6
    largest = {}
    for floor in (0.0, 0.1):
        reducer = COMPRESSION.parse(f"onebit_adam(sign, warmup={WARMUP}, floor={floor})")
        results, _ = reduce(reducer, inputs)
        largest[floor] = float(results[0][WARMUP].mean.abs().max())
    assert largest[0.0] > 1e5
    assert largest[0.1] < 30


def test_one_bit_per_element_there_and_back_after_the_warm_up(reduce) -> None:
    numel, size, sent = 80_000, 4, []
    inputs = [[Key(1).at(s).private(r).normal(numel) for s in range(3)] for r in range(size)]
    for steps in (2, 3):
        _, engine = reduce(
            COMPRESSION.parse("onebit_adam(sign, warmup=2)"), [own[:steps] for own in inputs]
        )
        sent.append(engine.ledger.total_bytes / size)
    dense, compressed = sent[0] / 2, sent[1] - sent[0]
    assert dense == 2 * 3 / 4 * 4 * numel  # an all-reduce of float32
    # Shards of one bit to three owners, and the owner's mean to three others.
    assert 8 * compressed / numel == pytest.approx(2 * 3 / 4, rel=0.01)


def test_its_momentum_lives_inside() -> None:
    assert COMPRESSION.parse("onebit_adam(sign, warmup=10)").momentum_lives == "inside"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("onebit_adam(sign, warmup=0)", "at least 1, got 0"),
        ("onebit_adam(sign, warmup=5, beta1=1.0)", "beta1 lies in"),
        ("onebit_adam(sign, warmup=5, beta2=-0.1)", "beta2 lies in"),
        ("onebit_adam(sign, warmup=5, eps=0.0)", "eps must be above 0"),
        ("onebit_adam(sign, warmup=5, floor=2.0)", "floor lies in"),
        ("onebit_adam(ef(sign), warmup=5)", "feedback within feedback"),
        ("ef(onebit_adam(sign, warmup=5))", "feedback within feedback"),
        ("onebit_adam(sign)", "warmup"),
    ],
)
def test_what_cannot_work_is_refused(text, message) -> None:
    with pytest.raises(ValueError, match=message):
        COMPRESSION.parse(text)


def test_a_state_that_missed_the_warm_up_is_refused(reduce) -> None:
    reducer = COMPRESSION.parse("onebit_adam(sign, warmup=5)")
    with pytest.raises(ValueError, match="no variance in step 7"):
        reduce(reducer, [[torch.ones(3)]], first_step=7)


def test_a_codec_that_need_not_settle_is_warned_about() -> None:
    reducer = COMPRESSION.parse("onebit_adam(terngrad(0.0), warmup=5)")
    with pytest.warns(UserWarning, match="sign or topk"):
        reducer.init(Spec((1000,), torch.float32), 2)


@pytest.mark.parametrize("step", [0, 3])
def test_what_is_not_finite_is_refused(reduce, step) -> None:
    inputs = [[torch.ones(3) for _ in range(4)]]
    inputs[0][step][1] = torch.inf
    with pytest.raises(NonFiniteError, match="onebit_adam"):
        reduce(COMPRESSION.parse("onebit_adam(sign, warmup=2)"), inputs)
