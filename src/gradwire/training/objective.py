"""What a task asks of a network besides its outputs: the loss, and how good they are."""

from typing import Any, Protocol

from torch import Tensor

from gradwire.core.tree import Tree


class Objective(Protocol):
    """A `Model`, or a user's own loss and metric."""

    def loss(self, outputs: Any, targets: Tree, /) -> Tensor:
        """Mean loss of a batch."""
        ...

    def correct(self, outputs: Any, targets: Tree, /) -> Tensor:
        """How many targets were met, or the metric times `count`."""
        ...

    def count(self, targets: Tree, /) -> int | Tensor:
        """The weight of a batch in means over batches."""
        ...
