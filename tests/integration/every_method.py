"""What the ranks of test_every_method.py run: all compressions, in hook and optimizer."""

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.compression import COMPRESSION
from gradwire.core.codec import Codec, Kind
from integration import golden
from integration.loops import ddp, flat, is_same_everywhere

SIZE = 3
STEPS = 3


def methods() -> list[str]:
    """One example of each codec and reducer that averages vectors."""
    found = []
    for name in COMPRESSION.names():
        text = (COMPRESSION[name].examples or (name,))[0]
        made = COMPRESSION.parse(text)
        if isinstance(made, Codec) and made.traits.takes is not Kind.REAL:
            continue  # a coder, which follows a quantiser
        if isinstance(made, Codec) and made.traits.needs_feedback:
            text = f"ef({text})"
        found.append(text)
    return found


def run(rank: int, folder: Path) -> Any:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    results = {text: [_hook(text, rank), _optimizer(text, rank)] for text in methods()}
    dist.barrier()
    return results


def run_compiled(rank: int, folder: Path) -> Any:
    """A compiled module has the trajectory of one that is not."""
    torch.set_num_threads(1)
    models = []
    for compiles in (False, True):
        inner = _model()
        if compiles:
            inner = torch.compile(inner, backend="eager")
        model = DistributedDataParallel(inner)  # torch.compile wants buckets of its usual size
        model.register_comm_hook(*gradwire.ddp_comm_hook("ef(topk(0.1))"))
        assert _steps(model, torch.optim.SGD(model.parameters(), lr=0.01), rank)
        models.append(flat(model))
    dist.barrier()
    return float((models[0] - models[1]).abs().max())


def run_powersgd(rank: int, folder: Path) -> Any:
    torch.set_num_threads(1)
    results = [_hook("powersgd(1)", rank) for _ in range(20)]
    dist.barrier()
    return results


def run_golden(rank: int, folder: Path) -> Any:
    """Each method in a DistributedOptimizer, against the simulator."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    results = {text: golden.with_optimizer(text, "sequential", rank) for text in methods()}
    dist.barrier()
    return results


def _model() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(24, 24) for _ in range(6)]
    return nn.Sequential(*layers, nn.Linear(24, 4))


def _steps(model: nn.Module, optimizer: Any, rank: int) -> bool:
    is_same = True
    for step in range(STEPS):
        optimizer.zero_grad()
        draws = torch.Generator().manual_seed(10 * step + rank)
        model(torch.randn(8, 24, generator=draws)).square().mean().backward()
        optimizer.step()
        is_same = is_same and is_same_everywhere(flat(model))
    return is_same


def _hook(text: str, rank: int) -> bool:
    model, _ = ddp(_model(), text, has_names=True)
    return _steps(model, torch.optim.SGD(model.parameters(), lr=0.01), rank)


def _optimizer(text: str, rank: int) -> bool:
    model = _model()
    optimizer = gradwire.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01),
        model.named_parameters(),
        text,
        scheduling="fusion(4000, first=1000)",
        timeout_s=60,
    )
    return _steps(model, optimizer, rank)
