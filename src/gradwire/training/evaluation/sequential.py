"""Gradients one request after another, with plain autograd on views of the flat vector.

The result for a request does not depend on the others: evaluated alone in a process or among n
virtual workers it has the same bits.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from gradwire.models.base import Model
from gradwire.training.evaluation.rule import has_convolutions
from gradwire.training.gradient import GradientRequest, GradientResult, OnLayer
from gradwire.training.skeleton import Skeleton


class SequentialEvaluator:
    mode = "sequential"

    def __init__(self, model: Model, skeleton: Skeleton) -> None:
        self.model = model
        self.skeleton = skeleton
        # A CPU convolves faster when channels are innermost: ResNet-20 20-25%. The inputs decide
        # the layout of all that follows; copying the weights into it as well gains nothing.
        self.channels_last = skeleton.device.type == "cpu" and has_convolutions(skeleton.module)

    def __call__(self, requests: list[GradientRequest]) -> list[GradientResult]:
        return [self._evaluate(request) for request in requests]

    def evaluate_layers(
        self, request: GradientRequest, layers: Sequence[Sequence[int]], on_layer: OnLayer
    ) -> None:
        """One gradient. Calls back when that of a layer is there, last layer first."""
        if self.skeleton.device.type != "cpu":  # hooks would run on a thread of the device
            on_layer(0, self._evaluate(request))
            return
        gradient = torch.empty_like(request.params)
        pieces = self.skeleton.layout.split(gradient)
        layer_of = {tensor: layer for layer, own in enumerate(layers) for tensor in own}
        missing = [len(own) for own in layers]
        reached = len(layers)  # the gradients of layers from here on are there

        def arrive(tensor: int, value: Tensor) -> None:
            nonlocal reached
            with torch.no_grad():
                pieces[tensor].copy_(value.reshape(-1))
            missing[layer_of[tensor]] -= 1
            before = reached
            while reached > 1 and not missing[reached - 1]:  # layer 0 comes with the loss
                reached -= 1
            if reached < before:
                on_layer(reached, GradientResult(gradient.new_empty(()), gradient, {}))

        result = self._evaluate(request, arrive)
        on_layer(0, result)

    def _evaluate(
        self, request: GradientRequest, on_tensor: Callable[[int, Tensor], None] | None = None
    ) -> GradientResult:
        """`on_tensor` gets the number and the gradient of each tensor when it is there."""
        stacked = self.skeleton.draw_masks([request.key], request.inputs)
        masks = {name: mask[0] for name, mask in stacked.items()}
        with torch.enable_grad():
            params = request.params.detach().requires_grad_()  # a new leaf, the same memory
            tensors = self.skeleton.layout.unflatten(params)
            if on_tensor is not None:
                for number, tensor in enumerate(tensors.values()):
                    tensor.register_hook(partial(on_tensor, number))
            inputs = request.inputs
            if self.channels_last and inputs.dim() == 4:
                inputs = inputs.contiguous(memory_format=torch.channels_last)
            outputs, buffers = self.skeleton(tensors, request.buffers, masks, inputs)
            loss = self.model.loss(outputs, request.targets)
            (gradient,) = torch.autograd.grad(loss, params)
        return GradientResult(loss.detach(), gradient, buffers)
