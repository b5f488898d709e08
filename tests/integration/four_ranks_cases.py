"""What the ranks of test_four_ranks.py run: methods that take other routes than between two."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import gradwire
from integration.loops import ddp, flat, make_model, sgd, train

SIZE = 4
STEPS = 4  # the first half: DDP rebuilds its buckets, and states move
WIDTH = 300  # WIDTH^2 elements in the largest tensor
METHODS = ("identity", "fp16", "ef(sign)", "ef(topk(0.1))", "powersgd(1)")


def run(rank: int, folder: Path) -> Any:
    torch.set_num_threads(1)
    plain, _ = ddp(make_model(WIDTH), None)
    train(plain, sgd(plain), range(STEPS), rank)
    found = {
        text: {"hook": _hook(text, rank, flat(plain)), "optimizer": _own(text, rank, flat(plain))}
        for text in METHODS
    }
    dist.barrier()  # the process ends at once: the others may still wait for what it sent
    return found


def _hook(compression: str, rank: int, plain: Tensor) -> list[Any]:
    model, state = ddp(make_model(WIDTH), compression)
    return _found(model, sgd(model), state, rank, plain)


def _own(compression: str, rank: int, plain: Tensor) -> list[Any]:
    model = make_model(WIDTH)
    optimizer = gradwire.DistributedOptimizer(
        sgd(model), model.named_parameters(), compression, timeout_s=60
    )
    return _found(model, optimizer, optimizer, rank, plain)


def _found(model: nn.Module, optimizer: Any, counted: Any, rank: int, plain: Tensor) -> list[Any]:
    """Whether replicas stay equal, the difference to plain DDP, and bytes sent in a later step."""
    is_same = train(model, optimizer, range(STEPS // 2), rank)
    before = counted.stats()
    is_same = train(model, optimizer, range(STEPS // 2, STEPS), rank) and is_same
    later = counted.stats().since(before)
    difference = float((flat(model) - plain).abs().max())
    return [is_same, difference, later.bytes_sent / later.steps]
