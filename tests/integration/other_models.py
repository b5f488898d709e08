"""Models that are not stacks of float32 layers: 16 bits, channels last, tied weights."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from integration.loops import ddp, flat, is_same_everywhere, make_model, sgd

COMPRESSIONS = {
    "bfloat16": "ef(topk(0.1))",
    "float16": "ef(topk(0.1))",
    "channels_last": "ef(sign)",
    "tied": "ef(topk(0.1))",
}
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def with_hook(rank: int) -> dict[str, bool]:
    """Whether replicas stay equal."""
    found = {}
    for name, compression in COMPRESSIONS.items():
        model, _ = ddp(_make(name), compression)
        found[name] = _train(name, model, sgd(model), rank)
    return found


def with_optimizer(rank: int) -> dict[str, list[Any]]:
    """Whether replicas stay equal, and the difference of `identity` to plain DDP."""
    found = {}
    for name, compression in COMPRESSIONS.items():
        model, own = _make(name), _make(name)
        is_same = _train(name, model, _distributed(model, compression), rank)
        is_same = _train(name, own, _distributed(own, "identity"), rank) and is_same
        plain = DistributedDataParallel(_make(name))
        _train(name, plain, sgd(plain), rank)
        found[name] = [is_same, float((flat(plain) - flat(own)).abs().max())]
    return found


def _distributed(model: nn.Module, compression: str) -> Any:
    return gradwire.DistributedOptimizer(
        sgd(model), model.named_parameters(), compression, timeout_s=60
    )


def _make(name: str) -> nn.Module:
    if name in _DTYPES:
        return make_model().to(_DTYPES[name])
    if name == "channels_last":
        torch.manual_seed(0)
        convolutions = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))
        return convolutions.to(memory_format=torch.channels_last)
    tied = make_model()
    tied[2].weight = nn.Parameter(torch.randn(16, 16, generator=torch.Generator().manual_seed(1)))
    tied[4].weight.requires_grad_(False)
    for number in (5, 6):
        tied.append(nn.Linear(4, 4))
        nn.init.zeros_(tied[number].bias)
    tied[5].weight = nn.Parameter(torch.eye(4))
    tied[6].weight = tied[5].weight
    return tied


def _inputs(name: str, rank: int, step: int) -> Tensor:
    draws = torch.Generator().manual_seed(step + 10 * rank)
    if name == "channels_last":
        x = torch.randn(2, 3, 8, 8, generator=draws)
        return x.to(memory_format=torch.channels_last)
    x = torch.randn(8, 12, generator=draws)
    return x.to(_DTYPES.get(name, x.dtype))


def _train(name: str, model: nn.Module, optimizer: Any, rank: int) -> bool:
    """Whether replicas were equal, and gradients in the memory format of the parameters."""
    is_good = True
    for step in range(4):
        optimizer.zero_grad()
        model(_inputs(name, rank, step)).square().mean().backward()
        trained = [p for p in model.parameters() if p.requires_grad]
        is_good = is_good and all(p.grad.stride() == p.stride() for p in trained)
        optimizer.step()
        is_good = is_good and is_same_everywhere(flat(model).float())
    return is_good
