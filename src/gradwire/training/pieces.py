"""A model cut at its buckets, so that each piece can be updated as soon as its mean is there.

The numbers are those of one update of the whole: optimizers that may be used so work on each
element by itself.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from gradwire import kernels
from gradwire.core.group import concatenate
from gradwire.core.node import Node
from gradwire.core.protocols import Bucket, Replica
from gradwire.training.optimizer import Optimizer, State, clipped_update


class Whole(NamedTuple):
    """The memory in which all pieces lie one after another."""

    params: Tensor  # [d]
    optimizer: dict[str, Tensor]

    @classmethod
    def memory(cls, numel: int, params: Tensor, state: Mapping[str, Tensor]) -> "Whole":
        """Uninitialised, for a model of so many parameters, of the dtypes of these."""
        vectors = {name: value for name, value in state.items() if value.dim()}
        return cls(
            kernels.empty(numel, params.dtype, params.device),
            {name: kernels.empty(numel, x.dtype, x.device) for name, x in vectors.items()},
        )


@dataclass(slots=True)
class ModelPieces:
    """Parameters and optimizer state of each bucket; None: that piece is still to be made.

    `whole`: where the pieces are put, so that nobody has to join them. Virtual workers share
    results, so they have none.
    """

    params: list[Tensor | None]
    optimizer: list[State | None]
    whole: Whole | None = None

    def following(self, buckets: Sequence[Bucket], node: Node) -> "ModelPieces":
        """The pieces after the next update, none of which is there yet."""
        whole = None
        if self.whole is not None:  # its pieces may still be under way
            whole = Whole.memory(buckets[-1].stop, *self.whole)
        elif node.is_alone:
            first, state = self.params[0], self.optimizer[0]
            assert first is not None
            assert state is not None
            whole = Whole.memory(buckets[-1].stop, first, state)
        return ModelPieces([None] * len(buckets), [None] * len(buckets), whole)

    async def update(
        self,
        number: int,
        before: "ModelPieces",
        mean: Tensor,
        rule: Optimizer,
        lr: float,
        bucket: Bucket,
        node: Node,
    ) -> None:
        """Makes a piece from the one before and its mean gradient."""
        out = None
        if self.whole is not None:
            # `data`: a forward pass that reads other pieces must not take it for a change of them.
            place = slice(bucket.start, bucket.stop)
            kept = {name: value.data[place] for name, value in self.whole.optimizer.items()}
            out = (self.whole.params.data[place], kept)
        self.params[number], self.optimizer[number] = await node.share(
            clipped_update,
            rule,
            None,
            lr,
            before.params[number],
            mean,
            before.optimizer[number],
            out,
        )

    async def join(self, names: Mapping[str, Tensor], node: Node) -> Whole:
        """The whole model, when all pieces are there; `names` of the optimizer's state."""
        if self.whole is not None:
            last = self.optimizer[-1] or {}
            return Whole(
                self.whole.params,
                {name: self.whole.optimizer.get(name, last[name]) for name in names},
            )
        params = await node.share(concatenate, tuple(self.params))
        optimizer = {
            name: await node.share(_join, tuple(own[name] for own in self.optimizer if own))
            for name in names
        }
        return Whole(params, optimizer)


async def cut(replica: Replica, buckets: Sequence[Bucket], node: Node) -> ModelPieces:
    sizes = tuple(bucket.numel for bucket in buckets)
    params = await node.share(_split, replica.params, sizes)
    named = {
        name: await node.share(_split, value, sizes) for name, value in replica.optimizer.items()
    }
    optimizer = [{name: own[i] for name, own in named.items()} for i in range(len(sizes))]
    return ModelPieces(list(params), list(optimizer))


def _split(x: Tensor, sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
    """A vector in pieces; a number, such as a count of steps, is in each."""
    return x.split(sizes) if x.dim() else (x,) * len(sizes)


def _join(pieces: tuple[Tensor, ...]) -> Tensor:
    return concatenate(pieces) if pieces[0].dim() else pieces[0]
