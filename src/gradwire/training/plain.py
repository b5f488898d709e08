"""A user's own module evaluated as it is, for one worker at a time.

Unlike a `Skeleton` it replaces no layers. So anything that PyTorch can do goes: control flow on
values, buffers that change in place, draws from the global generators. These are seeded from the
worker's key for each gradient, the loss included, and the buffers are the worker's own. Evaluation
on test data draws the same numbers each time.
"""

import copy
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from gradwire.core.generators import seed_of, seeded
from gradwire.core.key import Key
from gradwire.core.tree import Tree
from gradwire.training.calling import arguments_of
from gradwire.training.flat import FlatLayout
from gradwire.training.skeleton import refresh_recurrent_weights

_TEST_SEED = 0


class PlainModule:
    """A copy of a module, as a function of parameters, buffers and a key."""

    keeps_memory_format = True  # a module may rely on that of its inputs, `x.view(...)`

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        try:
            self.module = copy.deepcopy(module).to(device)
        except Exception as error:
            raise ValueError(
                f"{type(module).__name__} cannot be copied, and each run trains a copy: "
                f"{type(error).__name__}: {error}. Give a function that makes it instead, "
                "model=make_model."
            ) from error
        self.device = device
        self.layout = FlatLayout.of(self.module)
        self.params = self.layout.flatten(self.module)
        self.buffers = {name: each.detach() for name, each in self.module.named_buffers()}
        refresh_recurrent_weights(self.module)

    def draw(self, key: Key, inputs: Tree) -> Key:
        """What one forward pass draws comes from this key."""
        return key.child("module")

    def generators(self, drawn: Key | None) -> AbstractContextManager[None]:
        return seeded(_TEST_SEED if drawn is None else seed_of(drawn), self.device)

    def __call__(
        self,
        params: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        drawn: Key | None,
        inputs: Tree,
        train: bool = True,
    ) -> tuple[Any, dict[str, Tensor]]:
        """Outputs and new buffers; those that did not change are the same tensors as before."""
        if self.module.training != train:
            self.module.train(train)
        copies = {name: buffer.clone() for name, buffer in buffers.items()}
        tensors = {**params, **copies}
        args, kwargs = arguments_of(self.module, inputs)
        outputs = functional_call(self.module, tensors, args, kwargs)
        # functional_call puts assigned buffers back. A version would not tell what changed in
        # place: batch normalisation does not count its changes.
        after = {name: tensors[name].detach() for name in buffers}
        return outputs, {name: _kept(buffers[name], after[name]) for name in buffers}


def _kept(before: Tensor, after: Tensor) -> Tensor:
    """The tensor of before if nothing changed, so that workers share constants."""
    is_same = before.shape == after.shape and before.dtype == after.dtype
    return before if is_same and torch.equal(before, after) else after
