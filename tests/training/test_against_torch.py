"""Sequential evaluation and our optimizers retrace a training loop written by hand."""

import pytest
import torch

from gradwire.core.key import Key
from gradwire.training.optimizer import SGD
from gradwire.training.task import GradientRequest, Task
from sampling import slow

NUM_STEPS = 50


@pytest.mark.parametrize(
    "case", ["mlp", slow("resnet20"), "char_lstm", slow("nanogpt_tied")], indirect=True
)
def test_fifty_steps_equal_a_plain_loop(case) -> None:
    module = case.module()
    task = Task(case.model, module, mode="sequential")
    optimizer = SGD(0.05, momentum=0.9, weight_decay=1e-3)
    params, buffers = task.initial_params(), task.initial_buffers()
    state = optimizer.init(params)

    module.train()
    torch_sgd = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
    losses = []
    for step in range(NUM_STEPS):
        key = Key(3).at(step % 5)
        inputs, targets = case.batch(key)
        torch_sgd.zero_grad()
        loss = case.model.loss(module(inputs), targets)
        loss.backward()
        torch_sgd.step()

        (result,) = task.gradients([GradientRequest(params, buffers, inputs, targets, key)])
        buffers = result.buffers
        params, state = optimizer.update(params, result.gradient, state, optimizer.lr)
        torch.testing.assert_close(result.loss, loss.detach(), rtol=0, atol=1e-6)
        losses.append(float(result.loss))

    assert losses[-1] < losses[0]
    torch.testing.assert_close(params, task.layout.flatten(module), rtol=0, atol=1e-6)
    for name, value in buffers.items():
        torch.testing.assert_close(value, module.state_dict()[name], rtol=0, atol=1e-6)
