"""Gradients of many requests as one batched computation (`torch.func.vmap` over `grad`).

The batched computation is traced once per number of requests and shape of batch into a graph of
plain tensor operations, backward pass included. Replaying the graph skips autograd and vmap:
for 32 workers x mlp on two cores 1.4 ms instead of 2.3 ms. On CUDA the graph is compiled, and what
it does is recorded (`graphs.py`).

Convolutions of n workers are one grouped convolution. On CUDA that is slow for few groups, so up to
`few` requests are evaluated by the program for one request, side by side.
"""

from collections.abc import Hashable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel

from gradwire.core.rows import rows_in_memory, split_rows, stack_rows
from gradwire.core.tree import Tree, signature_of, tensors_of, with_tensors
from gradwire.models.base import Model
from gradwire.training.evaluation.compiling import compiled
from gradwire.training.evaluation.graphs import OneByOne, Program, RecordedPrograms, Recorder
from gradwire.training.evaluation.rule import has_convolutions
from gradwire.training.evaluation.simplifying import simplify
from gradwire.training.evaluation.stages import StagedGraph
from gradwire.training.evaluation.statistics import StatisticsLayout
from gradwire.training.gradient import (
    BeforeLayer,
    GradientByTensor,
    GradientRequest,
    GradientResult,
    OnLayer,
)
from gradwire.training.layers import PureBatchNorm
from gradwire.training.objective import Objective
from gradwire.training.skeleton import Skeleton

_MAX_TRACES = 16  # batches of ever new shapes are evaluated without


class _Prepared(NamedTuple):
    program: Program
    arguments: tuple[Tensor, ...]
    key: Hashable  # None: the program was not traced


class VmapEvaluator:
    mode = "vmap"

    def __init__(
        self,
        model: Objective,
        skeleton: Skeleton,
        compile: bool,
        channels_last: bool = False,
        few: int = 1,
        recorder: Recorder | None = None,
    ) -> None:
        self.model = model
        self.skeleton = skeleton
        self.compile = compile
        self.channels_last = channels_last
        # Workers in lockstep share one vector. A matrix product with it needs no batch (32 workers
        # x mlp on a CPU: 1.4 ms against 1.7); a convolution does (32 x resnet20 on an H200: 49 ms
        # against 34).
        self.share = not has_convolutions(skeleton.module)
        self.few = 1 if self.share else few
        self._recorded = None if recorder is None else RecordedPrograms(recorder)
        self._statistics = StatisticsLayout(skeleton.buffers)
        self._programs = self._known_programs()
        self._staged: dict[Program, StagedGraph] = {}
        self._stacked: Tensor | None = None
        for layer in skeleton.module.modules():
            if isinstance(layer, PureBatchNorm):
                layer.use_torch_kernel = False

    def __call__(self, requests: list[GradientRequest]) -> list[GradientResult]:
        results: list[GradientResult | None] = [None] * len(requests)
        for group in _groups(requests):
            for indices in _pieces(group, self.compile, self.few):
                some = [requests[index] for index in indices]
                is_few = 1 < len(some) <= self.few
                piece = self._run(self._prepare_each(some) if is_few else self._prepare(some))
                for index, result in zip(indices, piece):
                    results[index] = result
        return [result for result in results if result is not None]

    @torch.no_grad()
    def evaluate_layers(
        self,
        request: GradientRequest,
        layers: Sequence[Sequence[int]],
        on_layer: OnLayer,
        before_layer: BeforeLayer | None = None,
    ) -> None:
        """One gradient. Calls back when that of a layer is there, last layer first.

        The forward pass begins when all parameters are there: it is not cut into stages.
        """
        if before_layer is not None:
            before_layer(len(layers) - 1)
        prepared = self._prepare([request])
        staged = self._stages(prepared.program, layers)
        if staged is None:
            (result,) = self._run(prepared)
            on_layer(0, result)
            return
        growing = GradientByTensor(self.skeleton.layout)
        for layer, gradients, others in staged.run(*prepared.arguments):
            for number, piece in zip(layers[layer], gradients):
                growing.put(number, piece)
            if others:  # with the first layer, which is reached last
                losses, *statistics = others
                growing.loss = losses[0]
                (growing.buffers,) = self._statistics.rows(statistics, 1)
            on_layer(layer, growing)

    def _stages(self, program: Program, layers: Sequence[Sequence[int]]) -> StagedGraph | None:
        """None if the gradient comes as a whole: it is compiled, or that of one tensor."""
        if not isinstance(program, GraphModule) or sum(map(len, layers)) == 1:
            return None
        if program not in self._staged:
            self._staged[program] = StagedGraph(program, layers)
        return self._staged[program]

    @torch.no_grad()
    def _run(self, prepared: _Prepared) -> list[GradientResult]:
        program, arguments, key = prepared
        if self._recorded is None or key is None:
            results = program(*arguments)
        else:
            results = self._recorded.call(key, program, arguments)
        gradients, losses, *statistics = results
        buffers = self._statistics.rows(statistics, len(losses))
        return list(map(GradientResult, losses.unbind(), split_rows(gradients), buffers))

    @torch.no_grad()
    def _prepare(self, requests: list[GradientRequest]) -> _Prepared:
        """One program for all of these requests."""
        first = requests[0]
        shared = self.share and all(request.params is first.params for request in requests)
        params = first.params if shared else self._stack([request.params for request in requests])
        rest, mask_names = self._stacked_rest(requests)
        return self._program(shared, first, (params, *rest), mask_names)

    @torch.no_grad()
    def _prepare_each(self, requests: list[GradientRequest]) -> _Prepared:
        """The program for one request, for each of these."""
        rest, mask_names = self._stacked_rest(requests)
        rows = zip(*(stacked.split(1) for stacked in rest))
        each = [(r.params.unsqueeze(0), *row) for r, row in zip(requests, rows, strict=True)]
        alone = self._program(False, requests[0], each[0], mask_names)
        arguments = tuple(argument for own in each for argument in own)
        key = None if alone.key is None else (len(each), alone.key)
        return _Prepared(OneByOne(alone.program, len(each)), arguments, key)

    def _stacked_rest(self, requests: list[GradientRequest]) -> tuple[list[Tensor], list[str]]:
        """All arguments but the parameters, each [n, ...], and the names of the last ones."""
        tensors = [tensors_of(r.inputs) + tensors_of(r.targets) for r in requests]
        examples = [stack_rows(each) for each in zip(*tensors)]  # [n, B, ...]
        statistics = self._statistics.stack([request.buffers for request in requests])
        keys = [request.key for request in requests]
        masks = self.skeleton.draw_masks(keys, requests[0].inputs)
        return [*examples, *statistics, *masks.values()], list(masks)

    def _program(
        self,
        shared: bool,
        first: GradientRequest,
        arguments: tuple[Tensor, ...],
        mask_names: list[str],
    ) -> _Prepared:
        """The program for these arguments; traced, unless there are too many already."""
        batch = (first.inputs, first.targets)
        # Static shapes: one program for each number of requests and shape of batch.
        shapes = [(tuple(a.shape), a.dtype) for a in arguments]
        signature = (shared, signature_of(batch), *shapes)
        program = self._programs.get(signature)
        if program is None:
            step = self._batched(shared, batch, mask_names, len(arguments))
            if len(self._programs) >= _MAX_TRACES:
                return _Prepared(step, arguments, None)
            program = self._programs[signature] = self._trace(step, arguments)
        return _Prepared(program, arguments, signature)

    def _known_programs(self) -> dict[tuple[object, ...], Program]:
        """Where programs are kept: with those of other runs of this model in this process, if
        nothing but the model decides what is computed."""
        module, skeleton = self.skeleton.module, self.skeleton
        is_trained = all(parameter.requires_grad for parameter in module.parameters())
        has_constants = len(list(module.buffers())) > len(skeleton.buffers)
        if not isinstance(self.model, Model) or has_constants or not is_trained:
            return {}
        kind = skeleton.layout, skeleton.params.dtype, skeleton.device
        return _programs_of(self.model, kind, self.compile, self.channels_last)

    def _stack(self, params: list[Tensor]) -> Tensor:
        """[n, d], in the same memory each time: no result refers to it."""
        whole = rows_in_memory(params)
        if whole is not None:
            return whole
        if self._stacked is None or len(self._stacked) < len(params):
            self._stacked = params[0].new_empty(len(params), len(params[0]))
        return torch.stack(params, out=self._stacked[: len(params)])

    def _batched(
        self, shared: bool, batch: Tree, mask_names: list[str], num_arguments: int
    ) -> Program:
        """The computation for all workers at once; its arguments are those of `_prepare`."""
        num_examples = len(tensors_of(batch))
        num_vectors = len(self._statistics.dtypes)

        def loss(params: Tensor, *rest: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
            inputs, targets = with_tensors(batch, list(rest[:num_examples]))
            rest = rest[num_examples:]
            tensors = self.skeleton.layout.unflatten(params)
            buffers = self._statistics.unflatten(rest[:num_vectors])
            masks = dict(zip(mask_names, rest[num_vectors:]))
            outputs, buffers = self.skeleton(tensors, buffers, masks, inputs)
            return self.model.loss(outputs, targets), tuple(self._statistics.flatten(buffers))

        def step(*one: Tensor) -> tuple[Tensor, ...]:
            gradient, (value, statistics) = grad_and_value(loss, has_aux=True)(*one)
            return gradient, value, *statistics

        in_dims = (None if shared else 0, *[0] * (num_arguments - 1))

        def evaluate(*arguments: Tensor) -> tuple[Tensor, ...]:
            # Fused attention kernels have no batching rule for the backward: vmap would loop.
            with sdpa_kernel(SDPBackend.MATH):
                results: tuple[Tensor, ...] = vmap(step, in_dims=in_dims)(*arguments)
                return results

        return evaluate

    def _trace(self, step: Program, arguments: tuple[Tensor, ...]) -> Program:
        graph = make_fx(step)(*arguments)
        simplify(graph)
        return compiled(graph, self.channels_last) if self.compile else graph


@lru_cache(maxsize=8)  # only a memory: tracing gives the same program again
def _programs_of(
    model: Model, kind: tuple[object, ...], compile: bool, channels_last: bool
) -> dict[tuple[object, ...], Program]:
    return {}


def _groups(requests: list[GradientRequest]) -> Iterator[list[int]]:
    """Indices of requests whose batches have equal shapes and types, in order of appearance."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for index, request in enumerate(requests):
        shapes = signature_of(request.inputs), signature_of(request.targets)
        groups.setdefault(shapes, []).append(index)
    yield from groups.values()


def _pieces(indices: list[int], powers_of_two: bool, few: int = 1) -> Iterator[list[int]]:
    """Asynchronous workers ask in groups of any size. Compiling takes seconds, so compiled
    programs exist for powers of two only, 24 = 16 + 8; tracing alone takes any size at once, and
    so do programs for one request, which a piece of at most `few` takes: 9 = 8 + 1 takes it twice.
    """
    start = 0
    while start < len(indices):
        left = len(indices) - start
        size = 1 << (left.bit_length() - 1) if powers_of_two and left > few else left
        yield indices[start : start + size]
        start += size
