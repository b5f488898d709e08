"""Gradients one request after another, with plain autograd on views of the flat vector.

The result for a request does not depend on the others: evaluated alone in a process or among n
virtual workers it has the same bits.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor

from gradwire.core.group import concatenate
from gradwire.models.base import Model
from gradwire.training.evaluation.arriving import ArrivingParams
from gradwire.training.evaluation.rule import has_convolutions
from gradwire.training.evaluation.side_by_side import SideBySide
from gradwire.training.gradient import (
    BeforeLayer,
    GradientByTensor,
    GradientRequest,
    GradientResult,
    OnLayer,
)
from gradwire.training.objective import Objective
from gradwire.training.skeleton import Skeleton, StatelessModule

Buffers = dict[str, Tensor]


class SequentialEvaluator:
    mode = "sequential"

    def __init__(
        self, model: Objective, skeleton: StatelessModule, channels_last: bool = False
    ) -> None:
        self.model = model
        self.skeleton = skeleton
        # A CPU convolves faster when channels are innermost: ResNet-20 20-25%. The inputs decide
        # the layout of all that follows; copying the weights into it as well gains nothing.
        is_cpu = skeleton.device.type == "cpu"
        may_change = (is_cpu or channels_last) and not skeleton.keeps_memory_format
        self.channels_last = may_change and has_convolutions(skeleton.module)
        self._side_by_side: SideBySide | None = None
        # Code of users may have state that all workers share, such as the global generators.
        if is_cpu and isinstance(skeleton, Skeleton) and isinstance(model, Model):
            self._side_by_side = SideBySide(skeleton, self._evaluate)

    def __call__(self, requests: list[GradientRequest]) -> list[GradientResult]:
        if self._side_by_side is not None and len(requests) > 1:
            return self._side_by_side.run(requests)
        return [self._evaluate(self.skeleton, request) for request in requests]

    def evaluate_layers(
        self,
        request: GradientRequest,
        layers: Sequence[Sequence[int]],
        on_layer: OnLayer,
        before_layer: BeforeLayer | None = None,
    ) -> None:
        """One gradient. Calls back when that of a layer is there, last layer first."""
        if self.skeleton.device.type != "cpu":  # hooks would run on a thread of the device
            if before_layer is not None:
                before_layer(len(layers) - 1)
            on_layer(0, self._evaluate(self.skeleton, request))
            return
        result = GradientByTensor(self.skeleton.layout)
        layer_of = {tensor: layer for layer, own in enumerate(layers) for tensor in own}
        missing = [len(own) for own in layers]
        reached = len(layers)  # the gradients of layers from here on are there

        def arrive(tensor: int, value: Tensor) -> None:
            nonlocal reached
            result.put(tensor, _dense(value))
            missing[layer_of[tensor]] -= 1
            before = reached
            while reached > 1 and not missing[reached - 1]:  # layer 0 comes with the loss
                reached -= 1
            if reached < before:
                with torch.no_grad():
                    on_layer(reached, result)

        leaves, loss, buffers = self._forward(self.skeleton, request, layer_of, before_layer)
        hooks = [leaf.register_hook(partial(arrive, i)) for i, leaf in enumerate(leaves)]
        gradients = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
        for number, gradient in enumerate(gradients):
            hooks[number].remove()
            result.put(number, _dense(gradient))  # zeros, where no hook was called
        result.loss, result.buffers = loss.detach(), buffers
        on_layer(0, result)

    def _evaluate(self, skeleton: StatelessModule, request: GradientRequest) -> GradientResult:
        leaves, loss, buffers = self._forward(skeleton, request)
        gradients = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
        gradient = concatenate([_dense(gradient).reshape(-1) for gradient in gradients])
        return GradientResult(loss.detach(), gradient, buffers)

    def _forward(
        self,
        skeleton: StatelessModule,
        request: GradientRequest,
        layer_of: Mapping[int, int] | None = None,  # by tensor
        before_layer: BeforeLayer | None = None,
    ) -> tuple[list[Tensor], Tensor, Buffers]:
        """The tensors with respect to which gradients are computed, the loss, the statistics."""
        drawn = skeleton.draw(request.key, request.inputs)
        with torch.enable_grad():
            # `data`: where parameters are still arriving, autograd must not see it as a change.
            flat = request.params.data
            tensors = skeleton.layout.unflatten(flat)
            leaves = [tensor.requires_grad_() for tensor in tensors.values()]
            inputs = request.inputs
            if self.channels_last and isinstance(inputs, Tensor) and inputs.dim() == 4:
                inputs = inputs.contiguous(memory_format=torch.channels_last)
            arriving: AbstractContextManager[object] = nullcontext()
            if before_layer is not None and layer_of is not None:
                layers = {id(leaf): layer_of[i] for i, leaf in enumerate(leaves)}
                arriving = ArrivingParams(layers, before_layer)
            with skeleton.generators(drawn):
                with arriving:  # leaves when all are there, whether they were read or not
                    outputs, buffers = skeleton(tensors, request.buffers, drawn, inputs)
                return leaves, self.model.loss(outputs, request.targets), buffers


def _dense(gradient: Tensor) -> Tensor:
    """A gradient as it is exchanged; that of an embedding may be sparse."""
    return gradient.to_dense() if gradient.is_sparse else gradient
