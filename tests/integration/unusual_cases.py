"""What the ranks of test_unusual.py run, one after the other in one process group."""

import gc
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.utils.checkpoint import checkpoint

import gradwire
from integration.loops import batch, ddp, flat, is_same_everywhere, loss_of, make_model, sgd, train

SIZE = 2


def run(rank: int, folder: Path) -> Any:
    torch.set_num_threads(1)
    found = {
        "scheduler": [_short_window(rank, has_scheduler) for has_scheduler in (False, True)],
        "refused": _refused_with_a_scheduler(rank),
        "scale": {name: _changing_scale(name, rank) for name in ("hook", "optimizer")},
        "unscaled": _scale_that_is_not_known(rank),
        "grown": _grown(rank),
        "empty": _empty_parameter(rank),
        "reentrant": {name: _reentrant(name, rank) for name in ("hook", "optimizer")},
        "tasks": _tasks_left(rank),
    }
    dist.barrier()  # the process ends at once: the others may still wait for what it sent
    return found


def _distributed(model: nn.Module, compression: str, **options: Any) -> Any:
    return gradwire.DistributedOptimizer(
        sgd(model), model.named_parameters(), compression, timeout_s=60, **options
    )


def _error_of(call: Any) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _short_window(rank: int, has_scheduler: bool) -> list[float]:
    """The last window has one backward pass of two, which step() has to average by itself."""
    model = make_model()
    optimizer = sgd(model)
    if has_scheduler:  # it keeps the step of the optimizer as it is now
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100)
    optimizer = gradwire.DistributedOptimizer(
        optimizer, model.named_parameters(), backward_passes_per_step=2, timeout_s=60
    )
    for window in ((0, 1), (2,)):
        optimizer.zero_grad()
        for step in window:
            loss_of(model, rank, step).backward()
        optimizer.step()
        if has_scheduler:
            scheduler.step()
    assert is_same_everywhere(flat(model))
    return [float(x) for x in flat(model)[:20]]


def _refused_with_a_scheduler(rank: int) -> str:
    """A step after a backward pass that failed."""
    model = make_model()
    optimizer = sgd(model)
    torch.optim.lr_scheduler.StepLR(optimizer, 100)
    optimizer = gradwire.DistributedOptimizer(optimizer, model.named_parameters(), timeout_s=60)
    train(model, optimizer, range(1), rank)

    def fail(grad: Tensor) -> Tensor:
        raise ArithmeticError("something is wrong here")

    handle = model[0].weight.register_hook(fail)
    before = _error_of(lambda: loss_of(model, rank, 1).backward())
    handle.remove()
    return f"{before}; {_error_of(optimizer.step)}"


def _scaled_run(name: str, rank: int, scales: list[float], *, is_known: bool = True) -> Tensor:
    scaler = torch.amp.GradScaler("cpu", init_scale=scales[0], growth_interval=1000)
    options: dict[str, Any] = {"scaler": scaler} if is_known else {}
    model: nn.Module = make_model()
    if name == "hook":
        model, _ = ddp(model, "ef(topk(0.1))", hook_options=options)
        optimizer: Any = sgd(model)
    else:
        optimizer = _distributed(model, "ef(topk(0.1))", **options)
    for step, scale in enumerate(scales):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, rank, step)).backward()
        scaler.step(optimizer)
        scaler.update(scale if step else None)
    assert is_same_everywhere(flat(model))
    return flat(model)


CONSTANT, CHANGING = [1.0] * 6, [1.0, 1024.0, 1024.0, 64.0, 2.0, 4096.0]


def _changing_scale(name: str, rank: int) -> bool:
    """Whether training is as with a constant scale, bit for bit: scales are powers of two."""
    return torch.equal(_scaled_run(name, rank, CONSTANT), _scaled_run(name, rank, CHANGING))


def _scale_that_is_not_known(rank: int) -> bool:
    runs = [_scaled_run("hook", rank, own, is_known=False) for own in (CONSTANT, CHANGING)]
    return torch.equal(*runs)


class _Sum(nn.Module):
    """Its gradients are what it is multiplied with."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(torch.zeros(size)) for size in sizes)

    def forward(self, factors: list[Tensor]) -> Tensor:
        return sum((own * part).sum() for own, part in zip(factors, self.parts))  # type: ignore[return-value]


def _grown(rank: int) -> float:
    """What was given, less what was applied and what is owed, when a bucket has got a tensor."""
    model = _Sum(60, 40)
    first, second = model.parts
    optimizer = gradwire.DistributedOptimizer(
        torch.optim.SGD([first], lr=1.0), model.named_parameters(), "ef(topk(0.1))", timeout_s=60
    )
    given, applied = torch.zeros(100), torch.zeros(100)
    for step in range(6):
        if step == 3:
            optimizer.add_param_group({"params": [second]})
        draws = torch.Generator().manual_seed(10 * step + rank)
        factors = [torch.randn(60, generator=draws), torch.randn(40, generator=draws)]
        optimizer.zero_grad()
        model(factors).backward()
        given[:60] += factors[0]
        if step >= 3:
            given[60:] += factors[1]
        optimizer.step()
        applied[:60] += first.grad
        if step >= 3:
            applied[60:] += second.grad
    owed = torch.zeros(100)
    for row in optimizer.state_dict()["gradwire"]["buckets"]:
        for name, start, stop, _ in row["tensors"]:
            place = slice(0, 60) if name == "parts.0" else slice(60, 100)
            owed[place] = row["state"]["residual"][start:stop]
    total = given - owed
    dist.all_reduce(total)
    return float((total / SIZE - applied).abs().max())


def _empty_parameter(rank: int) -> bool:
    """Nothing of it is exchanged, and nothing refused."""
    model = _Sum(30, 0)
    optimizer = _distributed(model, "ef(topk(0.1))")
    for step in range(3):
        optimizer.zero_grad()
        draws = torch.Generator().manual_seed(10 * step + rank)
        model([torch.randn(30, generator=draws), torch.empty(0)]).backward()
        optimizer.step()
    return is_same_everywhere(flat(model))


class _Checkpointed(nn.Module):
    """The last layers are computed again, so their gradients are the first ones."""

    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.model, self._use_reentrant = make_model(), use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        own = self.model[:2](x)
        return checkpoint(self.model[2:], own, use_reentrant=self._use_reentrant)  # type: ignore[no-any-return]


def _reentrant(name: str, rank: int) -> list[Any]:
    found: list[Any] = []
    for use_reentrant in (True, False):
        model: nn.Module = _Checkpointed(use_reentrant=use_reentrant)
        if name == "hook":
            model, _ = ddp(model, "ef(topk(0.1))")
            optimizer: Any = sgd(model)
        else:
            optimizer = _distributed(model, "ef(topk(0.1))", scheduling="wfbp")

        def steps(model: nn.Module = model, optimizer: Any = optimizer) -> None:
            for number in range(2):  # in the first one DDP has one bucket
                optimizer.zero_grad()
                inputs, targets = batch(rank, number)
                nn.functional.cross_entropy(model(inputs), targets).backward()
                optimizer.step()

        found += [_error_of(steps), is_same_everywhere(flat(model))]
    return found


def _tasks_left(rank: int) -> list[int]:
    """How many programs are remembered after some rounds, and after many more."""
    model = make_model()
    optimizer = sgd(model)
    found = []
    with gradwire.local_sgd(model, optimizer, period=1, timeout_s=60):
        for step in range(24):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()
            if step in (7, 23):
                gc.collect()
                found.append(
                    sum(type(known).__name__ == "RunningProgram" for known in gc.get_objects())
                )
    return found


def joined(rank: int, folder: Path) -> Any:
    """Rank 1 has fewer batches, in torch's own context for that."""
    model, _ = ddp(make_model(), "ef(topk(0.1))")
    optimizer = sgd(model)

    def run() -> None:
        with Join([model]):
            train_some(model, optimizer, 2 - rank, rank)

    return _error_of(run)


def train_some(model: nn.Module, optimizer: Any, count: int, rank: int) -> None:
    for step in range(count):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()


def loaded_on_one_rank(rank: int, folder: Path) -> Any:
    """After the first step, when states are no longer compared with everything else."""
    model = make_model()
    optimizer = _distributed(model, "ef(topk(0.1))", scheduling="wfbp")
    train_some(model, optimizer, 3, rank)
    if rank == 1:
        optimizer.load_state_dict(optimizer.state_dict())
    return [_error_of(lambda: train_some(model, optimizer, 2, rank)) for _ in range(2)]
