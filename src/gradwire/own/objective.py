"""The loss and the metric of a user's own task: given functions, or what suits the targets.

Integer targets: cross entropy and accuracy; targets of -100 do not count, as in torch. Other
targets: mean squared error, and the loss as the metric.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gradwire.core.tree import Tree, tensors_of

Function = Callable[[Any, Any], Any]  # of outputs and targets
_IGNORED = -100  # F.cross_entropy's default


class OwnObjective:
    """`name` is that of the model, for messages."""

    def __init__(self, name: str, loss: Function, metric: Function) -> None:
        self.name = name
        self._loss = loss
        self._metric = metric

    def __repr__(self) -> str:
        return self.name

    def loss(self, outputs: Any, targets: Tree) -> Tensor:
        """Mean loss over the batch."""
        loss = self._loss(outputs, targets)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            shape = f"shape {list(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
            raise ValueError(
                f"the loss of {self.name} must be one number, a tensor with one element; got "
                f"{shape}. Take the mean over the batch."
            )
        return loss.reshape(())

    def correct(self, outputs: Any, targets: Tree) -> Tensor:
        """The metric of a batch times its `count`."""
        value = torch.as_tensor(self._metric(outputs, targets))
        if value.numel() != 1:
            raise ValueError(
                f"the metric of {self.name} must be one number, got shape {list(value.shape)}. "
                "Take the mean over the batch."
            )
        return value.detach().reshape(()).double() * self.count(targets)

    def count(self, targets: Tree) -> int | Tensor:
        """The weight of a batch in means over batches: its targets, or its examples."""
        if is_class_target(targets):
            return (targets != _IGNORED).sum()
        if isinstance(targets, list):
            return len(targets)
        tensors = [tensor for tensor in tensors_of(targets) if tensor.dim()]
        return len(tensors[0]) if tensors else 1


def is_class_target(targets: Tree) -> bool:
    """Whether these are classes: a tensor of integers."""
    if not isinstance(targets, Tensor) or targets.dtype is torch.bool:
        return False
    return not (targets.is_floating_point() or targets.is_complex())


def cross_entropy(outputs: Any, targets: Any) -> Tensor:
    """Of logits [B, C, ...] or [..., C] and classes."""
    logits = _logits_last(outputs, targets)
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten().long())


def accuracy(outputs: Any, targets: Any) -> Tensor:
    """The fraction of targets whose logit is the largest."""
    counts = targets != _IGNORED
    is_right = (_logits_last(outputs, targets).argmax(dim=-1) == targets) & counts
    return is_right.sum().double() / counts.sum().clamp(min=1)


def mse(outputs: Any, targets: Any) -> Tensor:
    """Mean squared error of outputs that have the shape of the targets."""
    if not (isinstance(outputs, Tensor) and isinstance(targets, Tensor)):
        raise ValueError(_no_default(outputs, targets))
    if not targets.is_floating_point():
        raise ValueError(
            f"targets of type {targets.dtype} have no default loss: give a function loss=... of "
            "(outputs, targets)"
        )
    if outputs.shape != targets.shape:
        raise ValueError(
            f"mean squared error needs outputs in the shape of the targets; got outputs "
            f"{list(outputs.shape)} and targets {list(targets.shape)}. Reshape one of them, or "
            "give a function loss=... of (outputs, targets)."
        )
    return F.mse_loss(outputs, targets)


def _logits_last(outputs: Any, targets: Any) -> Tensor:
    """Logits as [..., C]; torch's own convention is [B, C, ...]."""
    if not isinstance(outputs, Tensor) or not is_class_target(targets):
        raise ValueError(_no_default(outputs, targets))
    shape, wanted = tuple(outputs.shape), tuple(targets.shape)
    if shape[:1] + shape[2:] == wanted:
        logits = outputs.movedim(1, -1)
    elif shape[:-1] == wanted:
        logits = outputs
    else:
        logits = outputs[..., None]
    if logits.shape[-1] < 2:
        raise ValueError(
            "cross entropy needs outputs [batch, classes, ...] or [..., classes] for integer "
            f"targets [batch, ...]; got outputs {list(shape)} and targets {list(wanted)}. Make the "
            "targets floating point for mean squared error, or give a function loss=... of "
            "(outputs, targets)."
        )
    return logits


def _no_default(outputs: Any, targets: Any) -> str:
    return (
        "the default losses are for outputs and targets that are one tensor each; the model "
        f"returned {type(outputs).__name__}, the targets are {type(targets).__name__}. Give a "
        "function loss=... of (outputs, targets), and metric=... likewise."
    )


LOSSES: dict[str, Function] = {"cross_entropy": cross_entropy, "mse": mse}
METRICS: dict[str, Function] = {"accuracy": accuracy}
