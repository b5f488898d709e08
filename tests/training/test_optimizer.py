"""Our optimizers against torch's, step by step, and their purity."""

import math

import pytest
import torch

from gradwire.core.errors import NotationError
from gradwire.core.key import Key
from gradwire.experiment.run.registries import OPTIMIZERS
from gradwire.testing import training_laws
from gradwire.training.optimizer import SGD, Adam, Optimizer, clip_by_norm

SGDS = [
    SGD(0.1),
    SGD(0.1, weight_decay=0.01),
    SGD(0.05, momentum=0.9),
    SGD(0.05, momentum=0.9, weight_decay=0.01),
    SGD(0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
]
ADAMS = [Adam(), Adam(0.01, beta1=0.8, beta2=0.99, eps=1e-6), Adam(0.01, weight_decay=0.1)]


def torch_twin(optimizer: Optimizer, parameter: torch.nn.Parameter) -> torch.optim.Optimizer:
    match optimizer:
        case SGD(lr, momentum, nesterov, weight_decay):
            return torch.optim.SGD(
                [parameter],
                lr=lr,
                momentum=momentum,
                nesterov=nesterov,
                weight_decay=weight_decay,
            )
        case Adam(lr, beta1, beta2, eps, weight_decay):
            return torch.optim.Adam(
                [parameter], lr=lr, betas=(beta1, beta2), eps=eps, weight_decay=weight_decay
            )
    raise AssertionError(optimizer)


@pytest.mark.parametrize("optimizer", SGDS + ADAMS, ids=repr)
def test_equals_torch_over_many_steps(optimizer: Optimizer) -> None:
    params = Key(1).normal(50)
    parameter = torch.nn.Parameter(params.clone())
    twin = torch_twin(optimizer, parameter)
    state = optimizer.init(params)
    for step in range(100):
        # A quadratic bowl with noise; the rate changes as under a schedule.
        noise = Key(2).at(step).normal(50)
        factor = 1.0 / (1 + step // 40)
        twin.param_groups[0]["lr"] = optimizer.lr * factor
        parameter.grad = parameter.detach() + 0.1 * noise
        twin.step()
        gradient = params + 0.1 * noise
        params, state = optimizer.update(params, gradient, state, optimizer.lr * factor)
    torch.testing.assert_close(params, parameter.detach(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("optimizer", SGDS + ADAMS, ids=repr)
def test_nothing_is_changed_in_place(optimizer: Optimizer) -> None:
    training_laws.nothing_is_changed_in_place(optimizer)


@pytest.mark.parametrize("optimizer", SGDS + ADAMS, ids=repr)
def test_states_are_saved_and_steps_go_down(optimizer: Optimizer) -> None:
    training_laws.a_checkpoint_holds_the_state_of_an_optimizer(optimizer)
    training_laws.steps_go_down_a_bowl(optimizer)


def test_clip_by_norm() -> None:
    gradient = torch.tensor([3.0, 4.0])
    torch.testing.assert_close(clip_by_norm(gradient, 1.0), torch.tensor([0.6, 0.8]))
    assert torch.equal(clip_by_norm(gradient, 10.0), gradient)
    assert torch.equal(clip_by_norm(torch.zeros(2), 1.0), torch.zeros(2))
    assert torch.equal(gradient, torch.tensor([3.0, 4.0]))
    assert math.isnan(float(clip_by_norm(torch.tensor([math.nan]), 1.0)))
    with pytest.raises(ValueError, match="max_norm > 0, got 0"):
        clip_by_norm(gradient, 0.0)


def test_notation() -> None:
    assert OPTIMIZERS.builtin_names() == ["adam", "sgd"]
    assert repr(SGD(0.1, momentum=0.9)) == "sgd(0.1, momentum=0.9)"
    for optimizer in SGDS + ADAMS:
        assert OPTIMIZERS.parse(repr(optimizer)) == optimizer
    for text, message in {
        "sgd(-1)": "lr >= 0, got -1",
        "sgd(0.1, momentum=1)": "0 <= momentum < 1, got 1",
        "sgd(0.1, nesterov=True)": "nesterov needs a momentum",
        "adam(beta2=1.5)": "0 <= beta2 < 1, got 1.5",
        "adam(eps=-1)": "eps >= 0",
    }.items():
        with pytest.raises(NotationError, match=message):
            OPTIMIZERS.parse(text)
