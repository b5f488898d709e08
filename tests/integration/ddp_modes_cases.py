"""What the ranks of test_ddp_modes.py run: DDP with a static graph, compiled, and profiled."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from integration.loops import ddp, flat, make_model, sgd, train

SIZE = 2
COMPRESSIONS = ("identity", "ef(topk(0.1))", "ef(sign)")
STEPS = range(4)


def run(rank: int, folder: Path) -> Any:
    torch.set_num_threads(1)
    found = {
        "static": {text: _static_graph(text, rank) for text in COMPRESSIONS},
        "compiled": {text: _compiled(text, rank) for text in COMPRESSIONS},
        "ranges": _ranges(rank),
    }
    dist.barrier()  # the process ends at once: the others may still wait for what it sent
    return found


def _static_graph(text: str, rank: int) -> list[Any]:
    """Whether replicas stay equal, the steps counted, and the difference to plain DDP."""
    plain, _ = ddp(make_model(), None, static_graph=True)
    train(plain, sgd(plain), STEPS, rank)
    model, state = ddp(make_model(), text, static_graph=True)
    is_same = train(model, sgd(model), STEPS, rank)
    return [is_same, state.stats().steps, float((flat(plain) - flat(model)).abs().max())]


def _compiled(text: str, rank: int) -> list[Any]:
    """The same of `torch.compile(DDP(model))`, and the difference to DDP that is not compiled."""
    models: list[nn.Module] = []
    for compiles in (False, True):
        inner = DistributedDataParallel(make_model())
        state, hook = gradwire.ddp_comm_hook(text, timeout_s=60)
        inner.register_comm_hook(state, hook)
        model = torch.compile(inner, backend="aot_eager") if compiles else inner
        is_same = train(model, sgd(model), STEPS, rank)
        models.append(model)
    return [is_same, state.stats().steps, float((flat(models[0]) - flat(models[1])).abs().max())]


def _ranges(rank: int) -> list[str] | None:
    """The ranges of the library in a profile of all threads; None: torch has no such profile."""
    try:
        options = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    except TypeError:
        return None
    model, _ = ddp(make_model(), "ef(topk(0.1))")
    optimizer = sgd(model)
    train(model, optimizer, range(1), rank)  # makes the thread
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, experimental_config=options) as profile:
        train(model, optimizer, range(1, 3), rank)
    return sorted({e.key for e in profile.key_averages() if e.key.startswith("gradwire: ")})
