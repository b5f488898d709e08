"""What the ranks of test_uneven.py run: gossip where ranks take different numbers of steps."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

import gradwire
from integration.loops import flat, is_same_everywhere, loss_of, make_model, sgd

# Graph, algorithm, compression, and what else there is.
METHODS: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
    ("one_peer_exponential", "dpsgd", "identity", {}),
    ("ring", "choco(0.3)", "topk(0.2)", {"period": 3}),
    ("ring", "subgradient", "identity", {}),
    ("ring", "d2", "identity", {"lazy": True}),
    ("complete", "gradient_tracking", "identity", {"period": 2}),
    ("exponential", "sgp", "identity", {}),
)
NUM_STEPS = (13, 4, 7, 4)  # by rank
CONSENSUS = 6  # the step after which ranks that are still there average


def name_of(method: tuple[str, str, str, dict[str, Any]]) -> str:
    return " ".join(map(str, method))


def run(rank: int, folder: Path) -> Any:
    torch.set_num_threads(1)
    return {name_of(method): _uneven(method, rank) for method in METHODS}


def _uneven(method: Any, rank: int) -> list[Any]:
    """Ranks that run out of data, against ranks that go on with gradients of zero."""
    models, steps, means = [], [], []
    for runs_out in (True, False):
        model = make_model()
        optimizer = sgd(model)
        graph, algorithm, compression, options = method
        with gradwire.decentralized(
            model,
            optimizer,
            graph=graph,
            algorithm=algorithm,
            compression=compression,
            timeout_s=60,
            **options,
        ) as context:
            for step in range(NUM_STEPS[rank] if runs_out else max(NUM_STEPS)):
                _step(model, optimizer, rank, step)
        models.append(flat(model))
        steps.append(context.num_steps)
        means.append(is_same_everywhere(flat(model)))
    model = make_model()
    optimizer = sgd(model)
    with gradwire.decentralized(model, optimizer, graph="complete", timeout_s=60) as context:
        for step in range(NUM_STEPS[rank]):
            _step(model, optimizer, rank, step)
            if step == CONSENSUS:
                context.consensus()
    means.append(is_same_everywhere(flat(model)))
    return [float((models[0] - models[1]).abs().max()), steps, means]


def _step(model: nn.Module, optimizer: Any, rank: int, step: int) -> None:
    optimizer.zero_grad()
    loss = loss_of(model, rank, step)
    (loss if step < NUM_STEPS[rank] else loss * 0.0).backward()
    optimizer.step()
