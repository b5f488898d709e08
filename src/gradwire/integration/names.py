"""The names of parameters, as users hand them over, and compressions that choose by them."""

import sys
from collections.abc import Container, Iterable, Sequence
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer

from gradwire.compression.allocated import Allocated
from gradwire.compression.partition import Partition
from gradwire.core.codec import Compression
from gradwire.core.notation import with_replaced

T = TypeVar("T")

_COMPILED = "_orig_mod."  # what torch.compile puts into the names of parameters
_NEEDS_NAMES = (
    "{!r} {} by the names of parameters, which are not known here: give "
    "named_parameters=model.named_parameters()"
)


def named_tensors(given: Any) -> list[tuple[str, Tensor]]:
    """The pairs of `model.named_parameters()`; refuses what users take for it."""
    items: list[Any] = list(given) if isinstance(given, Iterable) else []
    is_known = isinstance(given, Iterable) and not isinstance(given, str | nn.Module)
    if is_known and all(_is_pair(item) for item in items):
        return [(plain_name(name), tensor) for name, tensor in items]
    got = f"{given!r}" if isinstance(given, str) else f"a {type(given).__name__}"
    if is_known and items:
        got += f" of {type(items[0]).__name__}"
    raise ValueError(
        "named_parameters is model.named_parameters(): pairs of a name and a parameter. Got " + got
    )


def plain_name(name: str) -> str:
    """The name that a parameter has where its module is not compiled."""
    return name.replace(_COMPILED, "")


def check_whole(named: Iterable[tuple[str, Tensor]]) -> None:
    """Refuses parameters of which this rank has a shard."""
    tensors: Any = sys.modules.get("torch.distributed.tensor")  # else there are none
    for name, parameter in named:
        if tensors is not None and isinstance(parameter, tensors.DTensor):
            raise ValueError(
                f"{name} is sharded over ranks (a DTensor), but here every rank has a whole model. "
                "Compress the replicas of a sharded model with gradwire.compress_replicas"
            )


def rows_of(named: Iterable[tuple[str, Tensor]]) -> list[list[Any]]:
    """Names, shapes and types: what must be the same on all ranks, in the same order."""
    return [[name, list(p.shape), str(p.dtype)] for name, p in named]


def check_rules(compression: Compression, names: Sequence[str] | None) -> None:
    """Refuses rules for tensors that match none; None: the names are not known."""
    for partition in _all_within(compression, Partition):
        if names is not None:
            partition.check_names(names)
        elif set(partition.rules) != {"*"}:
            raise ValueError(_NEEDS_NAMES.format(partition, "chooses"))
    for allocated in _all_within(compression, Allocated):
        if names is None:
            raise ValueError(_NEEDS_NAMES.format(allocated, "draws"))


def _all_within(compression: Compression, kind: type[T]) -> list[T]:
    found: list[T] = []

    def note(own: T) -> T:
        found.append(own)
        return own

    with_replaced(compression, kind, note)
    return found


def check_trained(optimizer: Optimizer, exchanged: Container[int]) -> None:
    """Refuses parameters that the optimizer will change on this rank alone.

    `exchanged`: the ids of those that are exchanged.
    """
    for number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            has_grad = parameter.requires_grad and parameter.grad is not None and parameter.numel()
            if has_grad and id(parameter) not in exchanged:
                raise RuntimeError(
                    f"parameter {place} of group {number} ({list(parameter.shape)}) was frozen "
                    "when the optimizer became distributed and is trained now, but not averaged. "
                    "Leave frozen parameters out of the optimizer, and add them by "
                    "add_param_group() when they are to be trained"
                )


def _is_pair(item: Any) -> bool:
    return (
        isinstance(item, tuple | list)
        and len(item) == 2
        and isinstance(item[0], str)
        and isinstance(item[1], Tensor)
    )
