"""Training loops as users write them, on data that depends on the rank."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradwire

LR = 0.05


def make_model(width: int = 16) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(12, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 4)
    )


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(8, 12, generator=draw), torch.randint(0, 4, (8,), generator=draw)


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    inputs, targets = batch(rank, step)
    return nn.functional.cross_entropy(model(inputs), targets)


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def is_same_everywhere(x: Tensor) -> bool:
    everyone = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, x)
    return all(torch.equal(other, x) for other in everyone)


def ddp(
    model: nn.Module,
    compression: Any,
    has_names: bool = False,
    hook_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> tuple[nn.Module, Any]:
    """A model under DDP with many buckets, and the state of its hook."""
    wrapped = DistributedDataParallel(model, **{"bucket_cap_mb": 0.0005, **options})
    if compression is None:
        return wrapped, None
    named = model.named_parameters() if has_names else None
    usual: dict[str, Any] = {"timeout_s": 60, "named_parameters": named}
    state, hook = gradwire.ddp_comm_hook(compression, **{**usual, **(hook_options or {})})
    wrapped.register_comm_hook(state, hook)
    return wrapped, state


def distributed(model: nn.Module, compression: Any = "identity", **options: Any) -> Any:
    return gradwire.DistributedOptimizer(
        sgd(model), model.named_parameters(), compression, timeout_s=60, **options
    )


def is_same(model: nn.Module) -> bool:
    return is_same_everywhere(flat(model))


def train(
    model: nn.Module,
    optimizer: Any,
    steps: range,
    rank: int,
    before_step: Callable[[int], None] = lambda step: None,
) -> bool:
    """Whether all ranks had the same parameters after every step."""
    is_same = True
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        before_step(step)
        optimizer.step()
        is_same = is_same and is_same_everywhere(flat(model))
    return is_same


def sgd(model: nn.Module, **options: Any) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=LR, **options)
