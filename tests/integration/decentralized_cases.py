"""What the ranks of test_decentralized.py run, one after the other in one process group."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import gradwire
from gradwire.experiment.run.config import Config
from integration.local_updates_golden import GOLDEN, simulate, train_golden
from integration.loops import flat, is_same_everywhere, loss_of, make_model, sgd, train

SIZE = 4
# Graph, algorithm, compression, and what else there is.
METHODS: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
    ("ring", "dpsgd", "identity", {}),
    ("one_peer_exponential", "dpsgd", "identity", {}),
    ("ring", "choco(0.3)", "topk(0.1)", {}),
    ("ring", "choco(0.3)", "topk(0.1)", {"period": 3}),
    ("one_peer_exponential", "dpsgd", "identity", {"period": 2}),
    ("ring", "diffusion", "identity", {}),
    ("ring", "subgradient", "identity", {}),
    ("ring", "d2", "identity", {"lazy": True}),
    ("ring", "gradient_tracking", "identity", {}),
    ("ring", "dcd", "qsgd(bits=8)", {}),
    ("ring", "ecd", "qsgd(bits=8)", {}),
    ("exponential", "sgp", "identity", {}),
)


def name_of(method: tuple[str, str, str, dict[str, Any]]) -> str:
    return " ".join(map(str, method))


def _config(graph: str, algorithm: str, compression: str, options: dict[str, Any]) -> Config:
    period = options.get("period", 1)
    return Config(
        **{**GOLDEN, "steps": 6},
        workers=SIZE,
        compression=compression,
        architecture=f"gossip({graph}, {algorithm}, lazy={options.get('lazy', False)})",
        synchronization="bsp" if period == 1 else f"localsgd({period})",
    )


_simulated: dict[str, Any] = {}  # the parameters of each rank


def prepare(size: int) -> None:
    for method in METHODS:
        run = simulate(_config(*method))
        _simulated[name_of(method)] = [replica.params for replica in run.replicas]


def run(rank: int, folder: Path) -> Any:
    torch.set_num_threads(1)
    return {
        "golden": {name_of(method): _golden(method, rank) for method in METHODS},
        "consensus": _consensus(rank),
        "two": _two_models(rank),
        "norms": _buffers(rank),
        "stats": _stats(rank),
        "refused": _refused(),
    }


def _golden(method: tuple[str, str, str, dict[str, Any]], rank: int) -> list[float]:
    """The distance to the simulator's replica of this rank, and to the mean of all after that."""
    graph, algorithm, compression, options = method

    def make(*arguments: Any, **others: Any) -> Any:
        return gradwire.decentralized(
            *arguments,
            graph=graph,
            algorithm=algorithm,
            compression=compression,
            **options,
            **others,
        )

    model, context = train_golden(rank, _config(*method), make)
    replicas = _simulated[name_of(method)]
    # Where a round begins with an average, the model has it already.
    (ended,) = context.state_dict()["replicas"]
    difference = float((ended["params"] - replicas[rank]).abs().max())
    differs = not is_same_everywhere(flat(model))
    context.close()
    mean = torch.stack(replicas).mean(0)
    from_mean = float((flat(model) - mean).abs().max())
    return [difference, differs, from_mean, is_same_everywhere(flat(model))]


def _consensus(rank: int) -> list[Any]:
    """In the middle of a round, and training goes on."""
    model = make_model()
    optimizer, same = sgd(model), []
    context = gradwire.decentralized(
        model, optimizer, graph="ring", algorithm="choco(0.5)", compression="topk(0.2)", period=2
    )
    for step in range(5):
        train(model, optimizer, range(step, step + 1), rank)
        if step == 2:
            expected = flat(model)
            dist.all_reduce(expected)
            context.consensus()
            same.append(is_same_everywhere(flat(model)))
            same.append(float((expected / SIZE - flat(model)).abs().max()) < 1e-6)
        elif step > 2:
            same.append(is_same_everywhere(flat(model)))
    context.close()
    same.append(is_same_everywhere(flat(model)))
    return same


def _two_models(rank: int) -> bool:
    """Two models at once, of which one has two types of parameters, against one after the other."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.ModuleList([make_model(), nn.Linear(2, 2, dtype=torch.float64)])

    def loss(model: nn.Module, step: int) -> torch.Tensor:
        inputs = torch.full((1, 2), rank + 1.0, dtype=torch.float64)
        return loss_of(model[0], rank, step) + model[1](inputs).square().sum()

    found = []
    for is_together in (True, False):
        models = [make(), make()]
        optimizers = [sgd(model) for model in models]
        periods = (1, 2)
        if is_together:
            contexts = [
                gradwire.decentralized(m, o, period=p)
                for m, o, p in zip(models, optimizers, periods)
            ]
            for step in range(4):
                for model, optimizer in zip(models, optimizers):
                    optimizer.zero_grad()
                    loss(model, step).backward()
                    optimizer.step()
            for context in contexts:
                context.close()
        else:
            for model, optimizer, period in zip(models, optimizers, periods):
                with gradwire.decentralized(model, optimizer, period=period):
                    for step in range(4):
                        optimizer.zero_grad()
                        loss(model, step).backward()
                        optimizer.step()
        found.append([p.detach() for model in models for p in model.parameters()])
    return all(torch.equal(a, b) and is_same_everywhere(a) for a, b in zip(*found))


def _buffers(rank: int) -> list[bool]:
    model = nn.Sequential(make_model(), nn.BatchNorm1d(4))
    optimizer = sgd(model)
    with gradwire.decentralized(model, optimizer):
        train(model, optimizer, range(2), rank)
        differ = not is_same_everywhere(model[1].running_mean)
    return [differ, is_same_everywhere(model[1].running_mean)]


def _stats(rank: int) -> list[Any]:
    model = make_model(64)
    optimizer = sgd(model)
    context = gradwire.decentralized(model, optimizer, period=2)
    start = context.stats().bytes_sent
    train(model, optimizer, range(8), rank)
    stats = context.stats()
    context.close()
    return [stats.steps, stats.bytes_sent, start, 4 * len(flat(model)), stats.ratio]


def _refused() -> list[str]:
    """What depends on the number of ranks and on the model."""
    found = []
    for options in (
        {"algorithm": "choco(0.3)"},  # on a graph that varies
        {"graph": "ring", "algorithm": "choco(0.3)", "compression": "ef(topk(0.1))"},
        {"graph": "hypercube", "algorithm": "diffusion", "compression": "topk(0.1)"},
    ):
        model = make_model()
        try:
            gradwire.decentralized(model, sgd(model), **options)
            found.append("")
        except ValueError as error:
            found.append(str(error))
    return found
