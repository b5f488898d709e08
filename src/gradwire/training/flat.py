"""Flat parameters: all trained parameters of a module as one vector, with names and shapes to cut
it up again. Algorithms see vectors [d]; modules see the views that `FlatLayout.unflatten` gives.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn


class FlatTensor(NamedTuple):
    """Where one parameter lies: `flat[start:stop].view(shape)`."""

    name: str
    start: int
    stop: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class FlatLayout:
    """The order of a module's parameters in a flat vector, tied parameters once.

    Frozen ones (`requires_grad=False`) are not in it.
    """

    tensors: tuple[FlatTensor, ...]

    @classmethod
    def of(cls, module: nn.Module) -> "FlatLayout":
        tensors = []
        start = 0
        trained = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
        for name, parameter in trained:
            stop = start + parameter.numel()
            tensors.append(FlatTensor(name, start, stop, tuple(parameter.shape)))
            start = stop
        if not start:
            frozen = sum(not p.requires_grad for p in module.parameters())
            why = f": all {frozen} are frozen (requires_grad=False)" if frozen else ""
            raise ValueError(f"{type(module).__name__} has no parameters to train{why}")
        dtypes = {parameter.dtype for _, parameter in trained}
        if len(dtypes) > 1:
            raise ValueError(
                f"the parameters of {type(module).__name__} have several types, "
                f"{', '.join(sorted(map(str, dtypes)))}; convert them to one, e.g. module.float()"
            )
        if not all(dtype.is_floating_point for dtype in dtypes):
            raise ValueError(
                f"the parameters of {type(module).__name__} are {dtypes.pop()}; only those of "
                "floating point are exchanged: keep a complex one as real and imaginary part"
            )
        return cls(tuple(tensors))

    @cached_property
    def numel(self) -> int:
        return self.tensors[-1].stop

    @cached_property
    def _sizes(self) -> list[int]:
        return [math.prod(tensor.shape) for tensor in self.tensors]

    def flatten(self, module: nn.Module) -> Tensor:
        """A copy of the module's parameters, [d]."""
        parameters = dict(module.named_parameters())
        return self.join([parameters[tensor.name].detach() for tensor in self.tensors])

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        """One tensor per entry of `self.tensors`, in that order, as a new vector [d]."""
        for given, wanted in zip(tensors, self.tensors, strict=True):
            if tuple(given.shape) != wanted.shape:
                raise ValueError(
                    f"{wanted.name} must have shape {wanted.shape}, got {tuple(given.shape)}"
                )
        return torch.cat([tensor.reshape(-1) for tensor in tensors])

    def split(self, flat: Tensor) -> tuple[Tensor, ...]:
        """What each tensor holds of a vector [d], flat."""
        return flat.split(self._sizes)

    def unflatten(self, flat: Tensor) -> dict[str, Tensor]:
        """Views of `flat` [d] by name.

        One split, not one slice per parameter: its backward is one concatenation, where d-long
        slices would each add a vector of zeros.
        """
        if flat.shape != (self.numel,):
            raise ValueError(
                f"expected a vector of {self.numel} parameters, got shape {tuple(flat.shape)}"
            )
        pieces = torch.split(flat, self._sizes)
        return {
            tensor.name: piece.view(tensor.shape) for tensor, piece in zip(self.tensors, pieces)
        }


def flatten(module: nn.Module) -> Tensor:
    """A copy of the module's parameters as one vector [d]."""
    return FlatLayout.of(module).flatten(module)
