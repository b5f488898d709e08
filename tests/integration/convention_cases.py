"""What the ranks of test_conventions.py run, one after the other in one process group."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import gradwire as hvd
from integration.loops import flat, is_same_everywhere, make_model, sgd, train

SIZE = 2
RESUMED = ("fp16", "ef(randomk(0.2))", "powersgd(1)")


def run(rank: int, folder: Path) -> Any:
    torch.set_num_threads(1)
    found = {
        "reductions": _reductions(rank),
        "in place": _in_place(rank),
        "handles": _handles(rank),
        "gathered": hvd.allgather(torch.full((rank + 1, 2), float(rank))).tolist(),
        "broadcast": _broadcast(rank),
        "models": _models(rank),
        "object": _object(rank),
        "sum": _sum(rank),
        "resumed": {text: _resumed(text, rank, folder) for text in RESUMED},
        "refused": _refused(rank),
        "places": [hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()],
    }
    hvd.barrier()
    return found


class _Shifted:
    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        return tensor + 1, 1

    @staticmethod
    def decompress(tensor: Tensor, context: Any) -> Tensor:
        return tensor - context


def _reductions(rank: int) -> dict[str, Any]:
    x = torch.tensor([1.0 + rank, 10.0])
    whole = torch.tensor([1, 2]) + rank
    half = hvd.allreduce(x / 3, compression=hvd.Compression.fp16)
    return {
        "default": hvd.allreduce(x, name="x").tolist(),
        "average=False": hvd.allreduce(x, False).tolist(),
        "op=Sum": hvd.allreduce(x, op=hvd.Sum).tolist(),
        "scaled": hvd.allreduce(x, op=hvd.Sum, prescale_factor=2, postscale_factor=3).tolist(),
        "integers": hvd.allreduce(whole).tolist(),
        "own": hvd.allreduce(x, compression=_Shifted).tolist(),
        "fp16": [str(half.dtype), float((half - torch.tensor([0.5, 10 / 3])).abs().max()) < 2e-3],
        "push_pull": hvd.push_pull(x, name="x").tolist(),
        "push_pull sum": hvd.push_pull(x, False, "x").tolist(),
        "untouched": x.tolist() == [1.0 + rank, 10.0],
    }


def _in_place(rank: int) -> list[Any]:
    x = torch.tensor([float(rank)], requires_grad=True)  # a leaf: only its value is written
    y = torch.tensor([float(rank)])
    return [
        hvd.allreduce_(x) is x,
        float(x),
        hvd.push_pull_inplace(y, average=False) is y,
        float(y),
    ]


def _handles(rank: int) -> list[Any]:
    x, y = torch.tensor([float(rank)]), torch.tensor([float(rank)])
    handles = [
        hvd.allreduce_async(x, name="x"),
        hvd.allreduce_async_(y, op=hvd.Sum),
        hvd.push_pull_async(x),
        hvd.byteps_push_pull(torch.ones(1), average=False, name="z"),
    ]
    results = [float(hvd.synchronize(handle)) for handle in reversed(handles)][::-1]
    again = float(hvd.synchronize(handles[0]))  # the result, not another mean
    return [results, again, all(map(hvd.poll, handles)), float(x) == rank, float(y)]


def _broadcast(rank: int) -> list[Any]:
    x = torch.tensor([float(rank)])
    made = float(hvd.broadcast(x, root_rank=1))
    kept = float(x) == rank
    return [made, kept, float(hvd.broadcast_(x, root_rank=1)), float(x)]


def _models(rank: int) -> bool:
    """Lists of parameters, and other memory formats."""
    torch.manual_seed(rank)
    model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    hvd.broadcast_parameters(list(model.parameters()), root_rank=1)
    torch.manual_seed(1)
    expected = nn.Conv2d(3, 4, 3)
    return torch.equal(model.weight, expected.weight) and torch.equal(model.bias, expected.bias)


def _object(rank: int) -> Any:
    sent = {"epoch": 3, "best": [0.5, None], "seen": {1: ("a", True)}, "w": torch.arange(3)}
    received = hvd.broadcast_object(sent if rank == 0 else None)
    assert received["seen"] == {1: ("a", True)}
    return [received["epoch"], received["best"], received["w"].tolist()]


def _sum(rank: int) -> list[Any]:
    """The sum with a learning rate for the mean is the mean with the whole rate."""
    mean, total = make_model(), make_model()
    train(mean, hvd.DistributedOptimizer(sgd(mean), mean.named_parameters()), range(3), rank)
    optimizer = torch.optim.SGD(total.parameters(), lr=0.05 / SIZE)
    optimizer = hvd.DistributedOptimizer(optimizer, total.named_parameters(), op=hvd.Sum)
    is_equal = train(total, optimizer, range(3), rank)
    close = torch.allclose(flat(mean), flat(total), atol=1e-6)
    return [is_equal, close, is_same_everywhere(flat(total))]


def _resumed(text: str, rank: int, folder: Path) -> list[Any]:
    """Rank 0 saves, and loads; the others get model and optimizer from it."""
    path = folder / "checkpoint.pt"
    model = make_model()
    optimizer = hvd.DistributedOptimizer(sgd(model, momentum=0.9), model.named_parameters(), text)
    train(model, optimizer, range(3), rank)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    if rank == 0:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    torch.manual_seed(rank)
    model = nn.Sequential(
        nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)
    )
    optimizer = hvd.DistributedOptimizer(sgd(model, momentum=0.9), model.named_parameters(), text)
    if rank == 0:
        saved = torch.load(path)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        is_equal = train(model, optimizer, range(3, 6), rank)
    warned = any("loaded on some ranks only" in str(warning.message) for warning in caught)
    return [is_equal, warned, optimizer.state_dict()["gradwire"]["step"]]


def _refused(rank: int) -> dict[str, str]:
    x = torch.ones(2)
    calls: dict[str, Callable[[], Any]] = {
        "adasum": lambda: hvd.allreduce(x, op=hvd.Adasum),
        "both": lambda: hvd.allreduce(x, average=True, op=hvd.Sum),
        "unknown": lambda: hvd.allreduce(x, op="max"),
        "compression": lambda: hvd.allreduce(x, compression="ef(sign)"),
        "scalar": lambda: hvd.allgather(torch.tensor(1.0)),
        "object": lambda: hvd.broadcast_object(object() if rank == 0 else None),
    }
    found = {}
    for name, call in calls.items():
        try:
            call()
        except ValueError as error:
            found[name] = str(error)
    dist.barrier()
    return found
