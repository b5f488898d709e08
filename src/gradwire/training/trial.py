"""Tries a user's own module on a few batches, and chooses how its gradients are evaluated.

All workers at once by vmap, where functorch can do that and gives the same gradients; else one
worker after another. The choice depends on the module and the batches alone, not on timings, so
every engine makes the same one. Nothing is compiled: that may take longer than a short run.
"""

import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from gradwire.core.generators import seeded
from gradwire.core.key import Key
from gradwire.core.tree import signature_of
from gradwire.training.evaluation import USUAL, Arithmetic, Mode, resolve
from gradwire.training.evaluation.rule import FEW_ON_CUDA, has_convolutions
from gradwire.training.gradient import Batch, GradientRequest, GradientResult
from gradwire.training.objective import Objective
from gradwire.training.task import Task

_TOLERANCE = 1e-2  # of the relative difference of two gradients, float16 included
_KEY = Key(0)
_NOT_OWN = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))  # folders of code


class Trial(NamedTuple):
    task: Task
    reason: str = ""  # why gradients are evaluated one after another, if vmap was not asked not to
    is_unable: bool = False  # whether vmap cannot do it, and it is not by choice


def try_module(
    model: Objective,
    module: nn.Module,
    device: torch.device,
    mode: Mode,
    batches: Sequence[Batch],
    source: str,
    arithmetic: Arithmetic = USUAL,
) -> Trial:
    """`batches` are some of different workers and steps; `source` is the name of the data.

    Raises ValueError if the module, its loss or its gradient does not work on the first one.
    """
    with seeded(0, device):
        plain = Task(model, module, device, "sequential", is_plain=True, arithmetic=arithmetic)
        expected = _try_plain(plain, batches[0], source)
        if mode == "sequential":
            return Trial(plain)
        if resolve(mode, module, device) == "sequential":
            return Trial(plain, "its size or its kind of layers make that faster")
        if mode == "auto" and len({signature_of(batch) for batch in batches}) > 1:
            return Trial(plain, "batches differ in shape, and vmap takes batches of one shape")
        try:
            batched = Task(model, module, device, "vmap", compile=False, arithmetic=arithmetic)
            requests = [_request(batched, batch, _KEY) for batch in batches[:2]]
            if device.type == "cuda" and has_convolutions(module):
                requests = (requests * FEW_ON_CUDA)[: FEW_ON_CUDA + 1]  # fewer are not batched
            found = batched.gradients(requests)
            why = _difference(plain, batches[0], expected, found[0]) or _lost_buffer(
                plain.initial_buffers(), expected.buffers, found[0].buffers
            )
        except Exception as error:
            why = _first_line(error)
        if not why:
            return Trial(batched)
        if mode == "vmap":
            raise ValueError(f"{model!r} cannot be evaluated by vmap: {why}. Take evaluation=auto.")
        return Trial(plain, f"vmap cannot evaluate it: {why}", is_unable=True)


def _try_plain(task: Task, batch: Batch, source: str) -> GradientResult:
    try:
        (result,) = task.gradients([_request(task, batch, _KEY)])
        params, buffers = task.initial_params(), task.initial_buffers()
        task.evaluate(params, buffers, [batch])
    except Exception as error:
        raise ValueError(
            f"{task.model!r} does not work on a batch of {source}{_where(error)}: "
            f"{type(error).__name__}: {error}"
        ) from error
    return result


def _request(task: Task, batch: Batch, key: Key) -> GradientRequest:
    inputs, targets = batch
    return GradientRequest(task.initial_params(), task.initial_buffers(), inputs, targets, key)


def _difference(task: Task, batch: Batch, expected: GradientResult, found: GradientResult) -> str:
    """How a gradient differs from the expected one; "" if it does not.

    One that depends on random numbers differs anyway: those are drawn in other ways.
    """
    keys = _KEY, _KEY.child("another")
    again, other = task.gradients([_request(task, batch, key) for key in keys])
    wanted, got = expected.gradient.double(), found.gradient.double()
    if not wanted.isfinite().all():
        return ""
    if not torch.equal(again.gradient, expected.gradient):
        return "its gradient depends on more than parameters, buffers, batch and generators"
    if not torch.equal(other.gradient, expected.gradient):
        return ""
    if float((got - wanted).norm()) <= _TOLERANCE * float(wanted.norm()) + 1e-12:
        return ""
    return "its gradients are others than those of plain PyTorch"


def _lost_buffer(
    before: Mapping[str, Tensor], expected: Mapping[str, Tensor], found: Mapping[str, Tensor]
) -> str:
    for name, buffer in expected.items():
        if name not in found and not torch.equal(buffer, before[name]):
            return f"its forward pass changes the buffer {name}"
    return ""


def _first_line(error: Exception) -> str:
    text = str(error).strip().splitlines() or [type(error).__name__]
    return text[0].removesuffix(".")


def _where(error: BaseException) -> str:
    """The place in the user's own code at which an error was raised, if there is one."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(_NOT_OWN)]
    return f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""
