"""What the ranks of test_local_updates.py run, one after the other in one process group."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from integration.local_updates_golden import (
    DILOCO,
    LOCAL_SGD,
    SIZE,
    difference,
    diloco_text,
    golden_diloco,
    golden_local_sgd,
)
from integration.local_updates_golden import prepare as prepare  # called before the ranks start
from integration.loops import batch, flat, is_same_everywhere, loss_of, make_model, sgd, train


def run(rank: int, folder: Path) -> Any:
    torch.set_num_threads(1)
    return {
        "local_sgd": {f"{c} {m}": golden_local_sgd(c, m, rank) for c, m in LOCAL_SGD},
        "diloco": {f"{c} {diloco_text(s)}": golden_diloco(c, s, rank) for c, s in DILOCO},
        "ddp": _against_ddp(rank),
        "averages": _averages(rank),
        "uneven": {name: _uneven(name, rank) for name in UNEVEN},
        "scaled": _scaled(rank),
        "norms": _batch_norm(rank),
        "start": _start(rank),
        "buffers": _other_buffers(rank),
        "types": _two_types(rank),
        "outer": _own_outer(rank),
        "continued": {name: _continued(name, rank, folder) for name in METHODS},
        "stats": _stats(rank),
        "nonfinite": _nonfinite(rank),
        "left": _left_by_an_exception(rank),
        "refused": _refused(rank),
        "added": _added_parameters(rank),
        "warned": _warned(),
    }


def _against_ddp(rank: int) -> float:
    plain, own = DistributedDataParallel(make_model()), make_model()
    train(plain, sgd(plain), range(5), rank)
    optimizer = sgd(own)
    with gradwire.local_sgd(own, optimizer, period=1, timeout_s=60):
        train(own, optimizer, range(5), rank)
    return difference(own, flat(plain))


def _averages(rank: int) -> list[list[bool]]:
    """After which of six steps ranks have the same bits, for period 2, 3 with several methods."""
    found = []
    for compression, period in (("identity", 2), ("ef(topk(0.1))", 3), ("ef(sign)", 2)):
        model = make_model()
        optimizer, same = sgd(model), []
        with gradwire.local_sgd(model, optimizer, period=period, compression=compression):
            for step in range(6):
                train(model, optimizer, range(step, step + 1), rank)
                same.append(is_same_everywhere(flat(model)))
        found.append(same)
    return found


UNEVEN: dict[str, Callable[..., Any]] = {
    "local_sgd": lambda *given: gradwire.local_sgd(*given, period=3, compression="ef(topk(0.2))"),
    "momentum": lambda *given: gradwire.local_sgd(*given, period=3, momentum="average"),
    "diloco": lambda *given: gradwire.diloco(*given, period=4, fragments=2),
    "delay": lambda *given: gradwire.diloco(*given, period=4, fragments=2, delay=3, mixing=0.5),
}


def _uneven(name: str, rank: int) -> list[Any]:
    """Rank 1 has fewer batches."""
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with UNEVEN[name](model, optimizer) as context:
        for step in range(13 if rank == 0 else 4):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()
            if step == 6:  # where rank 1 has left
                context.flush()
    return [context.num_steps, is_same_everywhere(flat(model))]


def _scaled(rank: int) -> list[Any]:
    """Rank 1 has infinite gradients in one step."""
    model = make_model()
    optimizer, scaler = sgd(model), torch.amp.GradScaler("cpu", init_scale=8.0)
    with gradwire.local_sgd(model, optimizer, period=2, compression="ef(topk(0.2))") as context:
        for step in range(6):
            optimizer.zero_grad()
            loss = loss_of(model, rank, step)
            scaler.scale(loss * float("inf") if step == 2 and rank == 1 else loss).backward()
            scaler.step(optimizer)
            scaler.update()
    return [context.num_steps, is_same_everywhere(flat(model))]


def _batch_norm(rank: int) -> Any:
    """Statistics of ranks that see different numbers of other data."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 6), nn.BatchNorm1d(6), nn.Linear(6, 4))
    model.register_buffer("constant", torch.arange(4.0))
    optimizer = sgd(model)
    context = gradwire.local_sgd(model, optimizer, period=4, timeout_s=60)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()
    if rank == 1:
        model(batch(rank, 9)[0])
    norm = model[1]
    expected = norm.running_mean.clone()
    dist.all_reduce(expected)
    context.flush()
    context.close()
    statistics = torch.cat([norm.running_mean, norm.running_var, norm.num_batches_tracked[None]])
    difference = float((expected / SIZE - norm.running_mean).abs().max())
    return [difference, is_same_everywhere(statistics), int(norm.num_batches_tracked)]


def _start(rank: int) -> list[bool]:
    """All ranks begin with the model of rank 0."""
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(12, 6), nn.BatchNorm1d(6))
    model[1].running_mean.fill_(1.0 + rank)
    model.register_buffer("mask", torch.tensor([rank == 0, rank == 1]))
    model.register_buffer("nothing", torch.empty(0))
    model.register_buffer("complex", torch.full((2,), 1j * rank))
    before = flat(model)
    gradwire.local_sgd(model, sgd(model), timeout_s=60).remove()
    has_changed = not torch.equal(before, flat(model))
    return [
        is_same_everywhere(flat(model)),
        has_changed == (rank != 0),
        float(model[1].running_mean[0]) == 1.0,
        model.mask.tolist() == [True, False],
        float(model.complex.abs().max()) == 0.0,
    ]


def _other_buffers(rank: int) -> list[Any]:
    model = make_model()
    model.register_buffer("mask", torch.tensor([False, False, True]))
    model.register_buffer("counts", torch.tensor([0, 0], dtype=torch.int16))
    model.register_buffer("waves", torch.zeros(2, dtype=torch.complex64))
    with gradwire.local_sgd(model, sgd(model), timeout_s=60):
        if rank == 1:
            model.mask[0] = True
            model.counts[1] = 5
            model.waves[0] = 2 + 4j
    waves = torch.view_as_real(model.waves)
    return [model.mask.tolist(), model.counts.tolist(), waves.tolist()]


def _two_types(rank: int) -> bool:
    model = nn.ModuleDict({"a": make_model(), "b": nn.Linear(3, 2, dtype=torch.bfloat16)})
    optimizer = sgd(model)
    with gradwire.local_sgd(model, optimizer, period=2, compression="ef(topk(0.2))"):
        for step in range(4):
            optimizer.zero_grad()
            loss_of(model["a"], rank, step).backward()
            model["b"](torch.full((1, 3), float(rank + 1), dtype=torch.bfloat16)).sum().backward()
            optimizer.step()
    return is_same_everywhere(
        torch.cat([p.detach().reshape(-1).float() for p in model.parameters()])
    )


def _own_outer(rank: int) -> list[Any]:
    """Adam outside, with a schedule of its rate; the mean is kept by SGD(1)."""
    model = make_model()
    optimizer = sgd(model)
    context = gradwire.diloco(
        model, optimizer, outer=lambda p: torch.optim.Adam(p, lr=0.01), period=2, timeout_s=60
    )
    scheduler = torch.optim.lr_scheduler.StepLR(context.outer, 1, gamma=0.5)
    with context:
        for step in range(4):
            train(model, optimizer, range(step, step + 1), rank)
        scheduler.step()
    averaged, stepped = make_model(), make_model()
    for own, make in ((averaged, gradwire.local_sgd), (stepped, gradwire.diloco)):
        options = {} if own is averaged else {"outer": lambda p: torch.optim.SGD(p, lr=1.0)}
        optimizer = sgd(own)
        with make(own, optimizer, period=2, timeout_s=60, **options):
            train(own, optimizer, range(5), rank)
    return [
        is_same_everywhere(flat(model)),
        context.outer.param_groups[0]["lr"],
        difference(averaged, flat(stepped)),
    ]


METHODS: dict[str, Callable[..., Any]] = {
    "local_sgd": lambda *given: gradwire.local_sgd(*given, period=3, compression="ef(topk(0.1))"),
    "diloco": lambda *given: gradwire.diloco(*given, period=4, fragments=2, delay=3),
    "choco": lambda *given: gradwire.decentralized(
        *given, graph="ring", algorithm="choco(0.3)", compression="topk(0.2)", period=3
    ),
    "subgradient": lambda *given: gradwire.decentralized(*given, algorithm="subgradient", period=3),
}


def _continued(name: str, rank: int, folder: Path) -> float:
    """The difference between a run that is saved in the middle of a round, and one that is not."""
    models = []
    for splits in (False, True):
        model = make_model()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        context = METHODS[name](model, optimizer)
        train(model, optimizer, range(5), rank)
        if splits:
            path = folder / f"{name}{rank}.pt"
            parts = {"model": model, "optimizer": optimizer, "context": context}
            torch.save({key: part.state_dict() for key, part in parts.items()}, path)
            context.remove()
            saved = torch.load(path, weights_only=True)
            model = make_model()
            optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
            parts = {
                "context": METHODS[name](model, optimizer),
                "model": model,
                "optimizer": optimizer,
            }
            for key, part in parts.items():
                part.load_state_dict(saved[key])
            context = parts["context"]
        train(model, optimizer, range(5, 10), rank)
        context.close()
        models.append(flat(model))
    return float((models[0] - models[1]).abs().max())


def _stats(rank: int) -> Any:
    found = {}
    for name, compression in (("dense", "identity"), ("sparse", "ef(topk(0.1))")):
        model = make_model(64)
        optimizer = sgd(model)
        context = gradwire.local_sgd(model, optimizer, period=4, compression=compression)
        before = context.stats()
        train(model, optimizer, range(8), rank)
        stats = context.stats()
        context.close()
        found[name] = {
            "before": [before.steps, before.bytes_sent],
            "steps": stats.steps,
            "sent": stats.bytes_sent,
            "received": stats.bytes_received,
            "dense": stats.dense_bytes,
            "ratio": stats.ratio,
            "exposed": stats.exposed_s,
            "numel": len(flat(model)),
        }
    return found


def _nonfinite(rank: int) -> Any:
    """Rank 1 has NaN; afterwards the communicator still works."""
    model = make_model()
    optimizer = sgd(model)
    context = gradwire.local_sgd(model, optimizer, period=2, compression="ef(topk(0.1))")
    train(model, optimizer, range(1), rank)
    if rank == 1:
        with torch.no_grad():
            model[0].weight[0, 0] = float("nan")
    try:
        train(model, optimizer, range(1, 2), rank)
        text = ""
    except gradwire.core.errors.NonFiniteError as error:
        text = str(error)
    context.remove()
    return [text, _averages(rank) == AVERAGES]


AVERAGES = [
    [False, True] * 3,
    [False, False, True] * 2,
    [False, True] * 3,
]


def _left_by_an_exception(rank: int) -> bool:
    """An exception leaves the context on all ranks without an exchange."""
    model = make_model()
    optimizer = sgd(model)
    try:
        with gradwire.local_sgd(model, optimizer, period=2, timeout_s=60):
            train(model, optimizer, range(1), rank)
            raise KeyError("the user's own")
    except KeyError:
        pass
    train(model, optimizer, range(3), rank)
    return is_same_everywhere(flat(model))


def _refused(rank: int) -> list[Any]:
    model = make_model()
    optimizer = sgd(model)
    made = {
        "whole": gradwire.local_sgd(model, optimizer),
        "two": gradwire.diloco(model, optimizer, fragments=2),
        "three": gradwire.diloco(model, optimizer, fragments=3),
        "sign": gradwire.local_sgd(model, optimizer, compression="ef(sign)"),
    }
    for context in made.values():
        context.remove()

    def load(into: str, saved: str) -> None:
        made[into].load_state_dict(made[saved].state_dict())

    return [
        _message(lambda: gradwire.diloco(model, optimizer, fragments=7)),
        bool(optimizer._optimizer_step_post_hooks),
        _message(lambda: load("two", "whole")),
        _message(lambda: load("three", "two")),
        _message(lambda: load("sign", "whole")),
    ]


def _message(call: Callable[[], Any]) -> str:
    try:
        call()
    except ValueError as error:
        return str(error)
    return ""


def _added_parameters(rank: int) -> str:
    model, more = make_model(), nn.Linear(4, 4)
    optimizer = sgd(model)
    context = gradwire.local_sgd(model, optimizer, period=2)
    train(model, optimizer, range(1), rank)
    optimizer.add_param_group({"params": more.parameters()})
    message = _message(lambda: train(model, optimizer, range(1), rank))
    context.remove()
    return message


def _warned() -> list[Any]:
    """Where a warning of a compression without feedback points to."""
    model = make_model()
    found = []
    for make in (gradwire.local_sgd, gradwire.diloco):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            make(model, sgd(model), compression="topk(0.1)").remove()
        found.append([(one.category.__name__, Path(one.filename).name) for one in caught])
    return found
