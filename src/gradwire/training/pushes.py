"""Collects, checks and decodes the parts of pushes to one server.

A worker pushes its vector piece by piece, and each piece in one or several messages. Nothing of it
is trusted: a part that does not fit is a `WireError`.
"""

import torch
from torch import Tensor

from gradwire.core.codec import is_finite
from gradwire.core.errors import WireError
from gradwire.core.limits import max_nbytes
from gradwire.core.node import Node
from gradwire.core.protocols import Push
from gradwire.training.plan import Plan
from gradwire.training.wire import PushHeader

_MAX_PARTS = 1024  # of a push of one piece


class PushAssembly:
    """The pushes that have begun at server number `number`, whose shard has this dtype."""

    def __init__(self, plan: Plan, number: int, dtype: torch.dtype) -> None:
        self._plan, self._number, self._itemsize = plan, number, dtype.itemsize
        pieces = [(i, u.bucket) for i, u in enumerate(plan.units()) if u.server == number]
        self._pieces = dict(sorted(pieces, key=lambda piece: piece[1].start))  # by number
        self._specs = {i: plan.spec(piece, dtype) for i, piece in pieces}
        # (rank, step) -> {piece -> (number of parts, {part -> message})}
        self.begun: dict[tuple[int, int], dict[int, tuple[int, dict[int, Tensor]]]] = {}

    def forget(self, rank: int) -> None:
        """Drops what a worker has begun to push."""
        for key in [key for key in self.begun if key[0] == rank]:
            del self.begun[key]

    async def add(
        self, node: Node, rank: int, header: PushHeader, data: Tensor | None
    ) -> Push | None:
        """Adds a part of a push; returns the push if it is complete now."""
        if not self._put(rank, header, data):
            return None
        begun = self.begun.pop((rank, header.step))
        key = self._plan.key.at(header.step).private(rank)
        decoded = []
        for i, piece in self._pieces.items():
            messages = [message for _, message in sorted(begun[i][1].items())]
            args = (messages, self._specs[i], key.child(piece.name))
            try:
                decoded.append(await node.call(self._plan.reducer.decode_push, *args))
            except Exception as error:  # a codec may raise anything on hostile bytes
                raise WireError(
                    f"rank {rank} pushed what is no {piece.name!r} of step {header.step}: {error}"
                ) from error
        x = decoded[0] if len(decoded) == 1 else torch.cat(decoded)
        if not is_finite(x):  # no codec sends such values, and they would stay in the model
            raise WireError(f"rank {rank} pushed NaN or infinity in step {header.step}")
        return Push(rank, header.step, x, header.wants_answer)

    def _put(self, rank: int, header: PushHeader, data: Tensor | None) -> bool:
        """Stores a part; returns whether all parts of all pieces have arrived."""
        if any(key[0] == rank and key[1] != header.step for key in self.begun):
            raise WireError(
                f"rank {rank} pushed {header} to server {self._number}, which waits for the rest "
                "of another push of it"
            )
        if (
            header.unit not in self._pieces
            or not 0 <= header.part < header.num_parts <= _MAX_PARTS
            or not 0 <= header.step < self._plan.num_steps
            or data is None
        ):
            raise WireError(
                f"rank {rank} pushed {header} to server {self._number}, which expects each part of "
                f"the pieces {list(self._pieces)} once"
            )
        begun = self.begun.setdefault((rank, header.step), {})
        num_parts, parts = begun.setdefault(header.unit, (header.num_parts, {}))
        if header.num_parts != num_parts or header.part in parts:
            raise WireError(
                f"rank {rank} pushed {header} to server {self._number}, which has this part "
                f"already or expects {num_parts} of them"
            )
        nbytes = sum(part.nbytes for part in (*parts.values(), data))
        own_nbytes = self._specs[header.unit].numel * self._itemsize
        most = max_nbytes(own_nbytes)
        if nbytes > most:
            raise WireError(
                f"rank {rank} pushed {nbytes} bytes to server {self._number} for a piece of "
                f"{own_nbytes}; at most {most} are taken"
            )
        parts[header.part] = data
        is_complete = all(len(own) == number for number, own in begun.values())
        return is_complete and len(begun) == len(self._pieces)
