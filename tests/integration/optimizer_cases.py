"""What the ranks of test_optimizer.py run, one after the other in one process group."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from integration import golden, measured_cases, other_models
from integration.loops import (
    distributed,
    flat,
    is_same,
    is_same_everywhere,
    loss_of,
    make_model,
    sgd,
    train,
)

SIZE = 2
METHODS = (
    ("identity", "sequential"),
    ("ef(topk(0.1))", "sequential"),
    ("ef(topk(0.1))", "wfbp"),
    ("ef(sign)", 'sequential("layer")'),
    ("qsgd(bits=4)", "wfbp"),
    ("powersgd(1)", "fusion(3000, first=500)"),
    ("ef(qsgd(bits=4) >> huffman)", "mgwfbp(groups=(2,))"),
)


REMEMBER_THE_MEAN = ("ef21(topk(0.1))", "gmc(topk(0.1))", "threepc(topk(0.1), zeta=1.0)")


def run(rank: int, folder: Path) -> Any:
    torch.set_num_threads(1)
    found = {
        "exact": {name: _against_ddp(name, rank) for name in ("sequential", "wfbp", "fusion")},
        "golden": {f"{c} {s}": golden.with_optimizer(c, s, rank) for c, s in METHODS},
        "passes": _passes(rank),
        "closure": _closure(rank),
        "groups": _added_group(rank),
        "unused": _unused(rank),
        "sparse": _sparse(rank),
        "own": _own_compressor(rank),
        "interrupted": {name: _interrupted(name, rank) for name in ("sequential", "wfbp")},
        "frozen": _frozen(rank),
        "in place": {name: _in_place(name, rank) for name in REMEMBER_THE_MEAN},
        "resaved": _resaved(rank),
        "scheduler": _with_scheduler(rank),
        "continued": _continued(rank, folder),
        "broadcast": _broadcast(rank),
        "reduced": [
            float(gradwire.allreduce(torch.tensor(float(rank)))),
            float(gradwire.push_pull(torch.tensor(float(rank)), average=False)),
        ],
        "scaled": _scaled(rank),
        "hooks": _step_hooks(rank),
        **measured_cases.run(rank),
        "shapes": other_models.with_optimizer(rank),
    }
    dist.barrier()  # the process ends at once: the others may still wait for what it sent
    return found


def _against_ddp(scheduling: str, rank: int) -> float:
    """With clipping, which needs the mean gradient before step()."""
    plain = DistributedDataParallel(make_model())
    own = make_model()
    for model, optimizer in ((plain, sgd(plain)), (own, distributed(own, scheduling=scheduling))):

        def clip(step: int, model: nn.Module = model) -> None:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)

        train(model, optimizer, range(5), rank, clip)
    return float((flat(plain) - flat(own)).abs().max())


def _passes(rank: int) -> float:
    """Three backward passes before each step, the last window is incomplete."""
    whole, parts = make_model(), make_model()
    optimizers = distributed(whole), distributed(parts, backward_passes_per_step=3)
    for window in ((0, 1, 2), (3, 4, 5), (6, 7)):
        for model, optimizer in zip((whole, parts), optimizers):
            optimizer.zero_grad()
            if model is whole:
                sum(loss_of(model, rank, step) for step in window).backward()
            else:
                for step in window:
                    loss_of(model, rank, step).backward()
            optimizer.synchronize()
            with optimizer.skip_synchronize():
                optimizer.step()
    return float((flat(whole) - flat(parts)).abs().max())


def _closure(rank: int) -> float:
    plain, own = make_model(), make_model()
    with_closure, without = distributed(own), distributed(plain)
    for step in range(3):

        def closure(step: int = step) -> Tensor:
            with_closure.zero_grad()
            loss = loss_of(own, rank, step)
            loss.backward()
            return loss

        with_closure.step(closure)
    train(plain, without, range(3), rank)
    return float((flat(plain) - flat(own)).abs().max())


def _added_group(rank: int) -> bool:
    model, head = make_model(), nn.Linear(4, 3)
    with torch.no_grad():
        head.weight.fill_(0.1)
        head.bias.zero_()
    optimizer = gradwire.DistributedOptimizer(sgd(model), compression="ef(topk(0.2))")
    train(model, optimizer, range(2), rank)
    optimizer.add_param_group({"params": head.parameters(), "lr": 0.01})
    for step in range(3):
        optimizer.zero_grad()
        x = torch.randn(8, 12, generator=torch.Generator().manual_seed(step + 10 * rank))
        head(model(x)).square().mean().backward()
        optimizer.step()
    moved = float((head.weight - 0.1).abs().max()) > 0
    return moved and is_same_everywhere(torch.cat([flat(model), flat(head)]))


def _unused(rank: int) -> bool:
    """In each step another rank uses a layer."""
    model = nn.ModuleDict({"always": make_model(), "sometimes": nn.Linear(12, 4)})
    gradwire.broadcast_parameters(model.state_dict())
    optimizer = distributed(model, "ef(topk(0.2))", scheduling="wfbp")
    is_equal = True
    for step in range(4):
        optimizer.zero_grad()
        x = torch.randn(8, 12, generator=torch.Generator().manual_seed(step + 10 * rank))
        y = model["always"](x)
        if step % 2 == rank:
            y = y + model["sometimes"](x)
        y.square().mean().backward()
        optimizer.step()
        is_equal = is_equal and is_same(model)
    return is_equal


def _fail(grad: Tensor) -> Tensor:
    raise ArithmeticError("something is wrong here")


def _interrupted(scheduling: str, rank: int) -> list[Any]:
    """On all ranks an exception ends a backward pass in the middle, and training continues."""
    model = make_model()
    optimizer = distributed(model, "ef(topk(0.2))", scheduling=scheduling)
    train(model, optimizer, range(2), rank)
    handle = model[2].register_full_backward_hook(lambda *arguments: _fail(arguments[1][0]))
    messages = []
    try:
        loss_of(model, rank, 2).backward()
    except ArithmeticError as error:
        messages.append(str(error))
    handle.remove()
    for call in (optimizer.step, lambda: train(model, optimizer, range(3, 5), rank)):
        try:
            call()
        except RuntimeError as error:
            messages.append(str(error))
    return [messages, optimizer.stats().steps, is_same(model)]


def _frozen(rank: int) -> list[Any]:
    """Layers that are frozen and trained at other times."""
    model = make_model()
    head, rest = list(model[4].parameters()), list(model[:4].parameters())
    for parameter in rest:
        parameter.requires_grad_(False)
    optimizer = gradwire.DistributedOptimizer(
        torch.optim.SGD(head, lr=0.05, momentum=0.9), model.named_parameters(), timeout_s=60
    )
    train(model, optimizer, range(2), rank)
    for parameter in rest:
        parameter.requires_grad_(True)
    optimizer.add_param_group({"params": rest})
    found = [train(model, optimizer, range(2, 4), rank)]
    before = model[4].weight.detach().clone()
    for parameter in head:  # a gradient of zeros would move them by their momentum
        parameter.requires_grad_(False)
    found += [train(model, optimizer, range(4, 6), rank), torch.equal(before, model[4].weight)]
    other = make_model()
    other[0].weight.requires_grad_(False)
    optimizer = distributed(other)
    train(other, optimizer, range(1), rank)
    other[0].weight.requires_grad_(True)
    loss_of(other, rank, 1).backward()
    for call in (
        optimizer.step,
        lambda: optimizer.add_param_group({"params": nn.Linear(2, 2).parameters()}),
    ):
        try:
            call()
        except (RuntimeError, ValueError) as error:
            found.append(str(error))
    return found


def _in_place(compression: str, rank: int) -> float:
    """Whether it matters that gradients are scaled in place, as by clipping."""
    models = make_model(), make_model()
    for number, model in enumerate(models):
        optimizer = distributed(model, compression)
        for step in range(4):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            for parameter in model.parameters():
                if number:
                    parameter.grad.mul_(0.5)
                else:
                    parameter.grad = parameter.grad * 0.5
            optimizer.step()
    return float((flat(models[0]) - flat(models[1])).abs().max())


def _resaved(rank: int) -> bool:
    """A state that was loaded and is saved again before the first step."""
    model = make_model()
    optimizer = distributed(model, "ef(topk(0.2))")
    train(model, optimizer, range(2), rank)
    saved, other = optimizer.state_dict(), distributed(make_model(), "ef(topk(0.2))")
    other.load_state_dict(saved)
    return bool(other.state_dict()["gradwire"]["step"] == saved["gradwire"]["step"] == 2)


def _sparse(rank: int) -> Any:
    found = []
    for densifies in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Flatten(), nn.Linear(8, 1))
        optimizer = distributed(model, "ef(topk(0.5))", sparse_as_dense=densifies)
        try:
            model(torch.tensor([[rank, 3]])).sum().backward()
            optimizer.step()
            found.append(is_same(model))
        except ValueError as error:
            found.append(str(error))
    return found


class _Halves:
    """Horovod's convention of a compressor."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        return tensor.to(torch.bfloat16), tensor.dtype

    @staticmethod
    def decompress(tensor: Tensor, context: Any) -> Tensor:
        return tensor.to(context)


def _own_compressor(rank: int) -> list[float]:
    exact, own = make_model(), make_model()
    train(exact, distributed(exact), range(3), rank)
    is_equal = train(own, distributed(own, _Halves), range(3), rank)
    return [float(is_equal), float((flat(exact) - flat(own)).abs().max())]


def _with_scheduler(rank: int) -> list[float]:
    model = make_model()
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    optimizer = gradwire.DistributedOptimizer(optimizer, model.named_parameters())
    rates = []
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()
        scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


def _continued(rank: int, folder: Path) -> float:
    whole, first, second = make_model(), make_model(), make_model()
    train(whole, _momentum(whole), range(6), rank)
    optimizer = _momentum(first)
    train(first, optimizer, range(3), rank)
    path = folder / f"optimizer{rank}.pt"
    torch.save({"model": first.state_dict(), "optimizer": optimizer.state_dict()}, path)
    saved = torch.load(path, weights_only=True)
    second.load_state_dict(saved["model"])
    optimizer = _momentum(second)
    optimizer.load_state_dict(saved["optimizer"])
    train(second, optimizer, range(3, 6), rank)
    return float((flat(whole) - flat(second)).abs().max())


def _momentum(model: nn.Module) -> Any:
    made = torch.optim.Adam(model.parameters(), lr=0.01)
    return gradwire.DistributedOptimizer(made, model.named_parameters(), "ef(topk(0.1))")


def _broadcast(rank: int) -> bool:
    """A model and an Adam that only rank 1 has trained."""
    torch.manual_seed(rank)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1 + rank, betas=(0.5, 0.9))
    if rank == 1:
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    gradwire.broadcast_parameters(model.named_parameters(), root_rank=1)
    gradwire.broadcast_optimizer_state(optimizer, root_rank=1)
    state = optimizer.state_dict()
    (group,) = state["param_groups"]
    assert group["betas"] == (0.5, 0.9)
    own = torch.cat([state["state"][0]["exp_avg"].reshape(-1), torch.tensor([group["lr"]])])
    assert float(own[-1]) > 1
    return is_same(model) and is_same_everywhere(own)


def _scaled(rank: int) -> list[Any]:
    model = make_model()
    optimizer, scaler = distributed(model, "ef(sign)"), torch.amp.GradScaler("cpu", init_scale=8.0)
    moved = []
    for step in range(4):
        before = flat(model).clone()
        optimizer.zero_grad()
        loss = loss_of(model, rank, step)
        scaler.scale(loss * float("inf") if step == 1 and rank == 0 else loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        moved.append(not torch.equal(before, flat(model)))
    return [moved, is_same(model)]


def _step_hooks(rank: int) -> int:
    model, calls = make_model(), []
    optimizer = distributed(model)
    optimizer.register_step_post_hook(lambda *arguments: calls.append(1))
    optimizer.load_state_dict(optimizer.state_dict())
    train(model, optimizer, range(2), rank)
    return len(calls)
