"""A user's own training and test data as batches: tensors, or any map-style data set of torch."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, default_collate

from gradwire.core.generators import seed_of, seeded
from gradwire.core.key import Key
from gradwire.core.tree import Tree, leaves_of, map_leaves, to_device
from gradwire.own.fingerprint import fingerprint_data

Collate = Callable[[list[Any]], Any]
_WANTED = (
    "data = (train, test), where each is a torch Dataset with len() and [index], or a pair of "
    "tensors (inputs, targets)"
)


class OwnData:
    """Two parts, train and test. What draws random numbers while it makes an example draws the
    same ones whenever the same worker asks for the same batch."""

    roles: tuple[Tensor, ...] | None = None  # see data/partition.py

    def __init__(self, name: str, given: Any, collate: Collate | None = None) -> None:
        self.name = name
        if not isinstance(given, tuple | list) or len(given) != 2 or _is_array(given[0]):
            raise ValueError(f"{name}: expected {_WANTED}; got {_describe(given)}")
        self._parts = {
            part: _examples(name, part, own, collate) for part, own in zip(("train", "test"), given)
        }

    @property
    def num_train(self) -> int:
        return len(self._parts["train"])

    @property
    def num_test(self) -> int:
        return len(self._parts["test"])

    @property
    def train_targets(self) -> Tensor:
        """The label of each training example, for partitions by label."""
        labels = self._parts["train"].labels()
        if labels is None:
            raise ValueError(
                f"{self.name} does not say the labels of its training examples, which this "
                "partition needs: give the data set an attribute `targets` with one integer for "
                "each, or take partition = iid"
            )
        return labels

    @property
    def num_classes(self) -> int:
        return int(self.train_targets.max()) + 1

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Of one example, if it is a tensor."""
        inputs, _ = self.batch(torch.tensor([0]), Key(0))
        if not isinstance(inputs, Tensor):
            raise ValueError(
                f"{self.name} has inputs of type {type(inputs).__name__}; the networks of gradwire "
                "take one tensor. Give a model of your own."
            )
        return tuple(inputs.shape[1:])

    def batch(self, indices: Tensor, key: Key, part: str = "train") -> tuple[Tree, Tree]:
        """Inputs and targets of these examples; `key` says what random transforms draw."""
        return self._parts[part].batch(indices, key)

    def to(self, device: torch.device) -> "OwnData":
        """With its tensors on a device; other data sets stay where they are."""
        moved = object.__new__(OwnData)
        moved.name = self.name
        moved._parts = {name: part.to(device) for name, part in self._parts.items()}
        return moved

    def fingerprint(self) -> str:
        parts = self._parts.values()
        examples = [
            part.example(index) for part in parts for index in (0, len(part) // 2, len(part) - 1)
        ]
        kinds = " ".join(part.kind for part in parts)
        return fingerprint_data(kinds, [len(part) for part in parts], examples)


class _Tensors:
    """Inputs and targets whose first dimension numbers the examples; inputs may be a tree."""

    def __init__(self, name: str, part: str, inputs: Tree, targets: Tree) -> None:
        leaves = leaves_of((inputs, targets))
        counts = {len(leaf) if isinstance(leaf, Tensor) and leaf.dim() else 0 for leaf in leaves}
        if len(counts) != 1:
            raise ValueError(
                f"{name}: the {part} tensors need the same first dimension, one entry for each "
                f"example; got {_describe((inputs, targets))}"
            )
        self.inputs, self.targets = inputs, targets
        (self._length,) = counts
        self.kind = "tensors"

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[Tree, Tree]:
        return self._at(index)

    def example(self, index: int) -> tuple[Tree, Tree]:
        return self._at(index)

    def batch(self, indices: Tensor, key: Key) -> tuple[Tree, Tree]:
        return self._at(indices)

    def labels(self) -> Tensor | None:
        return self.targets if _is_integer(self.targets) else None

    def to(self, device: torch.device) -> "_Tensors":
        moved = object.__new__(_Tensors)
        moved.inputs, moved.targets = to_device((self.inputs, self.targets), device)
        moved._length, moved.kind = self._length, self.kind
        return moved

    def _at(self, place: int | Tensor) -> tuple[Tree, Tree]:
        def choose(tensor: Tensor) -> Tensor:
            return tensor[place if isinstance(place, int) else place.to(tensor.device)]

        return map_leaves(choose, self.inputs), map_leaves(choose, self.targets)


class _Examples:
    """A map-style data set, with the function that makes a batch of examples."""

    def __init__(self, name: str, part: str, dataset: Any, collate: Collate | None) -> None:
        self.name, self.part = name, part
        self.dataset = dataset
        self.collate = collate
        self.kind = type(dataset).__qualname__

    def __len__(self) -> int:
        return len(self.dataset)

    def example(self, index: int) -> Any:
        with seeded(0):
            return self.dataset[index]

    def batch(self, indices: Tensor, key: Key) -> tuple[Tree, Tree]:
        collate = self.collate or default_collate
        with seeded(seed_of(key)):
            numbers = indices.tolist()
            if hasattr(self.dataset, "__getitems__"):
                examples = self.dataset.__getitems__(numbers)
            else:
                examples = [self.dataset[number] for number in numbers]
            try:
                batch = collate(examples)
            except (RuntimeError, TypeError) as error:
                if self.collate is not None:
                    raise
                reason = str(error).splitlines()[0]
                raise ValueError(
                    f"{self.name}: torch's default_collate cannot make a batch of the {self.part} "
                    f"examples: {reason}. Give a function collate=... that takes a list of "
                    "examples and returns (inputs, targets)."
                ) from error
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            raise ValueError(
                f"{self.name}: a batch of {self.part} examples must be a pair (inputs, targets); "
                f"got {_describe(batch)}. Let the data set return (input, target), or give a "
                "function collate=... that takes a list of examples and returns (inputs, targets)."
            )
        inputs, targets = batch
        return inputs, targets

    def labels(self) -> Tensor | None:
        targets = getattr(self.dataset, "targets", None)
        if targets is None or not hasattr(targets, "__len__") or len(targets) != len(self):
            return None
        labels = torch.as_tensor(targets)
        return labels if _is_integer(labels) else None

    def to(self, device: torch.device) -> "_Examples":
        return self


def _examples(name: str, part: str, given: Any, collate: Collate | None) -> _Tensors | _Examples:
    if type(given) is TensorDataset and len(given.tensors) == 2:
        given = given.tensors
    if isinstance(given, IterableDataset):
        raise ValueError(
            f"{name}: the {part} data is an IterableDataset ({type(given).__name__}), which cannot "
            f"be dealt to workers and shuffled. Expected {_WANTED}."
        )
    if isinstance(given, DataLoader):
        raise ValueError(
            f"{name}: the {part} data is a DataLoader, and gradwire deals examples to workers "
            "itself: give its data set, loader.dataset, and collate=loader.collate_fn"
        )
    found: _Tensors | _Examples
    if isinstance(given, tuple | list) and len(given) == 2 and _is_array(given[1]):
        found = _Tensors(name, part, *map_leaves(_as_tensor, tuple(given)))
        found = found if collate is None else _Examples(name, part, found, collate)
    elif _is_array(given) or not (hasattr(given, "__getitem__") and hasattr(given, "__len__")):
        raise ValueError(f"{name}: the {part} data is {_describe(given)}. Expected {_WANTED}.")
    else:
        found = _Examples(name, part, given, collate)
    if not len(found):
        raise ValueError(f"{name}: the {part} data has no examples")
    return found


def _is_array(value: Any) -> bool:
    return isinstance(value, Tensor | numpy.ndarray)


def _as_tensor(value: Any) -> Any:
    return torch.from_numpy(value) if isinstance(value, numpy.ndarray) else value


def _is_integer(value: Any) -> bool:
    """Whether these are labels: one integer for each example."""
    if not isinstance(value, Tensor) or value.dim() != 1 or value.dtype is torch.bool:
        return False
    return not (value.is_floating_point() or value.is_complex())


def _describe(value: Any) -> str:
    """What was given, for messages."""
    if isinstance(value, Tensor | numpy.ndarray):
        return f"a tensor of shape {list(value.shape)}"
    if isinstance(value, Mapping):
        return f"a dict with {', '.join(map(repr, value)) or 'nothing'}"
    if isinstance(value, Sequence) and not isinstance(value, str) and len(value) <= 4:
        inside = ", ".join(map(_describe, value))
        return f"a {type(value).__name__} of {inside or 'nothing'}"
    return f"{type(value).__name__}"
