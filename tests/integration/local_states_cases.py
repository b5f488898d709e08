"""What the ranks of test_local_states.py run: states of local updates, on other ranks."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import gradwire
from integration.loops import flat, loss_of, make_model, sgd

SIZE = 4

METHODS: dict[str, Callable[..., Any]] = {
    "local_sgd": lambda *own, **more: gradwire.local_sgd(
        *own, period=3, compression="ef(topk(0.1))", **more
    ),
    "dense": lambda *own, **more: gradwire.local_sgd(*own, period=3, **more),
    "diloco": lambda *own, **more: gradwire.diloco(
        *own, period=4, fragments=2, delay=1, compression="ef(topk(0.1))", **more
    ),
    "choco": lambda *own, **more: gradwire.decentralized(
        *own, graph="ring", algorithm="choco(0.3)", compression="topk(0.2)", **more
    ),
    "tracking": lambda *own, **more: gradwire.decentralized(
        *own, graph="ring", algorithm="gradient_tracking", **more
    ),
}


def run(rank: int, folder: Path) -> Any:
    torch.set_num_threads(1)
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    pair = pairs[rank // 2]
    found = {}
    for name, make in METHODS.items():
        found[name] = {
            "fewer": _moved(make, rank, None, pair),
            "more": _moved(make, rank, pair, None),
            "refused": _refused(make, rank, pair),
        }
    return found


def _trained(make: Any, rank: int, group: Any, steps: int) -> tuple[Any, Any, Any]:
    model = make_model()
    optimizer = sgd(model)
    context = make(model, optimizer, process_group=group, timeout_s=60)
    _train(model, optimizer, range(steps), rank)
    return model, optimizer, context


def _train(model: Any, optimizer: Any, steps: range, rank: int) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()


def _rows(context: Any, group: Any) -> list[Any]:
    rows: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(rows, context.state_dict(), group=group)
    return rows


def _moved(make: Any, rank: int, before: Any, after: Any) -> list[Any]:
    """Saved by the ranks of one group, loaded by those of another."""
    model, _, context = _trained(make, rank, before, 7)
    context.flush()
    rows = _rows(context, before)
    start = flat(model)
    context.remove()
    if after is None:  # rank 2 and 3 saved another pair's states
        given: list[Any] = [rows]
        dist.broadcast_object_list(given, 0)
        rows = given[0]
        dist.broadcast(start, 0)
    again = make_model()
    optimizer = sgd(again)
    context = make(again, optimizer, process_group=after, timeout_s=60)
    context.load_state_dict(rows)
    torch.nn.utils.vector_to_parameters(start.clone(), again.parameters())
    owed = [_owed(rows), _owed(_rows(context, after))]
    num_steps = context.num_steps
    has_same_start = torch.equal(context.flat(context.buckets[0]), start[: len(_first(context))])
    _train(again, optimizer, range(7, 15), rank)
    context.close()
    models = [torch.empty_like(start) for _ in range(dist.get_world_size(after))]
    dist.all_gather(models, flat(again), group=after)
    is_same = all(torch.equal(own, models[0]) for own in models)
    drift = float((owed[0] - owed[1]).abs().max()) if len(owed[0]) else 0.0
    size = float(owed[0].abs().max()) if len(owed[0]) else 0.0
    return [num_steps, has_same_start, drift, size, is_same, not torch.equal(start, models[0])]


def _first(context: Any) -> Tensor:
    found: Tensor = context.flat(context.buckets[0])
    return found


def _owed(rows: list[Any]) -> Tensor:
    """The sum of what all ranks have still to send."""
    total: dict[str, Tensor] = {}
    for row in rows:
        for number, bucket in enumerate(row.get("exchange", {}).get("buckets", [])):
            residual = bucket["state"]["residual"].double()
            total[number] = total.get(number, torch.zeros_like(residual)) + residual
    return torch.cat([total[number] for number in sorted(total)]) if total else torch.empty(0)


def _refused(make: Any, rank: int, pair: Any) -> list[str]:
    """Between two averages; of one rank only; in another order."""
    _, _, context = _trained(make, rank, None, 5)
    rows = _rows(context, None)
    context.remove()
    model = make_model()
    context = make(model, sgd(model), process_group=pair, timeout_s=60)
    texts = []
    for given in (rows, rows[rank], rows[::-1]):
        try:
            context.load_state_dict(given)
            texts.append("")
        except ValueError as error:
            texts.append(str(error))
    context.remove()
    return texts
