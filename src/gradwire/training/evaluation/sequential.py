"""Gradients one request after another, with plain autograd on views of the flat vector.

The result for a request does not depend on the others: evaluated alone in a process or among n
virtual workers it has the same bits.
"""

import torch

from gradwire.models.base import Model
from gradwire.training.evaluation.rule import has_convolutions
from gradwire.training.gradient import GradientRequest, GradientResult
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

    def _evaluate(self, request: GradientRequest) -> GradientResult:
        stacked = self.skeleton.draw_masks([request.key], request.inputs)
        masks = {name: mask[0] for name, mask in stacked.items()}
        with torch.enable_grad():
            params = request.params.detach().requires_grad_()  # a new leaf, the same memory
            tensors = self.skeleton.layout.unflatten(params)
            inputs = request.inputs
            if self.channels_last and inputs.dim() == 4:
                inputs = inputs.contiguous(memory_format=torch.channels_last)
            outputs, buffers = self.skeleton(tensors, request.buffers, masks, inputs)
            loss = self.model.loss(outputs, request.targets)
            (gradient,) = torch.autograd.grad(loss, params)
        return GradientResult(loss.detach(), gradient, buffers)
