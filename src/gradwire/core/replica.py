"""What a worker holds, and the slices in which it is exchanged."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from torch import Tensor

from gradwire.core.codec import State


@dataclass(frozen=True, slots=True)
class Bucket:
    """A named slice of the flat parameter vector: what is exchanged in one piece."""

    name: str
    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Replica:
    """One worker's model and everything that belongs to it. Tensors in it are never changed."""

    params: Tensor  # [d]
    buffers: Mapping[str, Tensor]  # BatchNorm's running statistics
    optimizer: Mapping[str, Tensor]
    exchange: tuple[State, ...]  # compression state, one per bucket (per piece, with servers)
    memory: Mapping[str, Tensor] = field(default_factory=dict)  # of synchronization and gossip
    loss: Tensor | None = None  # of the last mini-batch
    num_dropped: int = 0  # steps that were dropped because of NaN or infinity
    num_gradients: int = 0  # evaluated so far: fewer than steps where rounds were missed

    def having(self, **changes: Any) -> "Replica":
        if not set(_FIELDS).issuperset(changes):
            raise TypeError(f"a replica has {sorted(_FIELDS)}, got {sorted(changes)}")
        # As `dataclasses.replace`, which takes longer: each worker does this a few times a step.
        get = changes.get
        return Replica(*[get(name, getattr(self, name)) for name in _FIELDS])

    def remembering(self, **entries: Tensor) -> "Replica":
        """With these entries of the memory replaced."""
        return self.having(memory={**self.memory, **entries})


_FIELDS = tuple(field.name for field in fields(Replica))
