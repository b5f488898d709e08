"""A task: a network to train, as pure functions of flat parameters. Data stays outside; every
call brings its batches.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn

from gradwire.core.profile import layers_of
from gradwire.core.replica import Bucket
from gradwire.core.tree import Tree, is_on, to_device
from gradwire.training.evaluation import USUAL, Arithmetic, Mode, make_evaluator, resolve
from gradwire.training.flat import FlatLayout
from gradwire.training.gradient import Batch, BeforeLayer, GradientRequest, GradientResult, OnLayer
from gradwire.training.objective import Objective
from gradwire.training.plain import PlainModule
from gradwire.training.skeleton import Skeleton, StatelessModule

__all__ = ["Batch", "Evaluation", "GradientRequest", "GradientResult", "Task"]


class Evaluation(NamedTuple):
    loss: float  # mean over the targets
    accuracy: float  # fraction of targets whose output is the largest, or a user's own metric


class Task:
    """A module made stateless, and the evaluator of its gradients.

    The module is copied; it is neither changed nor trained. `compile=None` compiles on CUDA.
    `is_plain`: its layers stay as they are, and gradients are evaluated one after another.
    """

    def __init__(
        self,
        model: Objective,
        module: nn.Module,
        device: torch.device | str = "cpu",
        mode: Mode = "auto",
        compile: bool | None = None,
        is_plain: bool = False,
        arithmetic: Arithmetic = USUAL,
    ) -> None:
        self.model = model
        # With its index, so that it equals the device of tensors that lie there.
        self.device = torch.empty(0, device=device).device
        stateless = PlainModule if is_plain else Skeleton
        self._skeleton: StatelessModule = stateless(module, self.device)
        self.mode = resolve(mode, self._skeleton.module, self.device)
        self._arithmetic = arithmetic
        self._evaluator = make_evaluator(model, self._skeleton, self.mode, compile, arithmetic)

    @property
    def layout(self) -> FlatLayout:
        return self._skeleton.layout

    def initial_params(self) -> Tensor:
        """The module's parameters, [d]."""
        return self._skeleton.params.clone()

    def initial_buffers(self) -> dict[str, Tensor]:
        """The running statistics of batch normalisation, by name."""
        return {name: buffer.clone() for name, buffer in self._skeleton.buffers.items()}

    @property
    def module(self) -> nn.Module:
        """The module whose layers are computed, for hooks."""
        return self._skeleton.module

    def loss(self, params: Mapping[str, Tensor], batch: Batch) -> Tensor:
        """The loss of a batch at these parameters, without dropout masks, for measurements."""
        inputs, targets = to_device(batch, self.device)
        with self._skeleton.generators(None):
            outputs, _ = self._skeleton(params, self.initial_buffers(), None, inputs, train=False)
            return self.model.loss(outputs, targets)

    def gradients(self, requests: Sequence[GradientRequest]) -> list[GradientResult]:
        """Loss, gradient and new statistics for each request, in order."""
        with self._arithmetic.used_on(self.device):
            return self._evaluator([self._checked(request) for request in requests])

    def gradient_by_layer(
        self,
        request: GradientRequest,
        on_layer: OnLayer,
        before_layer: BeforeLayer | None = None,
    ) -> None:
        """One gradient; calls back for each layer (`core/profile.py`) when its part is there.

        `before_layer`: the parameters are still arriving; called before those of a layer are read.
        """
        with self._arithmetic.used_on(self.device):
            self._evaluator.evaluate_layers(
                self._checked(request), self._layers, on_layer, before_layer
            )

    @cached_property
    def _layers(self) -> list[list[int]]:
        """The numbers of the tensors of each layer."""
        tensors = [Bucket(t.name, t.start, t.stop) for t in self.layout.tensors]
        return [
            [i for i, tensor in enumerate(tensors) if layer.start <= tensor.start < layer.stop]
            for layer in layers_of(tensors)
        ]

    def evaluate(
        self,
        params: Tensor,
        buffers: Mapping[str, Tensor],
        batches: Iterable[Batch],
        chunk_size: int = 1024,
    ) -> Evaluation:
        """Loss and accuracy over all batches, at most `chunk_size` examples at a time.

        Inputs or targets that are no tensors are not split.
        """
        self._check_params(params, buffers)
        # Sums stay on the device: reading each one would wait for it.
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        correct = torch.zeros((), dtype=torch.int64, device=self.device)
        num_targets: int | Tensor = 0
        arithmetic = self._arithmetic.used_on(self.device)
        with torch.no_grad(), arithmetic, self._skeleton.generators(None):
            tensors = self.layout.unflatten(params)
            for batch in batches:
                inputs, targets = to_device(batch, self.device)
                for few, wanted in _split(inputs, targets, chunk_size):
                    outputs, _ = self._skeleton(tensors, buffers, None, few, train=False)
                    count = self.model.count(wanted)
                    loss += self.model.loss(outputs, wanted).double() * count
                    correct = correct + self.model.correct(outputs, wanted)
                    num_targets = num_targets + count
        if num_targets == 0:
            raise ValueError("evaluate needs at least one example, got none")
        return Evaluation(float(loss) / int(num_targets), float(correct) / int(num_targets))

    def _checked(self, request: GradientRequest) -> GradientRequest:
        self._check_params(request.params, request.buffers)
        if is_on(request.inputs, self.device) and is_on(request.targets, self.device):
            return request
        inputs, targets = to_device((request.inputs, request.targets), self.device)
        return GradientRequest(request.params, request.buffers, inputs, targets, request.key)

    def _check_params(self, params: Tensor, buffers: Mapping[str, Tensor]) -> None:
        wanted = self._skeleton.params
        if params.shape != wanted.shape or params.dtype != wanted.dtype:
            raise ValueError(
                f"{self.model} has {wanted.numel()} parameters of type {wanted.dtype}, got shape "
                f"{tuple(params.shape)} of type {params.dtype}; start from task.initial_params()"
            )
        if buffers.keys() != self._skeleton.buffers.keys():
            raise ValueError(
                f"{self.model} has buffers {sorted(self._skeleton.buffers)}, got "
                f"{sorted(buffers)}; start from task.initial_buffers()"
            )


def _split(inputs: Tree, targets: Tree, size: int) -> Iterable[Batch]:
    if (
        isinstance(inputs, Tensor)
        and isinstance(targets, Tensor)
        and inputs.dim()
        and targets.dim()
    ):
        return zip(inputs.split(size), targets.split(size))
    return [(inputs, targets)]
