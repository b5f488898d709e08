"""DeMo: momenta that stay with their workers, and what is left of them."""

import pytest
import torch
from torch import Tensor

from gradwire.compression import COMPRESSION
from gradwire.core.key import Key
from gradwire.core.spec import Spec

TENSORS = (("w", 0, 48, (6, 8)), ("b", 48, 61, (13,)))
SPEC = Spec((61,), torch.float64, tensors=TENSORS)
NUMEL, STEPS = 61, 8


def gradients(size: int) -> list[list[Tensor]]:
    return [
        [Key(31).at(step).private(rank).normal(NUMEL).double() for step in range(STEPS)]
        for rank in range(size)
    ]


def test_a_trajectory_by_hand(reduce) -> None:
    """Two workers, one chunk of two: the sum s and the difference d of which, over sqrt(2)."""
    first = [torch.tensor([4.0, 2.0]), torch.tensor([0.0, 0.0]), torch.tensor([0.0, 0.0])]
    second = [torch.tensor([1.0, -3.0]), torch.tensor([0.0, 0.0]), torch.tensor([-2.0, 0.0])]
    reducer = COMPRESSION.parse("demo(dctk(2, 1), beta=0.5, signed=False)")
    results, _ = reduce(reducer, [first, second])
    # m_1 = (4, 2): s, that is (3, 3), goes and (1, -1) stays. m_2 = (1, -3): (2, -2) goes.
    expected = [
        ([2.5, 0.5], [1, -1], [-1, -1]),
        # Half of what stayed, (0.5, -0.5) and (-0.5, -0.5), is sent whole.
        ([0, -0.5], [0, 0], [0, 0]),
        # Nothing from the first. Of (-2, 0) both coefficients are equal, so either (-1, -+1) goes.
        ([-0.5, None], [0, 0], [-1, None]),
    ]
    for step, rows in enumerate(expected):
        a, b = results[0][step], results[1][step]
        for ours, row in zip((a.mean, a.state["momentum"], b.state["momentum"]), rows):
            for number, wanted in zip(ours.tolist(), row):
                assert wanted is None or number == pytest.approx(wanted, abs=1e-6)
        assert torch.equal(a.mean, b.mean)


@pytest.mark.parametrize("codec", ["dctk(4, 3)", "topk(0.1)", "dctk(8, 2) >> fp16", "sign"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_what_is_sent_leaves_the_momentum(reduce, codec, size) -> None:
    """m' + q = beta m + g on every worker, and all hear the mean of q."""
    inputs = gradients(size)
    reducer = COMPRESSION.parse(f"demo({codec}, beta=0.9, signed=False)")
    results, _ = reduce(reducer, inputs, SPEC)
    for rank in range(size):
        momentum = torch.zeros(NUMEL, dtype=torch.float64)
        for gradient, step in zip(inputs[rank], results[rank]):
            expected = 0.9 * momentum + gradient
            momentum = step.state["momentum"]
            assert torch.allclose(momentum + step.own(), expected, rtol=0, atol=1e-13)
        assert momentum.abs().max() > 0.1
    for step in range(STEPS):
        mean = sum(steps[step].own() for steps in results) / size
        assert torch.allclose(results[0][step].mean, mean, rtol=0, atol=1e-13)


@pytest.mark.parametrize("codec", ["dctk(8, 64)", "identity", "topk(1.0)"])
def test_with_everything_sent_it_is_plain_sgd(reduce, codec) -> None:
    """The momentum is empty after each step, whatever beta."""
    inputs = gradients(2)
    reducer = COMPRESSION.parse(f"demo({codec}, beta=0.9, signed=False)")
    results, _ = reduce(reducer, inputs, SPEC)
    for step in range(STEPS):
        assert torch.equal(results[0][step].mean, (inputs[0][step] + inputs[1][step]) / 2)
        assert not results[0][step].state["momentum"].any()


def test_with_beta_one_it_is_error_feedback(reduce) -> None:
    inputs = gradients(3)
    ours, _ = reduce(COMPRESSION.parse("demo(dctk(4, 3), beta=1.0, signed=False)"), inputs, SPEC)
    other, _ = reduce(COMPRESSION.parse("ef(dctk(4, 3))"), inputs, SPEC)
    assert all(torch.equal(a.mean, b.mean) for a, b in zip(ours[0], other[0]))


def test_the_sign_changes_the_step_but_not_what_is_sent(reduce) -> None:
    inputs = gradients(2)
    signed, a = reduce(COMPRESSION.parse("demo(dctk(8, 2))"), inputs, SPEC)
    plain, b = reduce(COMPRESSION.parse("demo(dctk(8, 2), signed=False)"), inputs, SPEC)
    assert a.ledger.total_bytes == b.ledger.total_bytes
    for ours, other in zip(signed[0], plain[0]):
        assert torch.equal(ours.mean, other.mean.sign())
        assert torch.equal(ours.state["momentum"], other.state["momentum"])


def test_slow_components_wait_in_the_momentum_until_they_are_the_largest(reduce) -> None:
    """A constant small gradient beside a large alternating one is sent in the end."""
    slow = torch.full((8,), 0.2)
    fast = torch.tensor([1.0, -1.0] * 4)
    inputs = [[slow + fast * (-1) ** step for step in range(12)]]
    results, _ = reduce(COMPRESSION.parse("demo(dctk(8, 1), beta=0.99, signed=False)"), inputs)
    totals = [float(step.mean.sum()) for step in results[0]]
    assert abs(totals[0]) < 1e-5  # the fast one first
    assert max(totals) > 8 * 0.2 * 2  # then what has been piling up, for several steps at once


def test_bytes_of_a_model(reduce) -> None:
    """8 of 64 x 64 coefficients of a matrix: less than 0.1 bits per element to the other worker."""
    spec = Spec((512 * 512,), torch.float32, tensors=(("w", 0, 512 * 512, (512, 512)),))
    inputs = [[Key(7).private(rank).normal(512 * 512)] for rank in range(2)]
    _, engine = reduce(COMPRESSION.parse("demo(dctk(64, 8))"), inputs, spec)
    bits = 8 * engine.ledger.total_bytes / 2 / (512 * 512)
    assert 0.08 < bits < 0.085


def test_its_momentum_lives_inside() -> None:
    assert COMPRESSION.parse("demo(dctk(64, 8))").momentum_lives == "inside"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("demo(dctk(64, 8), beta=1.5)", "beta lies in 0 .. 1, got 1.5"),
        ("demo(ef(dctk(64, 8)))", "feedback within feedback"),
        ("demo(rans)", "must follow a quantiser"),
    ],
)
def test_what_cannot_work_is_refused(text, message) -> None:
    with pytest.raises(ValueError, match=message):
        COMPRESSION.parse(text)


def test_a_codec_that_need_not_settle_is_warned_about() -> None:
    with pytest.warns(UserWarning, match="dctk"):
        COMPRESSION.parse("demo(terngrad(0.0))").init(Spec((1000,), torch.float32), 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_forget_too(reduce, dtype) -> None:
    """0.999 m is m in bfloat16: the momentum is kept in float32."""
    first = torch.zeros(64, dtype=dtype)
    first[0], first[1] = 4.0, 1.0
    inputs = [[first, torch.zeros(64, dtype=dtype)]]
    reducer = COMPRESSION.parse("demo(topk(0.015625), beta=0.75, signed=False)")
    (steps,), _ = reduce(reducer, inputs)
    assert float(steps[0].mean[0]) == 4.0
    assert float(steps[1].mean[1]) == 0.75
    slow = COMPRESSION.parse("demo(topk(0.015625), signed=False)")
    (steps,), _ = reduce(slow, [[first] + [10 * torch.eye(64)[2].to(dtype)] * 50])
    held = steps[-1].state["momentum"]
    assert held.dtype == torch.float32
    assert float(held[1]) == pytest.approx(0.999**50, rel=1e-4)
