"""What the ranks of test_ddp.py run, one after the other in one process group."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import gradwire
from integration import golden, other_models
from integration.golden import HOOKS
from integration.loops import ddp, flat, is_same_everywhere, loss_of, make_model, sgd, train

SIZE = 2
COMPRESSIONS = (
    "identity",
    "fp16",
    "ef(topk(0.1))",
    "ef(topk(0.1) >> fp16)",
    "ef(sign)",
    "qsgd(bits=4)",
    "powersgd(1)",
    "dgc(0.1)",
    'partition({"0.*": ef(sign), "*": ef(topk(0.1))})',
)


def run(rank: int, folder: Path) -> Any:
    torch.set_num_threads(1)
    found = {
        "exact": _difference_to_ddp("identity", rank),
        "near": _difference_to_ddp("fp16", rank),
        "halves": _difference_to_torchs_fp16_hook(rank),
        "same": {text: _replicas_stay_equal(text, rank) for text in COMPRESSIONS},
        "owed": _owed_after_rebuild(rank),
        "accumulated": _accumulated(rank),
        "unused": _unused(rank),
        "scaled": _scaled(rank),
        "continued": _continued(rank, folder),
        "stats": _stats(rank),
        "resized": _from_more_ranks(rank),
        "shapes": other_models.with_hook(rank),
        "views": _bucket_views(rank),
        "golden": {f"{c} {own}": golden.with_hook(c, own, rank) for c, own in HOOKS},
    }
    dist.barrier()  # the process ends at once: the others may still wait for what it sent
    return found


def _difference_to_ddp(compression: str, rank: int) -> float:
    models = []
    for own in (None, compression):
        model, _ = ddp(make_model(), own)
        train(model, sgd(model), range(6), rank)
        models.append(flat(model))
    return float((models[0] - models[1]).abs().max())


def _difference_to_torchs_fp16_hook(rank: int) -> float:
    models = []
    for own in (None, "fp16"):
        model, _ = ddp(make_model(), own)
        if own is None:
            model.register_comm_hook(None, default_hooks.fp16_compress_hook)
        train(model, sgd(model), range(6), rank)
        models.append(flat(model))
    return float((models[0] - models[1]).abs().max())


def _replicas_stay_equal(compression: str, rank: int) -> bool:
    model, _ = ddp(make_model(), compression, has_names="partition" in compression)
    return train(model, sgd(model), range(5), rank)


class _Sum(nn.Module):
    """Its gradients are what they are multiplied with."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(torch.zeros(50)) for _ in range(6))

    def forward(self, factors: torch.Tensor) -> torch.Tensor:
        return sum((own * part).sum() for own, part in zip(factors, self.parts))


def _owed_after_rebuild(rank: int) -> list[float]:
    """What was given, less what was applied and what is still owed, after each step."""
    inner = _Sum()
    model, state = ddp(inner, "ef(topk(0.1))", has_names=True)
    given = torch.zeros(6, 50, dtype=torch.float64)
    applied = torch.zeros(6, 50, dtype=torch.float64)
    left = []
    for step in range(5):
        factors = torch.randn(6, 50, generator=torch.Generator().manual_seed(10 * step + rank))
        model.zero_grad()
        model(factors).backward()
        given += factors
        applied += torch.stack([part.grad for part in inner.parts])
        owed = torch.zeros(6, 50, dtype=torch.float64)
        for row in state.state_dict()["buckets"]:
            for name, start, stop, _ in row["tensors"]:
                owed[int(name.removeprefix("parts."))] = row["state"]["residual"][start:stop]
        total = given - owed
        dist.all_reduce(total)
        left.append(float((total / SIZE - applied).abs().max()))
    return left


def _accumulated(rank: int) -> float:
    """Two passes under no_sync, then one that is exchanged, against DDP without a hook."""
    models = []
    for own in (None, "identity"):
        model, _ = ddp(make_model(), own)
        optimizer = sgd(model)
        for step in range(3):
            optimizer.zero_grad()
            with model.no_sync():
                loss_of(model, rank, 10 * step).backward()
                loss_of(model, rank, 10 * step + 1).backward()
            loss_of(model, rank, 10 * step + 2).backward()
            optimizer.step()
        models.append(flat(model))
    return float((models[0] - models[1]).abs().max())


class _Sometimes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = make_model(), nn.Linear(12, 4)

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        y = self.always(x)
        return y + self.sometimes(x) if both else y


def _unused(rank: int) -> bool:
    torch.manual_seed(0)
    model, _ = ddp(_Sometimes(), "ef(topk(0.1))", find_unused_parameters=True)
    optimizer = sgd(model)
    is_same = True
    for step in range(4):
        optimizer.zero_grad()
        x = torch.randn(8, 12, generator=torch.Generator().manual_seed(step + 10 * rank))
        model(x, step % 2 == rank).square().mean().backward()
        optimizer.step()
        is_same = is_same and is_same_everywhere(flat(model))
    return is_same


def _scaled(rank: int) -> Any:
    """Step 2 has infinite gradients on rank 1: all ranks skip it, and residuals stay."""
    model, state = ddp(make_model(), "ef(topk(0.1))")
    optimizer, scaler = sgd(model), torch.amp.GradScaler("cpu", init_scale=8.0)
    found = []
    for step in range(5):
        optimizer.zero_grad()
        before, kept = flat(model).clone(), _residuals(state)
        loss = loss_of(model, rank, step)
        if step == 2 and rank == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        moved = not torch.equal(flat(model), before)
        has_kept = step > 0 and torch.equal(_residuals(state), kept)
        found.append([moved, has_kept, is_same_everywhere(flat(model)), scaler.get_scale()])
    return found


def _residuals(state: Any) -> torch.Tensor:
    return _residuals_in(state.state_dict().get("buckets", []))


def _residuals_in(rows: Any) -> torch.Tensor:
    found = {
        name: row["state"]["residual"][start:stop]
        for row in rows
        for name, start, stop, _ in row["tensors"]
    }
    return torch.cat([found[name] for name in sorted(found)]) if found else torch.empty(0)


def _continued(rank: int, folder: Path) -> float:
    """The difference between a run that is saved and continued, and one that is not."""
    # DDP does not rebuild buckets then, so the first step of a continued run has the same.
    options: dict[str, Any] = {"has_names": True, "find_unused_parameters": True}
    whole, _ = ddp(make_model(), "ef(topk(0.1))", **options)
    train(whole, sgd(whole), range(6), rank)
    first, state = ddp(make_model(), "ef(topk(0.1))", **options)
    train(first, sgd(first), range(3), rank)
    path = folder / f"saved{rank}.pt"
    torch.save({"model": first.module.state_dict(), "hook": state.state_dict()}, path)
    saved = torch.load(path, weights_only=True)
    inner = make_model()
    inner.load_state_dict(saved["model"])
    second, state = ddp(inner, "ef(topk(0.1))", **options)
    state.load_state_dict(saved["hook"])
    train(second, sgd(second), range(3, 6), rank)
    return float((flat(whole) - flat(second)).abs().max())


def _from_more_ranks(rank: int) -> list[Any]:
    """Three ranks have saved; two continue. What is owed in all stays."""
    model, state = ddp(make_model(), "ef(topk(0.1))", has_names=True)
    train(model, sgd(model), range(2), rank)
    saved = state.state_dict()
    draws = torch.Generator().manual_seed(0)
    rows = []
    for number in range(3):
        buckets = []
        for row in saved["buckets"]:
            residual = torch.randn(row["tensors"][-1][2], generator=draws)
            buckets.append({**row, "state": {**row["state"], "residual": residual}})
        rows.append({**saved, "rank": number, "size": 3, "buckets": buckets})
    other, hook = ddp(make_model(), "ef(topk(0.1))", has_names=True)
    errors = []
    for wrong in (rows[2], rows[:2], {**saved, "compression": "ef(sign)"}):
        try:
            hook.load_state_dict(wrong)
            loss_of(other, rank, 0).backward()
        except ValueError as error:
            errors.append(str(error))
        other, hook = ddp(make_model(), "ef(topk(0.1))", has_names=True)
    hook.load_state_dict(rows)
    loss_of(other, rank, 0).backward()
    fresh, again = ddp(make_model(), "ef(topk(0.1))", has_names=True)
    loss_of(fresh, rank, 0).backward()
    owed = _residuals(hook).double() - _residuals(again).double()
    before = sum(_residuals_in(row["buckets"]).double() for row in rows)
    dist.all_reduce(owed)
    applied = torch.cat([p.grad.reshape(-1) for p in _sorted(other)]) - torch.cat(
        [p.grad.reshape(-1) for p in _sorted(fresh)]
    )
    return [errors, float((owed + SIZE * applied.double() - before).abs().max())]


def _sorted(model: Any) -> list[torch.Tensor]:
    return [p for _, p in sorted(model.module.named_parameters())]


def _stats(rank: int) -> Any:
    model, state = ddp(make_model(), "ef(topk(0.1))")
    before, written = state.stats(), []

    class Writer:
        def add_scalar(self, name: str, value: float, step: int) -> None:
            written.append([name, value, step])

    gradwire.log_every(2, Writer())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        train(model, sgd(model), range(4), rank)
    gradwire.log_every(0)
    stats = state.stats()
    communicator = state._exchange.communicator
    engine = communicator.engine
    counted = sum(traffic.sent for traffic in engine.traffic.values())
    ranges = sorted({e.key for e in profile.key_averages() if e.key.startswith("gradwire")})
    return {
        "written": written,
        "counted": [counted, communicator.transport.num_bytes_sent + engine.native_nbytes],
        "ranges": ranges,
        "before": before.steps,
        "steps": stats.steps,
        "sent": stats.bytes_sent,
        "received": stats.bytes_received,
        "ratio": stats.ratio,
        "times": [stats.encode_s, stats.decode_s, stats.exposed_s],
        "text": str(stats),
    }


def _bucket_views(rank: int) -> bool:
    views, _ = ddp(make_model(), "ef(topk(0.1))", gradient_as_bucket_view=True)
    plain, _ = ddp(make_model(), "ef(topk(0.1))")
    is_same = train(views, sgd(views), range(4), rank)
    train(plain, sgd(plain), range(4), rank)
    return is_same and torch.equal(flat(views), flat(plain))


def initialized_again(rank: int, folder: Path) -> list[int]:
    """torch.distributed is left, and begun again by the same processes."""
    steps = []
    for number in range(2):
        model, state = ddp(make_model(), "ef(topk(0.1))")
        train(model, sgd(model), range(2), rank)
        steps.append(state.stats().steps)
        dist.destroy_process_group()
        store = f"file://{folder}/store again {number}"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=SIZE)
    dist.barrier()
    return steps
