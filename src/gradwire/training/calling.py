"""How a module is called with the inputs of a batch: one tensor, or a tuple or dict of them."""

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn

from gradwire.core.tree import Tree

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def arguments_of(module: nn.Module, inputs: Tree) -> Arguments:
    """Positional arguments for a tuple or list and keywords for a dict, if `forward` takes them;
    else the inputs as one argument."""
    if isinstance(inputs, Mapping):
        named = dict(inputs)
        if all(isinstance(name, str) for name in named) and _takes(module, (), named):
            return (), named
    elif isinstance(inputs, tuple | list) and _takes(module, tuple(inputs), {}):
        return tuple(inputs), {}
    return (inputs,), {}


def _takes(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    try:
        inspect.signature(module.forward).bind(*args, **kwargs)
    except (TypeError, ValueError):
        return False
    return True
