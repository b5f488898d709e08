"""Gradient requests of workers and the results of tasks; both are values.

Nothing in a request is changed by evaluating it, so virtual workers may share tensors. The
tensors of results are new, but results evaluated together may be rows of one tensor: treat them
as values too.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from gradwire.core.key import Key

Batch = tuple[Tensor, Tensor]  # inputs [B, ...], targets [B] or, for text, [B, L]


@dataclass(frozen=True, eq=False, slots=True)
class GradientRequest:
    """One worker's step: its parameters, its running statistics, its batch, its randomness."""

    params: Tensor  # [d]
    buffers: Mapping[str, Tensor]
    inputs: Tensor  # [B, ...]
    targets: Tensor
    key: Key  # names seed, step and rank; dropout masks are drawn from it


@dataclass(frozen=True, eq=False, slots=True)
class GradientResult:
    loss: Tensor  # scalar, the mean over the batch
    gradient: Tensor  # [d]
    buffers: dict[str, Tensor]  # running statistics after the step


# Called with the number of a layer whose gradient is there, and with the result so far: gradients
# of layers before it, the loss and the statistics may be missing until layer 0.
OnLayer = Callable[[int, GradientResult], None]
