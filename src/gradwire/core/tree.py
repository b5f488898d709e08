"""Nested dicts, lists and tuples of tensors: what a user's own data set may give as inputs."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

Tree = Any  # a tensor, another value, or a dict, list or tuple of trees


def leaves_of(tree: Tree) -> list[Any]:
    """The values in a tree, in order."""
    children = _children(tree)
    return [tree] if children is None else [leaf for child in children for leaf in leaves_of(child)]


def map_leaves(function: Callable[[Any], Any], tree: Tree) -> Tree:
    """The same tree with other values; mappings become dicts."""
    if isinstance(tree, Mapping):
        return {name: map_leaves(function, child) for name, child in tree.items()}
    children = _children(tree)
    if children is None:
        return function(tree)
    changed = [map_leaves(function, child) for child in children]
    is_named = hasattr(tree, "_fields")  # a namedtuple takes one argument for each
    return type(tree)(*changed) if is_named else type(tree)(changed)


def with_leaves(tree: Tree, leaves: list[Any]) -> Tree:
    """The same tree with these values, in order."""
    left = iter(leaves)
    return map_leaves(lambda _: next(left), tree)


def tensors_of(tree: Tree) -> list[Tensor]:
    """The tensors in a tree, in order."""
    if isinstance(tree, Tensor):  # by far the most, and in every step
        return [tree]
    return [leaf for leaf in leaves_of(tree) if isinstance(leaf, Tensor)]


def with_tensors(tree: Tree, tensors: list[Tensor]) -> Tree:
    """The same tree with these tensors in the place of its own, in order."""
    left = iter(tensors)
    return map_leaves(lambda leaf: next(left) if isinstance(leaf, Tensor) else leaf, tree)


def signature_of(tree: Tree) -> tuple[object, ...]:
    """Equal for trees of equal form, whose tensors have equal shapes and types."""
    if isinstance(tree, Tensor):
        return tree.shape, tree.dtype
    if isinstance(tree, Mapping):
        return "dict", *((name, signature_of(child)) for name, child in tree.items())
    children = _children(tree)
    if children is None:
        return (repr(tree),)
    return type(tree).__name__, *map(signature_of, children)


def is_on(tree: Tree, device: torch.device) -> bool:
    """Whether all its tensors are on a device."""
    if isinstance(tree, Tensor):
        return tree.device == device
    return all(tensor.device == device for tensor in tensors_of(tree))


def to_device(tree: Tree, device: Any) -> Tree:
    """The tree with everything moved that can be."""
    return map_leaves(lambda leaf: leaf.to(device) if hasattr(leaf, "to") else leaf, tree)


def _children(tree: Tree) -> list[Tree] | None:
    """None for a leaf."""
    if isinstance(tree, Mapping):
        return list(tree.values())
    if isinstance(tree, PackedSequence):  # a tuple whose sizes must stay where they are
        return None
    return list(tree) if isinstance(tree, tuple | list) else None
