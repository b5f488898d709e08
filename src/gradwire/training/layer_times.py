"""How the time of a gradient divides among the layers of a model.

Only shares count: `--compute` says how long the whole takes. `flops` needs no measurement and is
the same everywhere; `hooks` measures on this machine, once, and is recorded as `given`.
"""

import time
import tomllib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import nn

from gradwire.core.notation import Expression
from gradwire.core.profile import layers_of
from gradwire.core.registry import Registry
from gradwire.core.replica import Bucket
from gradwire.core.tree import tensors_of
from gradwire.training.gradient import Batch
from gradwire.training.task import Task

_REPEATS = 9
_LEAST_SHARE = 1e-6  # of the time: no layer takes none


class Shares(NamedTuple):
    """Relative times of all layers, in the order of the forward pass."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]


class LayerTimes(Expression, ABC):
    """Where the times of layers come from."""

    @abstractmethod
    def shares(self, task: Task, batch: Batch) -> Shares: ...

    def resolve(self, task: Task, batch: Batch) -> "LayerTimes":
        """As it is recorded: what depends on this machine or on a file becomes numbers."""
        return self


@dataclass(frozen=True, repr=False)
class Flops(LayerTimes):
    """From the multiplications of each layer; backward takes twice the time of forward."""

    def shares(self, task: Task, batch: Batch) -> Shares:
        flops = layer_flops(task, batch)
        return Shares(tuple(flops), tuple(2 * own for own in flops))


@dataclass(frozen=True, repr=False)
class Hooks(LayerTimes):
    """From hooks on the module, on this machine."""

    def shares(self, task: Task, batch: Batch) -> Shares:
        return measure_layers(task, batch)

    def resolve(self, task: Task, batch: Batch) -> "LayerTimes":
        return Given(*(_rounded(times) for times in self.shares(task, batch)))


@dataclass(frozen=True, repr=False)
class Given(LayerTimes):
    """Numbers, one for each layer."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]

    examples = ("given((1.0, 2.0), backward=(2.0, 4.0))",)

    def shares(self, task: Task, batch: Batch) -> Shares:
        layers = layers_of(task_tensors(task))
        if not len(self.forward) == len(self.backward) == len(layers):
            raise ValueError(
                f"{self!r} has times of {len(self.forward)} and {len(self.backward)} layers; the "
                f"model has {len(layers)}: {', '.join(layer.name for layer in layers)}"
            )
        return Shares(self.forward, self.backward)


@dataclass(frozen=True, repr=False)
class LayerTable(LayerTimes):
    """From a TOML file with a table for each layer, `[conv1]`, with `forward` and `backward`."""

    path: str

    examples = ('layer_table("layers.toml")',)

    def shares(self, task: Task, batch: Batch) -> Shares:
        names = [layer.name for layer in layers_of(task_tensors(task))]
        try:
            content = tomllib.loads(Path(self.path).read_text())
        except (OSError, ValueError) as error:
            raise ValueError(f"{self!r} cannot be read: {error}") from None
        times = [_times_of(self.path, name, _table(content, name)) for name in names]
        return Shares(tuple(t[0] for t in times), tuple(t[1] for t in times))

    def resolve(self, task: Task, batch: Batch) -> "LayerTimes":
        return Given(*self.shares(task, batch))


def _table(content: Mapping[str, Any], name: str) -> Any:
    """`[block.0]` and `["block.0"]` are both the table of block.0."""
    if name in content:
        return content[name]
    table: Any = content
    for part in name.split("."):
        table = table.get(part) if isinstance(table, Mapping) else None
    return table


def _times_of(path: str, name: str, table: Any) -> tuple[float, float]:
    try:
        forward, backward = float(table["forward"]), float(table["backward"])
        if forward >= 0 and backward >= 0:
            return forward, backward
    except (TypeError, KeyError, ValueError):
        pass
    raise ValueError(
        f"times of layers in {path}: expected for the layer {name!r} a table with forward and "
        f"backward, seconds of at least 0, got {table!r}"
    )


def task_tensors(task: Task) -> list[Bucket]:
    return [Bucket(t.name, t.start, t.stop) for t in task.layout.tensors]


def layer_flops(task: Task, batch: Batch) -> list[float]:
    """Floating-point operations of each layer's forward pass.

    A weight of two and more dimensions is multiplied once for each position of its output; other
    layers (embeddings, norms) take one operation for each value that they make.
    """
    made: dict[str, int] = {}  # values that a module makes, by name

    def note(name: str, output: Any) -> None:
        tensors = tensors_of(output)
        made[name] = made.get(name, 0) + (tensors[0].numel() if tensors else 0)

    module = task.module
    handles = [
        layer.register_forward_hook(lambda m, i, o, name=name: note(name, o))
        for name, layer in module.named_modules()
    ]
    try:
        with torch.no_grad():
            task.loss(task.layout.unflatten(task.initial_params()), batch)
    finally:
        for handle in handles:
            handle.remove()
    modules = dict(module.named_modules())
    flops = []
    for layer in layers_of(task_tensors(task)):
        values = made.get(layer.name) or layer.numel
        owner = modules.get(layer.name)
        if isinstance(owner, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.RNNBase):
            positions = values / _num_outputs(owner)
            weights = [p for p in owner.parameters(recurse=False) if p.dim() > 1]
            flops.append(sum(2 * weight.numel() * positions for weight in weights))
        else:
            flops.append(float(values))
    least = _LEAST_SHARE * sum(flops)
    return [max(own, least) for own in flops]


def _num_outputs(layer: Any) -> int:
    """Values that a layer makes at one position."""
    if isinstance(layer, nn.Linear):
        return layer.out_features
    if isinstance(layer, nn.RNNBase):
        return layer.hidden_size * (2 if layer.bidirectional else 1)
    return int(layer.out_channels)


def measure_layers(task: Task, batch: Batch) -> Shares:
    """The median times of layers over some gradients.

    What lies between two layers (activations, pooling) counts to the one that follows.
    """
    layers = layers_of(task_tensors(task))
    number = {layer.name: i for i, layer in enumerate(layers)}
    runs = [_time_layers(task, batch, number, layers) for _ in range(_REPEATS + 2)][2:]
    forward = [median(run.forward[i] for run in runs) for i in range(len(layers))]
    backward = [median(run.backward[i] for run in runs) for i in range(len(layers))]
    least = _LEAST_SHARE * (sum(forward) + sum(backward))
    return Shares(
        tuple(max(own, least) for own in forward), tuple(max(own, least) for own in backward)
    )


def _time_layers(
    task: Task, batch: Batch, number: Mapping[str, int], layers: Sequence[Bucket]
) -> Shares:
    is_cuda = task.device.type == "cuda"

    def now() -> float:
        if is_cuda:
            torch.cuda.synchronize(task.device)
        return time.perf_counter()

    ended: dict[int, float] = {}  # when the forward pass left each layer
    left: dict[int, float] = {}  # when the gradient of each layer was there
    params = task.initial_params().requires_grad_()
    tensors = task.layout.unflatten(params)
    handles = [
        module.register_forward_hook(
            lambda m, i, o, layer=number[name]: ended.__setitem__(layer, now())
        )
        for name, module in task.module.named_modules()
        if name in number
    ]
    layer_of = {t.name: number[t.name.rpartition(".")[0] or t.name] for t in task.layout.tensors}
    for name, tensor in tensors.items():
        tensor.register_hook(lambda gradient, layer=layer_of[name]: left.__setitem__(layer, now()))
    try:
        began = now()
        with torch.enable_grad():
            loss = task.loss(tensors, batch)
            turned = now()
            torch.autograd.grad(loss, params)
    finally:
        for handle in handles:
            handle.remove()
    return Shares(
        durations([ended.get(i, began) for i in range(len(layers))], began),
        durations([left.get(i, turned) for i in reversed(range(len(layers)))], turned)[::-1],
    )


def durations(ends: Sequence[float], began: float) -> tuple[float, ...]:
    """Times between ends; a layer that ends before the one before it takes none."""
    durations = []
    for end in ends:
        durations.append(max(0.0, end - began))
        began = max(began, end)
    return tuple(durations)


def _rounded(times: Sequence[float]) -> tuple[float, ...]:
    return tuple(float(f"{seconds:.3g}") for seconds in times)


LAYER_TIMES: Registry[LayerTimes] = Registry(
    "layer times",
    LayerTimes,  # type: ignore[type-abstract]
    __name__,
    group="gradwire.layer_times",
)
