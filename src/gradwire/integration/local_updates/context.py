"""What all methods with local updates share: the hook, the agreement at the start, the figures.

An object is made on all ranks together. It checks that settings and tensors are the same, and all
ranks take the parameters and buffers of rank 0. From then on it counts the steps of the optimizer.
"""

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from gradwire.core.errors import WireError
from gradwire.core.group import Group
from gradwire.core.node import Node
from gradwire.core.protocols import Architecture
from gradwire.core.spec import Spec
from gradwire.integration.buckets import ParameterBucket, cut_into_buckets
from gradwire.integration.communicator import communicator_of
from gradwire.integration.exchange import check_same, packed
from gradwire.integration.names import check_whole, plain_name
from gradwire.integration.stats import Meter, Stats
from gradwire.runtime.interpreter.interpreter import Program
from gradwire.scheduling import SCHEDULING

T = TypeVar("T")
Tensors = dict[str, Tensor]
Saved = Mapping[str, Any] | Sequence[Mapping[str, Any]]  # the state of one rank, or of all in order


class LocalUpdates(ABC):
    """Hooks the steps of an optimizer. A context manager; `close` ends it otherwise.

    Leaving the context averages what is outstanding, unless an exception leaves it.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        settings: dict[str, Any],
        *,
        by_tensor: bool,
        process_group: dist.ProcessGroup | None,
        timeout_s: float,
        native: bool,
    ) -> None:
        self.model, self.optimizer = model, optimizer
        named = parameters_of(model, optimizer)
        self.names = [name for name, _ in named]
        schedule = SCHEDULING.parse('sequential("layer")' if by_tensor else "sequential")
        self.buckets = cut_into_buckets(named, schedule)
        self.buffers = {plain_name(name): own for name, own in model.named_buffers()}
        self._num_parameters = _num_parameters(optimizer)
        self.num_steps = 0  # of the optimizer, so far
        self.communicator = communicator_of(
            process_group, timeout_s=timeout_s, native=native, device=named[0][1].device
        )
        self.label = self.communicator.new_label()
        self._meter = Meter()
        self._exposed_s = 0.0  # in the step under way
        self._agree(settings)
        self._meter.begin(self.communicator, self.label)
        self._hook: Any = None

    def begin(self) -> None:
        """Counts the optimizer's steps from now on."""
        self._hook = self.optimizer.register_step_post_hook(self._step_ended)

    # The user's side.

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:  # the other ranks may not get here
            self.remove()

    def close(self) -> None:
        """Averages what is outstanding and ends the averages. All ranks call it."""
        if self._hook is not None:
            self.flush()
            self.remove()

    def remove(self) -> None:
        """Takes the hook from the optimizer, and exchanges nothing."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def stats(self) -> Stats:
        """What was sent since this began, and what that took.

        `ratio` compares with an all-reduce of the gradients in every step.
        """
        return self._meter.stats()

    @abstractmethod
    def flush(self) -> None:
        """Averages what is outstanding: all ranks have the same model then. All ranks call it."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """What this rank keeps besides the model and the optimizer. Every rank has its own."""

    @abstractmethod
    def load_state_dict(self, saved: Saved) -> None:
        """Continues from a saved state of the same rank, or from those of all ranks as a list.

        All ranks call it. With those of all ranks, which were saved after `flush()`, the number of
        ranks may have changed. Load the model and the optimizer after this object was made: making
        it gives all ranks the model of rank 0.
        """

    # For the methods.

    @abstractmethod
    def after_step(self) -> None:
        """The optimizer has taken a step; `num_steps` counts it."""

    def flat(self, bucket: ParameterBucket) -> Tensor:
        """The parameters of a bucket, as a new vector."""
        return torch.cat([p.detach().reshape(-1) for p in bucket.parameters])

    @torch.no_grad()
    def write(self, bucket: ParameterBucket, x: Tensor) -> None:
        """x becomes the parameters of a bucket."""
        for parameter, (_, start, stop, shape) in zip(bucket.parameters, bucket.layout):
            parameter.copy_(x[start:stop].view(shape))

    def copy_buffers(self) -> Tensors:
        return {f"buffer {name}": own.detach().clone() for name, own in self.buffers.items()}

    @torch.no_grad()
    def write_buffers(self, values: Tensors) -> None:
        """Those that are among the values, by the names of `copy_buffers`."""
        for name, buffer in self.buffers.items():
            value = values.get(f"buffer {name}")
            if value is not None:
                buffer.copy_(value)

    def spec(self, bucket: ParameterBucket) -> Spec:
        parameter, stop = bucket.parameters[0], bucket.layout[-1][2]
        return Spec((stop,), parameter.dtype, tensors=bucket.layout)

    def post(self, program: Program[T]) -> "Future[T]":
        """Starts an exchange of tensors that are complete when the current stream is."""
        return self.communicator.post_after(program)

    def wait(self, future: "Future[T]") -> T:
        """The result of an exchange; raises what went wrong."""
        began = time.perf_counter()
        try:
            return self.communicator.wait(future)
        finally:
            self._exposed_s += time.perf_counter() - began

    def _step_ended(self, *arguments: Any) -> None:
        if _num_parameters(self.optimizer) != self._num_parameters:
            raise ValueError(
                f"the optimizer has {_num_parameters(self.optimizer)} parameters, "
                f"{self._num_parameters} when this was made: added ones would differ from rank to "
                "rank. Close this and make it anew after add_param_group"
            )
        self.num_steps += 1
        self._exposed_s = 0.0
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                self._meter.add_bucket(parameter)
        self.after_step()
        self._meter.add_step(self._exposed_s)

    # The start.

    def _agree(self, settings: dict[str, Any]) -> None:
        """Checks that all ranks have the same, and takes the model of rank 0."""
        own = {
            **settings,
            "tensors": [
                [name, list(p.shape), str(p.dtype)]
                for bucket in self.buckets
                for (name, *_), p in zip(bucket.layout, bucket.parameters)
            ],
            "buffers": [[n, list(b.shape), str(b.dtype)] for n, b in self.buffers.items()],
        }
        tensors = [self.flat(bucket) for bucket in self.buckets]
        buffers = self.copy_buffers()
        tensors += [_as_bytes(buffer) for buffer in buffers.values()]
        received = self.wait(self.post(lambda node: self._start(node, own, tensors)))
        for bucket, x in zip(self.buckets, received):
            self.write(bucket, x)
        rows = received[len(self.buckets) :]
        self.write_buffers({n: _from_bytes(row, buffers[n]) for n, row in zip(buffers, rows)})

    async def check_same(self, node: Node, own: dict[str, Any]) -> None:
        """Raises on every rank if ranks have different settings."""
        rows = await Group(node, f"{self.label}settings").all_gather(packed(own))
        received = [json.loads(bytes(row.cpu().numpy())) for row in rows]
        check_same(received, node.rank, self.communicator.ranks)

    async def _start(
        self, node: Node, own: dict[str, Any], tensors: Sequence[Tensor]
    ) -> Sequence[Tensor]:
        await self.check_same(node, own)
        tag, received = f"{self.label}start", []
        for x in tensors:
            if node.rank == 0:
                for peer in range(1, node.size):
                    await node.send(peer, tag, x, "start")
            else:
                got = await node.recv(0, tag)
                if Spec.of(got) != Spec.of(x):
                    raise WireError(f"rank 0 sent {Spec.of(got)}, expected {Spec.of(x)}")
                received.append(got)
        return received or tensors


def parameters_of(model: nn.Module, optimizer: Optimizer) -> Sequence[tuple[str, Tensor]]:
    """The optimizer's parameters with their names, in the order of the model."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"model is a torch.nn.Module, got {model!r}")
    if isinstance(model, DistributedDataParallel) and _is_everyone(model.process_group):
        raise ValueError(
            "the model is under DistributedDataParallel, which averages gradients over all ranks "
            "in every step, so nothing is left to average rarely. Train and give the module in it"
        )
    if not isinstance(optimizer, Optimizer):
        raise ValueError(f"optimizer is a torch optimizer, got {optimizer!r}")
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    named = [(plain_name(name), p) for name, p in model.named_parameters() if id(p) in stepped]
    missing = len(stepped) - len(named)
    if missing:
        raise ValueError(
            f"{missing} of the {len(stepped)} parameters of the optimizer are not in the model, so "
            "they would differ from rank to rank. Give the whole model"
        )
    devices = sorted({str(parameter.device) for _, parameter in named})
    if len(devices) > 1:
        raise ValueError(f"the parameters lie on {', '.join(devices)}: they must be on one device")
    check_whole(named)
    for name, parameter in named:
        if not parameter.is_floating_point():
            raise ValueError(f"{name} is {parameter.dtype}: only real floats can be averaged")
    return named


def _is_everyone(group: dist.ProcessGroup) -> bool:
    return dist.get_world_size(group) == dist.get_world_size()


def _as_bytes(x: Tensor) -> Tensor:
    """The bytes of a tensor of any dtype."""
    return x.contiguous().reshape(-1).view(torch.uint8)


def _from_bytes(row: Tensor, like: Tensor) -> Tensor:
    # A byte that is neither 0 nor 1 must not become a bool.
    flat = row != 0 if like.dtype is torch.bool else row.view(like.dtype)
    return flat.view(like.shape)


def _num_parameters(optimizer: Optimizer) -> int:
    return sum(len(group["params"]) for group in optimizer.param_groups)


async def exact_averages(
    node: Node, architecture: Architecture, label: str, tensors: Tensors
) -> Tensors:
    """The means of floats and complex numbers, the maxima of others; not compressed.

    All ranks have tensors of the same names and shapes. One exchange per dtype.
    """
    kinds: dict[torch.dtype, list[str]] = {}
    for name in sorted(tensors):
        kinds.setdefault(tensors[name].dtype, []).append(name)
    found = {}
    for dtype, names in kinds.items():
        vector = torch.cat([tensors[name].reshape(-1) for name in names])
        group = architecture.group(node, f"{label} {dtype}")
        if dtype.is_complex:
            parts = await group.mean(torch.view_as_real(vector).reshape(-1))
            vector = torch.view_as_complex(parts.view(-1, 2))
        elif dtype.is_floating_point:
            vector = await group.mean(vector)
        else:
            vector = (await group.max(vector.long())).to(dtype)
        pieces = vector.split([tensors[name].numel() for name in names])
        found.update({n: piece.view(tensors[n].shape) for n, piece in zip(names, pieces)})
    return found


def check_period(method: str, period: int) -> None:
    if not isinstance(period, int) or isinstance(period, bool) or period < 1:
        raise ValueError(f"{method}: period is a whole number of at least 1, got {period!r}")
