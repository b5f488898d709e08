"""Laws of models and optimizers."""

import io
import math

import torch
from torch import Tensor

from gradwire.core.key import Key
from gradwire.models.base import Model, build_seeded
from gradwire.testing.laws import Laws
from gradwire.training.optimizer import Optimizer

MODEL_LAWS = Laws()
OPTIMIZER_LAWS = Laws()
_LEAST_VOCABULARY = 50  # classes of a model of text


def example_batch(
    shape: tuple[int, ...], num_classes: int, batch: int = 2
) -> tuple[Tensor, Tensor]:
    """Inputs and targets: text, where examples are vectors and there are many classes."""
    generator = torch.Generator().manual_seed(0)
    if len(shape) == 1 and num_classes > _LEAST_VOCABULARY:
        inputs = torch.randint(num_classes, (batch, *shape), generator=generator)
        return inputs, torch.randint(num_classes, (batch, *shape), generator=generator)
    inputs = torch.randn(batch, *shape, generator=generator)
    return inputs, torch.randint(num_classes, (batch,), generator=generator)


@MODEL_LAWS()
def outputs_are_logits_of_every_target(
    model: Model, shape: tuple[int, ...], num_classes: int
) -> None:
    module = build_seeded(model, shape, num_classes, seed=0).eval()
    inputs, targets = example_batch(shape, num_classes)
    assert module(inputs).shape == (*targets.shape, num_classes)


@MODEL_LAWS()
def an_untrained_network_knows_nothing(
    model: Model, shape: tuple[int, ...], num_classes: int
) -> None:
    module = build_seeded(model, shape, num_classes, seed=0).eval()
    inputs, targets = example_batch(shape, num_classes, batch=16)
    loss = model.loss(module(inputs), targets).detach()
    assert loss.shape == ()
    assert 0.5 < float(loss) / math.log(num_classes) < 3.0


@MODEL_LAWS()
def seeded_builds_repeat_and_leave_the_global_generator_alone(
    model: Model, shape: tuple[int, ...], num_classes: int
) -> None:
    before = torch.get_rng_state()
    a, b, c = (build_seeded(model, shape, num_classes, seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters()))
    assert not all(torch.equal(p, q) for p, q in zip(a.parameters(), c.parameters()))


@OPTIMIZER_LAWS()
def nothing_is_changed_in_place(optimizer: Optimizer) -> None:
    params, gradient = Key(1).normal(8), Key(2).normal(8)
    _, state = optimizer.update(params, gradient, optimizer.init(params), 0.1)
    given = {"params": params, "gradient": gradient, **state}
    before = {name: tensor.clone() for name, tensor in given.items()}
    new_params, new_state = optimizer.update(params, gradient, state, 0.1)
    for name, tensor in given.items():
        assert torch.equal(tensor, before[name]), f"{name} was changed"
    memory = {tensor.data_ptr() for tensor in given.values()}
    assert not memory & {tensor.data_ptr() for tensor in (new_params, *new_state.values())}


@OPTIMIZER_LAWS()
def a_checkpoint_holds_the_state_of_an_optimizer(optimizer: Optimizer) -> None:
    params, gradient = Key(1).normal(8), Key(2).normal(8)
    params, state = optimizer.update(params, gradient, optimizer.init(params), 0.1)
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    after, _ = optimizer.update(params, gradient, state, 0.1)
    again, _ = optimizer.update(params, gradient, loaded, 0.1)
    assert torch.equal(after, again)


@OPTIMIZER_LAWS()
def steps_go_down_a_bowl(optimizer: Optimizer) -> None:
    """On |x|^2 / 2, whose gradient is x, ten steps of its own rate lower the loss."""
    params = Key(1).normal(50)
    start, state = float(params.norm()), optimizer.init(params)
    for _ in range(10):
        params, state = optimizer.update(params, params, state, optimizer.lr)
    assert torch.isfinite(params).all()
    assert float(params.norm()) < start
