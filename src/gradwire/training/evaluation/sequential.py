"""Gradients one request after another, with plain autograd on views of the flat vector.

The result for a request does not depend on the others: evaluated alone in a process or among n
virtual workers it has the same bits.
"""

import torch
from torch import Tensor, nn

from gradwire.models.base import Model
from gradwire.training.gradient import GradientRequest, GradientResult
from gradwire.training.skeleton import Skeleton


class SequentialEvaluator:
    mode = "sequential"

    def __init__(self, model: Model, skeleton: Skeleton) -> None:
        self.model = model
        self.skeleton = skeleton
        # A CPU convolves 20% faster when channels are innermost.
        self.channels_last = skeleton.device.type == "cpu" and any(
            isinstance(layer, nn.Conv2d) for layer in skeleton.module.modules()
        )

    def __call__(self, requests: list[GradientRequest]) -> list[GradientResult]:
        return [self._evaluate(request) for request in requests]

    def _evaluate(self, request: GradientRequest) -> GradientResult:
        stacked = self.skeleton.draw_masks([request.key], request.inputs)
        masks = {name: mask[0] for name, mask in stacked.items()}
        with torch.enable_grad():
            params = request.params.detach().requires_grad_()  # a new leaf, the same memory
            tensors = self.skeleton.layout.unflatten(params)
            inputs = request.inputs
            if self.channels_last:
                inputs = _channels_last(inputs)
                tensors = {name: _channels_last(tensor) for name, tensor in tensors.items()}
            outputs, buffers = self.skeleton(tensors, request.buffers, masks, inputs)
            loss = self.model.loss(outputs, request.targets)
            (gradient,) = torch.autograd.grad(loss, params)
        return GradientResult(loss.detach(), gradient, buffers)


def _channels_last(tensor: Tensor) -> Tensor:
    if tensor.dim() != 4:
        return tensor
    return tensor.contiguous(memory_format=torch.channels_last)
