"""The two ways to evaluate gradient requests: one vmapped batch, or one after another."""

from collections.abc import Sequence
from typing import Protocol

from gradwire.training.evaluation.arithmetic import USUAL, Arithmetic
from gradwire.training.evaluation.cuda_graphs import recorder_for
from gradwire.training.evaluation.rule import FEW_ON_CUDA, Mode, resolve
from gradwire.training.evaluation.sequential import SequentialEvaluator
from gradwire.training.evaluation.vmap import VmapEvaluator
from gradwire.training.gradient import BeforeLayer, GradientRequest, GradientResult, OnLayer
from gradwire.training.objective import Objective
from gradwire.training.skeleton import Skeleton, StatelessModule

__all__ = [
    "USUAL",
    "Arithmetic",
    "Evaluator",
    "Mode",
    "SequentialEvaluator",
    "VmapEvaluator",
    "make_evaluator",
    "resolve",
]


class Evaluator(Protocol):
    def __call__(self, requests: list[GradientRequest]) -> list[GradientResult]: ...

    def evaluate_layers(
        self,
        request: GradientRequest,
        layers: Sequence[Sequence[int]],
        on_layer: OnLayer,
        before_layer: BeforeLayer | None = None,
    ) -> None:
        """One gradient; `layers` has the numbers of the tensors of each layer.

        `before_layer`: parameters are still arriving.
        """
        ...


def make_evaluator(
    model: Objective,
    skeleton: StatelessModule,
    mode: Mode,
    compile: bool | None,
    arithmetic: Arithmetic = USUAL,
) -> Evaluator:
    """`compile=None` compiles on CUDA, where it pays; sequential evaluation never compiles."""
    device = skeleton.device
    channels_last = arithmetic.channels_last and device.type == "cuda"
    if resolve(mode, skeleton.module, device) == "sequential":
        return SequentialEvaluator(model, skeleton, channels_last)
    assert isinstance(skeleton, Skeleton), "vmap needs pure layers"
    if compile is None:
        compile = device.type == "cuda"
    few = FEW_ON_CUDA if device.type == "cuda" else 1
    recorder = recorder_for(device)
    return VmapEvaluator(model, skeleton, compile, channels_last, few, recorder)
