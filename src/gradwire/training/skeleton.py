"""A module without state: parameters, running statistics and dropout masks go in as arguments,
outputs and new statistics come out. Both ways to evaluate gradients call this one function.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call

from gradwire.core.key import Key
from gradwire.core.tree import Tree, signature_of
from gradwire.training.calling import arguments_of
from gradwire.training.flat import FlatLayout
from gradwire.training.layers import KeyedDropout, PureBatchNorm, purify

_FEW_DRAWS = 65_536


class _Mask(NamedTuple):
    """One dropout mask of a forward pass: the buffer that takes it and its shape."""

    buffer: str
    layer: KeyedDropout
    shape: tuple[int, ...]


class StatelessModule(Protocol):
    """A module as a function of parameters and buffers: a `Skeleton`, or a `PlainModule`."""

    module: nn.Module
    device: torch.device
    layout: FlatLayout
    params: Tensor  # [d], the initial ones
    buffers: dict[str, Tensor]
    keeps_memory_format: bool

    def draw(self, key: Key, inputs: Tree) -> Any:
        """The randomness of one forward pass."""
        ...

    def generators(self, drawn: Any) -> AbstractContextManager[object]:
        """Where the module and its loss are evaluated: global generators as `drawn` says."""
        ...

    def __call__(
        self,
        params: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        drawn: Any,
        inputs: Tree,
        train: bool = True,
    ) -> tuple[Any, dict[str, Tensor]]:
        """Outputs and new buffers; `drawn` is None if it is not trained."""
        ...


class Skeleton:
    """The shape of a module's computation, with its first parameters and statistics."""

    keeps_memory_format = False

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self.module = purify(module).to(device)
        self.device = device
        self.layout = FlatLayout.of(self.module)
        self.params = self.layout.flatten(self.module)  # [d], the initial ones
        self.buffers: dict[str, Tensor] = {}  # running statistics; other buffers are constants
        self._dropouts: dict[str, KeyedDropout] = {}
        for name, layer in self.module.named_modules():
            if isinstance(layer, PureBatchNorm):
                for key, buffer in layer.named_buffers():
                    self.buffers[f"{name}.{key}" if name else key] = buffer
            elif isinstance(layer, KeyedDropout):
                self._dropouts[name] = layer
        refresh_recurrent_weights(self.module)
        self._aliases = _aliases(self.module)
        self._masks: dict[tuple[object, ...], list[_Mask]] = {}  # by shape of the inputs

    def __call__(
        self,
        params: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        drawn: Mapping[str, Tensor] | None,
        inputs: Tree,
        train: bool = True,
    ) -> tuple[Any, dict[str, Tensor]]:
        """Outputs and new statistics; `drawn` are the dropout masks."""
        if self.module.training != train:
            self.module.train(train)
        for layer in self._dropouts.values():
            layer.num_calls = 0
        tensors = {**params, **buffers, **(drawn or {})}
        for alias, name in self._aliases.items():
            tensors[alias] = tensors[name]
        # functional_call writes buffers that the forward assigned back into `tensors`. It need
        # not look for tied weights, a walk over the module: the aliases are known.
        args, kwargs = arguments_of(self.module, inputs)
        outputs = functional_call(self.module, tensors, args, kwargs, tie_weights=False)
        return outputs, {name: tensors[name] for name in buffers}

    def generators(self, drawn: object) -> AbstractContextManager[object]:
        return nullcontext()  # it is refused if it draws from them

    def draw(self, key: Key, inputs: Tree) -> dict[str, Tensor]:
        """The dropout masks of one worker."""
        return {name: mask[0] for name, mask in self.draw_masks([key], inputs).items()}

    def draw_masks(self, keys: Sequence[Key], inputs: Tree) -> dict[str, Tensor]:
        """Dropout masks for len(keys) workers with batches shaped like `inputs`, [n, ...] each.

        One draw per worker serves all layers: a short Philox draw costs as much as a long one.
        """
        masks = self._recorded_masks(inputs)
        if not masks:
            return {}
        sizes = [torch.Size(mask.shape).numel() for mask in masks]
        # A key gives the same bits everywhere; few are drawn sooner on the CPU, in one call,
        # than by a hundred small operations on a device.
        where = torch.device("cpu") if sum(sizes) <= _FEW_DRAWS else self.device
        draws = [key.child("dropout").uniform(sum(sizes), where) for key in keys]
        columns = torch.split(torch.stack(draws).to(self.device), sizes, dim=1)
        return {
            mask.buffer: mask.layer.mask(column.view(len(keys), *mask.shape)).to(self.params.dtype)
            for mask, column in zip(masks, columns)
        }

    def _recorded_masks(self, inputs: Tree) -> list[_Mask]:
        shape = signature_of(inputs)
        if shape not in self._masks:
            self._record(inputs)
            self._masks[shape] = [
                _Mask(f"{name}.mask_{call}" if name else f"mask_{call}", layer, mask_shape)
                for name, layer in self._dropouts.items()
                for call, mask_shape in enumerate(layer.shapes)
            ]
        return self._masks[shape]

    def _record(self, inputs: Tree) -> None:
        """Records the masks' shapes in one forward; refuses modules that are not pure."""
        constants = {
            name: (buffer, buffer._version)
            for name, buffer in self.module.named_buffers()
            if name not in self.buffers
        }
        random_before = _random_state(self.device)
        for layer in self._dropouts.values():
            layer.recording, layer.shapes = True, []
        try:
            with torch.no_grad():
                self(self.layout.unflatten(self.params), self.buffers, None, inputs)
        finally:
            for layer in self._dropouts.values():
                layer.recording = False
        for layer in self._dropouts.values():
            for call in range(len(layer.shapes)):
                layer.register_buffer(f"mask_{call}", None, persistent=False)
        kind = type(self.module).__name__
        if not torch.equal(random_before, _random_state(self.device)):
            raise ValueError(
                f"{kind} draws from torch's generator in its forward, so its numbers would depend "
                "on which code ran before; use nn.Dropout modules, whose masks come from keys"
            )
        now = dict(self.module.named_buffers())
        for name, (buffer, version) in constants.items():
            if now.get(name) is not buffer or buffer._version != version:
                raise ValueError(
                    f"{kind} changes its buffer {name} in its forward; only the running statistics "
                    "of BatchNorm1d, 2d and 3d are carried from step to step"
                )


def _random_state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def refresh_recurrent_weights(module: nn.Module) -> None:
    """Lets recurrent layers, which read a list made at construction, use the swapped tensors."""
    for layer in module.modules():
        if isinstance(layer, nn.RNNBase):
            layer.register_forward_pre_hook(_gather_weights)


def _gather_weights(layer: nn.Module, _: Any) -> None:
    assert isinstance(layer, nn.RNNBase)
    layer._flat_weights = [getattr(layer, name) for name in layer._flat_weights_names]


def _aliases(module: nn.Module) -> dict[str, str]:
    """Second names of tied parameters that are trained, each with the first name."""
    first: dict[int, str] = {}
    aliases: dict[str, str] = {}
    for prefix, layer in module.named_modules():
        for key, parameter in layer.named_parameters(recurse=False, remove_duplicate=False):
            if not parameter.requires_grad:
                continue
            name = f"{prefix}.{key}" if prefix else key
            if first.setdefault(id(parameter), name) != name:
                aliases[name] = first[id(parameter)]
    return aliases
