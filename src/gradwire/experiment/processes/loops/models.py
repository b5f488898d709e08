"""Models that servers hold for users' loops with `asp` and `ssp`.

Each worker takes a step of its own optimizer, whatever that is, and pushes by how much its
parameters changed. To the servers this is a gradient for plain SGD with a learning rate of one,
with the sign turned:

    x_i <- step_i(x),  push x - x_i;   x <- x - (x - x_i),  pull x

so rules, pushes and answers are those of runs with servers that hold the model
(`training/server.py`). `asp` adds each change as it is, as BytePS does in its asynchronous mode
(Jiang et al. 2020): n workers move the model n times as far per round as one does. `ssp` adds the
mean of a clock's changes, so that ssp(0) is the mean of all local steps, which for plain SGD is
bsp.

A model is described by JSON, which rank 0 sends after all workers have compared theirs; with it
come its parameters, which all other workers get.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import NoneType
from typing import Any, cast

import torch
from torch import Tensor

from gradwire.architecture import ARCHITECTURE
from gradwire.compression import COMPRESSION
from gradwire.core.codec import is_finite
from gradwire.core.errors import PeerLost, WireError
from gradwire.core.key import Key
from gradwire.core.lifted import lift
from gradwire.core.node import Framed, Node
from gradwire.core.payload import DTYPES
from gradwire.core.wire import HEADER_NBYTES, REQUEST, Failed
from gradwire.scheduling import SCHEDULING
from gradwire.synchronization import SYNCHRONIZATION
from gradwire.training.flat import FlatLayout, FlatTensor
from gradwire.training.optimizer import SGD
from gradwire.training.plan import Plan
from gradwire.training.schedule import Constant
from gradwire.training.server import TrainingServer
from gradwire.training.task import Task

DESCRIBE, SHARD, HELD = "describe", "shard", "held"  # tags

_MAX_STEPS = 1 << 53
_MAX_MODELS = 64  # of one job


_KINDS: dict[str, Any] = {  # of the values of a description
    **dict.fromkeys(("label", "compression", "synchronization", "architecture", "scheduling"), str),
    "dtype": str,
    "seed": int,
    "step": int,
    "steps_per_epoch": (int, float, NoneType),
}


@dataclass(frozen=True)
class HeldModel:
    """A model as a vector: the part of a task that servers and their clients use."""

    layout: FlatLayout
    params: Tensor

    def initial_params(self) -> Tensor:
        return self.params

    def initial_buffers(self) -> dict[str, Tensor]:
        return {}


def plan_of(row: Mapping[str, Any], num_workers: int, params: Tensor | None = None) -> Plan:
    """The plan of a model that is described so. A server has no parameters yet."""
    if not row["tensors"]:
        raise WireError("a model without tensors")
    layout = FlatLayout(
        tuple(FlatTensor(name, a, b, tuple(shape)) for name, a, b, shape in row["tensors"])
    )
    if params is None:
        params = torch.zeros(1, dtype=_dtype(row["dtype"])).expand(layout.numel)
    key, start = Key(row["seed"]), row["step"]
    return Plan(
        task=cast(Task, HeldModel(layout, params)),
        batch=_no_batch,
        optimizer=SGD(1.0),
        schedule=Constant(),
        reducer=lift(COMPRESSION.parse(row["compression"]), row["steps_per_epoch"]),
        synchronization=SYNCHRONIZATION.parse(row["synchronization"]),
        architecture=ARCHITECTURE.parse(row["architecture"]),
        scheduling=SCHEDULING.parse(row["scheduling"]),
        num_workers=num_workers,
        num_steps=_MAX_STEPS,
        key=key.child(f"from step {start}") if start else key,
        steps_per_epoch=row["steps_per_epoch"],
    )


def _no_batch(rank: int, step: int) -> Any:
    raise AssertionError("workers take their own batches")


def _dtype(text: str) -> torch.dtype:
    found = getattr(torch, text.removeprefix("torch."), None)
    if found not in DTYPES or not found.is_floating_point:
        raise WireError(f"a model of {text[:100]!r}, expected floats")
    return cast(torch.dtype, found)


async def hold_models(
    node: Node, num_servers: int, on_model: Callable[[], None] = lambda: None
) -> None:
    """Holds the shards of models that workers describe; `on_model` is called for each of them."""
    labels: set[str] = set()
    while True:
        rank, message = await node.recv_each(DESCRIBE)
        try:
            label, plan = _read(rank, message, node, num_servers)
            if label in labels or len(labels) == _MAX_MODELS:
                raise WireError(f"model {label[:100]!r} is held already, or {_MAX_MODELS} others")
            number = node.rank - node.size
            shard, params = plan.shards()[number], await node.recv(rank, SHARD)
            dtype = plan.task.initial_params().dtype
            if params.shape != (shard.numel,) or params.dtype != dtype or not is_finite(params):
                raise WireError(
                    f"rank {rank} sent {list(params.shape)} {params.dtype} as a shard, expected "
                    f"{shard.numel} finite elements of {dtype}"
                )
        except (WireError, PeerLost) as error:
            for worker in range(node.size):
                failed = Framed(Failed.of(error))
                await node.send_framed(worker, HELD, failed, HEADER_NBYTES, "model")
            continue
        labels.add(label)
        server = TrainingServer(plan, number, label)
        server.begin_with(params)
        await node.watch((REQUEST, label))
        await node.spawn(server.run(node))
        on_model()
        for worker in range(node.size):
            await node.send(worker, HELD, params if worker else params[:0], "model")


def _read(rank: int, message: Any, node: Node, num_servers: int) -> tuple[str, Plan]:
    """Label and plan of the model that a message describes."""
    if rank != 0 or not isinstance(message, Tensor) or message.dtype != torch.uint8:
        raise WireError(f"rank {rank} describes a model, which rank 0 does, by bytes")
    try:
        row = json.loads(bytes(message.numpy()))
        for name, kinds in _KINDS.items():
            if not isinstance(row[name], kinds):
                raise WireError(f"{name} is {row[name]!r:.100}")
        plan = plan_of(row, node.size)
        _check(plan, num_servers)
    except (ValueError, TypeError, KeyError, RuntimeError) as error:  # of whatever was sent
        raise WireError(f"rank {rank} describes no model: {error}") from error
    return row["label"], plan


def _check(plan: Plan, num_servers: int) -> None:
    """Refuses tensors that do not lie one after the other, and other servers than there are."""
    place = 0
    for tensor in plan.task.layout.tensors:
        is_shape = all(isinstance(dim, int) and dim >= 0 for dim in tensor.shape)
        if not is_shape or (tensor.start, tensor.stop) != (place, place + math.prod(tensor.shape)):
            raise WireError(f"tensor {tensor.name!r} does not begin where the one before it ends")
        place = tensor.stop
    if plan.architecture.num_servers != num_servers or plan.ability != "push_pull":
        raise WireError(f"a model for {plan.architecture!r}, but there are {num_servers} servers")
