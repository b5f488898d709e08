"""What the ranks of test_bucket_names.py run: saved states under DDP with other buckets."""

import gc
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from integration.loops import ddp, sgd, train

SIZE = 2
ONE_BUCKET: dict[str, Any] = {"bucket_cap_mb": 25}
MANY_BUCKETS: dict[str, Any] = {"find_unused_parameters": True}  # else DDP begins with one


def run(rank: int, folder: Path) -> Any:
    torch.set_num_threads(1)
    found = {
        "same": _moved(False, ONE_BUCKET, False, ONE_BUCKET),
        "other": _moved(False, ONE_BUCKET, False, MANY_BUCKETS),
        "fewer": _moved(False, MANY_BUCKETS, False, ONE_BUCKET),
        "named": _moved(True, ONE_BUCKET, True, MANY_BUCKETS),
        "later": _loaded_later(rank),
        "now named": _moved(False, ONE_BUCKET, True, ONE_BUCKET),
        "no longer named": _moved(True, ONE_BUCKET, False, ONE_BUCKET),
        "otherwise named": _moved(True, ONE_BUCKET, True, ONE_BUCKET, prefix="module."),
        "of several runs": _of_several_runs(rank),
        "again": _refused_twice(rank),
        "not expected": _not_expected(rank),
        "sparse": _sparse(rank),
    }
    dist.barrier()  # the process ends at once: the others may still wait for what it sent
    return found


def _tower() -> nn.Module:
    """Layers of one shape: nothing but names tells them apart."""
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(12, 12) for _ in range(4)])


def _hooked(
    has_names: bool, options: dict[str, Any], prefix: str = ""
) -> tuple[nn.Module, nn.Module, Any]:
    model = _tower()
    named = [(prefix + name, p) for name, p in model.named_parameters()] if has_names else None
    wrapped, state = ddp(
        model, "ef(topk(1.0))", hook_options={"named_parameters": named}, **options
    )
    return model, wrapped, state


def _zero_gradient(model: nn.Module) -> None:
    model(torch.zeros(8, 12)).sum().mul(0).backward()


def _saved(has_names: bool, options: dict[str, Any]) -> Any:
    """The state of a run of two steps, with the number of its parameter as each residual."""
    model, wrapped, state = _hooked(has_names, options)
    train(wrapped, sgd(wrapped), range(2), 0)
    names = state._names._names
    numbers = {names[id(p)]: i + 1.0 for i, p in enumerate(model.parameters())}
    saved = state.state_dict()
    for row in saved["buckets"]:
        for name, start, stop, _ in row["tensors"]:
            row["state"]["residual"][start:stop] = numbers[name]
    return saved


def _moved(
    saved_with_names: bool,
    before: dict[str, Any],
    has_names: bool,
    after: dict[str, Any],
    prefix: str = "",
) -> Any:
    """Gradients after a step in which all residuals are sent, or the error."""
    saved = _saved(saved_with_names, before)
    model, wrapped, state = _hooked(has_names, after, prefix)
    try:
        state.load_state_dict(saved)
        _zero_gradient(wrapped)
    except ValueError as error:
        return str(error)
    return [p.grad.unique().tolist() for p in model.parameters()]


def _error_of(call: Any) -> str:
    try:
        call()
    except (ValueError, RuntimeError) as error:
        return str(error)
    return ""


def _loaded_later(rank: int) -> list[str]:
    """Into hooks that have taken steps: the same buckets, and others."""
    saved = _saved(False, ONE_BUCKET)
    found = []
    for options in (ONE_BUCKET, MANY_BUCKETS):
        _, wrapped, state = _hooked(False, options)
        train(wrapped, sgd(wrapped), range(1), rank)
        found.append(_error_of(lambda state=state: state.load_state_dict(saved)))
    return found


def _of_several_runs(rank: int) -> str:
    saved = [_saved(False, options) for options in (ONE_BUCKET, MANY_BUCKETS)]
    rows = [{**row, "rank": number} for number, row in enumerate(saved)]
    _, _, state = _hooked(False, ONE_BUCKET)
    return _error_of(lambda: state.load_state_dict(rows))


def _refused_twice(rank: int) -> list[str]:
    """By the same hook with a new DDP, as DDP itself does not continue after an error."""
    saved, fitting = _saved(False, MANY_BUCKETS), _saved(False, ONE_BUCKET)
    model, wrapped, state = _hooked(False, ONE_BUCKET)
    del wrapped
    state.load_state_dict(saved)
    found = [_error_with(model, state) for _ in range(2)]
    state.load_state_dict(fitting)
    return [*found, _error_with(model, state)]


def _error_with(model: nn.Module, state: Any) -> str:
    gc.collect()  # another DDP would count gradients as well
    wrapped = DistributedDataParallel(model, **ONE_BUCKET)
    wrapped.register_comm_hook(state, gradwire.ddp_comm_hook("identity")[1])
    return _error_of(lambda: _zero_gradient(wrapped))


def _not_expected(rank: int) -> list[Any]:
    """States of another number of ranks: nothing of them is kept, before and after a step."""
    saved = _saved(False, ONE_BUCKET)
    of_others = {**saved, "rank": 2, "size": 3}
    _, wrapped, state = _hooked(False, ONE_BUCKET)
    train(wrapped, sgd(wrapped), range(1), rank)
    found = [_error_of(lambda: state.load_state_dict(of_others)), state._names._expected is None]
    model, wrapped, other = _hooked(False, ONE_BUCKET)
    del wrapped
    for own in (of_others, saved):
        other.load_state_dict(own)
        found.append(_error_with(model, other))
    return found


def _sparse(rank: int) -> str:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Flatten(), nn.Linear(8, 1))
    model = DistributedDataParallel(inner)
    model.register_comm_hook(*gradwire.ddp_comm_hook("ef(topk(0.5))", timeout_s=60))
    return _error_of(lambda: model(torch.tensor([[rank, 3]])).sum().backward())
