"""Gradient requests of workers and the results of tasks; both are values.

Nothing in a request is changed by evaluating it, so virtual workers may share tensors. The
tensors of results are new, but results evaluated together may be rows of one tensor: treat them
as values too.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from gradwire.core.group import concatenate
from gradwire.core.key import Key
from gradwire.core.tree import Tree
from gradwire.training.flat import FlatLayout

# Inputs [B, ...], targets [B] or, for text, [B, L]; a user's own may be dicts, lists, tuples.
Batch = tuple[Tree, Tree]


@dataclass(frozen=True, eq=False, slots=True)
class GradientRequest:
    """One worker's step: its parameters, its running statistics, its batch, its randomness."""

    params: Tensor  # [d]
    buffers: Mapping[str, Tensor]
    inputs: Tree  # [B, ...]
    targets: Tree
    key: Key  # names seed, step and rank; dropout masks are drawn from it


class StepResult(Protocol):
    """What a gradient's evaluation gives besides the gradient, and parts of that."""

    @property
    def loss(self) -> Tensor: ...

    @property
    def buffers(self) -> Mapping[str, Tensor]: ...

    def piece(self, start: int, stop: int) -> Tensor:
        """A part of the flat gradient."""
        ...


@dataclass(frozen=True, eq=False, slots=True)
class GradientResult:
    loss: Tensor  # scalar, the mean over the batch
    gradient: Tensor  # [d]
    buffers: Mapping[str, Tensor]  # running statistics after the step

    def piece(self, start: int, stop: int) -> Tensor:
        return self.gradient[start:stop]


class GradientByTensor:
    """A gradient under way: it grows by one tensor at a time and is never joined as a whole.

    A piece that lies in one tensor is a view of what the backward pass made. Loss and statistics
    come with the last one.
    """

    def __init__(self, layout: FlatLayout) -> None:
        self.loss = torch.empty(0)
        self.buffers: Mapping[str, Tensor] = {}
        self._layout = layout
        self._gradients: list[Tensor | None] = [None] * len(layout.tensors)

    def put(self, number: int, gradient: Tensor) -> None:
        """The gradient of a tensor is there."""
        self._gradients[number] = gradient.reshape(-1)

    def piece(self, start: int, stop: int) -> Tensor:
        found = []
        for tensor, gradient in zip(self._layout.tensors, self._gradients):
            if tensor.start < stop and start < tensor.stop:
                assert gradient is not None, f"the gradient of {tensor.name} is not there yet"
                first = max(start, tensor.start) - tensor.start
                found.append(gradient[first : min(stop, tensor.stop) - tensor.start])
        return found[0] if len(found) == 1 else concatenate(found)


# Called with the number of a layer whose gradient is there, and with the result so far: gradients
# of layers before it, the loss and the statistics may be missing until layer 0.
OnLayer = Callable[[int, StepResult], None]
# Called before the forward pass of a layer; returns when its parameters are there.
BeforeLayer = Callable[[int], None]
