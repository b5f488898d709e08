"""The neighbours of one worker: the messages that it sends to and receives from them.

In a round i sends one message to each j with W[j, i] > 0 and waits for one of each j with W[i, j] >
0. If j is lost, i takes over its weight, W_ii += W_ij: the matrix of the remaining workers stays
symmetric with rows of sum one if it was so before. Messages sent between a crash and its notice are
lost. `_presence.py` tracks which neighbours are present.
"""

import math
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from gradwire.architecture.gossip._posts import (
    HEADER_NBYTES,
    JOIN,
    LABEL,
    NUMBER_NBYTES,
    ROUNDS,
    NewIncarnation,
    RoundHeader,
    UnknownVersion,
)
from gradwire.architecture.gossip._presence import NeighbourPresence, nonfinite_error
from gradwire.core.batched import elementwise
from gradwire.core.codec import Codec, State, is_finite
from gradwire.core.coded import decode_shared, encode_unfed
from gradwire.core.errors import NonFiniteError, PeerLost
from gradwire.core.group import is_half
from gradwire.core.key import Key
from gradwire.core.node import Framed, Node
from gradwire.core.protocols import Replica
from gradwire.core.spec import Spec


class NeighbourMessage(NamedTuple):
    """A neighbour's message of a round."""

    rank: int
    weight: float  # W[i, rank]
    x: Tensor  # a vector, or a packed payload
    push_weight: float | None = None
    version: tuple[float, int] | None = None


class Neighbours:
    """The neighbours of one worker and the state it keeps about them, for one segment."""

    def __init__(
        self,
        node: Node,
        matrix: Callable[[int], Tensor],
        varies: bool,
        others: Sequence[int],
        codec: Callable[[int], Codec],
        key: Key,
    ) -> None:
        self.node = node
        self.rank = node.rank
        self.size = node.size
        self.codec = codec  # in a step
        self.key = key
        self.presence = NeighbourPresence(node, others)
        self.period = 1  # steps of a round
        self.asked: int | None = None  # neighbours that have not answered a request yet
        self.num_moves = 0  # of the model, by averages and steps, where there are no rounds
        self._matrix = matrix
        self._varies = varies
        self._known: tuple[dict[int, float], dict[int, float]] | None = None
        self._ahead: defaultdict[int, deque[Framed]] = defaultdict(deque)  # read too early
        # Introductions of neighbours, with their versions.
        self.introduced: dict[int, tuple[tuple[float, int], Tensor]] = {}

    # Weights.

    def sources(self, step: int) -> dict[int, float]:
        """The neighbours that it receives from in a round, with weights W[i, j]."""
        return self._there(self._weights(step)[0], step)

    def targets(self, step: int) -> dict[int, float]:
        """The neighbours that it sends to in a round, with weights W[j, i]."""
        return self._there(self._weights(step)[1], step)

    def _there(self, weights: Mapping[int, float], step: int) -> dict[int, float]:
        return {rank: w for rank, w in weights.items() if self.presence.has(rank, step)}

    def _weights(self, step: int) -> tuple[dict[int, float], dict[int, float]]:
        if self._known is None or self._varies:
            matrix, rank = self._matrix(step // self.period), self.rank
            # Each begins with the next rank, so that no receiver is hit by all at once.
            order = [(rank + shift) % self.size for shift in range(1, self.size)]
            row, column = matrix[rank].tolist(), matrix[:, rank].tolist()
            sources = {j: row[j] for j in sorted(order) if row[j]}
            self._known = sources, {j: column[j] for j in order if column[j]}
        return self._known

    # Messages of a round.

    async def send(
        self,
        x: Tensor,
        step: int,
        push_weight: float | None = None,
        version: tuple[float, int] | None = None,
    ) -> float:
        """Sends the message of this round; returns the sum of the receivers' weights W[j, i]."""
        header_nbytes = HEADER_NBYTES + (0 if push_weight is None else NUMBER_NBYTES)
        header_nbytes += 0 if version is None else 2 * NUMBER_NBYTES
        message = Framed(RoundHeader("data", step, push_weight, version), x)
        share, members = 0.0, await self.node.members()
        for rank, weight in self.targets(step).items():
            if rank in members:  # else the message would be lost
                share += weight
                await self.node.send_framed(rank, ROUNDS, message, header_nbytes, LABEL)
        return share

    async def receive(self, step: int) -> list[NeighbourMessage]:
        """What the neighbours that are there said in this round, by rank."""
        received = []
        for rank, weight in self.sources(step).items():
            message = await self._read(rank, step)
            if message is not None:
                assert message.data is not None
                header = message.header
                self.check(rank, message.data, header.weight)
                received.append(
                    NeighbourMessage(rank, weight, message.data, header.weight, header.version)
                )
        return received

    async def combined(self, own: Tensor, received: Sequence[NeighbourMessage]) -> Tensor:
        """sum_j W_ij x_j; the weights of neighbours that sent nothing go to the own vector."""
        if not received:
            return own
        weights = tuple(one.weight for one in received)
        return await self.node.call(weighted_sum, own, tuple(one.x for one in received), weights)

    async def weighted(self, x: Tensor, step: int) -> Tensor:
        """sum_j W_ij x_j: one whole round."""
        await self.send(x, step)
        return await self.combined(x, await self.receive(step))

    async def miss(self, step: int) -> None:
        """Tells the neighbours that the round that ends with this step began without this one.

        Their rounds may have begun in another segment of the run, and not know it any more.
        """
        message, members = Framed(RoundHeader("missed", step)), await self.node.members()
        for rank in self.presence.others:
            if rank in members:
                await self.node.send_framed(rank, ROUNDS, message, HEADER_NBYTES, LABEL)

    async def introduce(self, x: Tensor, version: tuple[float, int], step: int) -> None:
        """Tells those that are new to this one what its messages will be changes of."""
        strangers = self.presence.strangers
        for rank in sorted(strangers & self.targets(step).keys()):
            strangers.discard(rank)
            message = Framed(RoundHeader("introduction", step, version=version), x)
            nbytes = HEADER_NBYTES + 2 * NUMBER_NBYTES
            await self.node.send_framed(rank, ROUNDS, message, nbytes, LABEL)

    async def request_introduction(self, rank: int) -> None:
        """Asks a neighbour to introduce itself, in its next round."""
        await self.node.send_framed(rank, JOIN, Framed(UnknownVersion()), HEADER_NBYTES, LABEL)

    async def _read(self, rank: int, step: int) -> Framed | None:
        """The neighbour's message of this round; None if it is not there."""
        ahead, presence = self._ahead[rank], self.presence
        while True:
            if presence.is_stale(rank):
                ahead.clear()
            if ahead:
                message = ahead.popleft()
            else:
                try:
                    message = await self._next(rank)
                except PeerLost:
                    presence.lose(rank)
                    return None
            header = message.header
            if isinstance(header, NewIncarnation):
                presence.is_back(rank, header.life)
            elif not presence.is_stale(rank) and header.step >= step:
                if header.step > step:  # it was not in this round
                    ahead.appendleft(message)
                    return None
                if header.kind == "data":
                    return message
                if header.kind == "introduction":
                    assert message.data is not None
                    self.check(rank, message.data)
                    self.introduced[rank] = header.version, message.data
            if not presence.has(rank, step):  # it rejoined meanwhile
                return None

    async def _next(self, rank: int) -> Framed:
        message = await self.node.recv(rank, ROUNDS)
        assert isinstance(message, Framed)
        return message

    # Payloads.

    def is_exact(self, replica: Replica, step: int) -> bool:
        """Whether nothing is lost in compression: then vectors are sent as they are."""
        return is_lossless(self.codec(step), _spec(replica))

    async def encoded(
        self, x: Tensor, exchange: tuple[State, ...], step: int
    ) -> tuple[Tensor, tuple[State, ...]]:
        """A packed payload of x, and what compression keeps."""
        (state,) = exchange
        key = self._key_of(self.rank, step)
        payload, state = await self.node.call(encode_unfed, self.codec(step), x, state, key)
        return payload.buffer, (state,)

    async def decoded(
        self, received: Sequence[NeighbourMessage], replica: Replica, step: int
    ) -> list[NeighbourMessage]:
        """What the neighbours said, in place of its payloads."""
        return [
            one._replace(x=await self.decode(one.rank, one.x, replica, step)) for one in received
        ]

    async def decode(self, rank: int, buffer: Tensor, replica: Replica, step: int) -> Tensor:
        """What this payload decodes to, a vector like the parameters."""
        key = self._key_of(rank, step)
        return await self.node.share(_decode, self.codec(step), _spec(replica), key, buffer, rank)

    def check(self, rank: int, x: Tensor, weight: float | None = None) -> None:
        """Refuses NaN and infinity in a neighbour's message, before it is used."""
        if weight is not None and not (math.isfinite(weight) and weight > 0):
            raise NonFiniteError(f"rank {rank} sent the weight {weight}, expected one above 0")
        if x.is_floating_point() and not is_finite(x):
            raise nonfinite_error(rank)

    def _key_of(self, rank: int, step: int) -> Key:
        return self.key.at(step).private(rank).child("gossip")


@elementwise
def weighted_sum(own: Tensor, others: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """The weighted sum of the others, and of the own vector with the weight that remains to one."""
    total = own.float() if is_half(own) else own
    total = total * (1 - math.fsum(weights))
    for other, weight in zip(others, weights):
        total.add_(other, alpha=weight)
    return total.to(own.dtype)


def is_lossless(codec: Codec, spec: Spec) -> bool:
    return codec.guarantee(spec).delta == 1.0


def _spec(replica: Replica) -> Spec:
    (state,) = replica.exchange
    return replace(Spec.of(replica.params), tensors=state.get("tensors", ()))


def _decode(codec: Codec, spec: Spec, key: Key, buffer: Tensor, rank: int) -> Tensor:
    decoded = decode_shared(codec, spec, key, buffer)
    if not is_finite(decoded):
        raise nonfinite_error(rank)
    return decoded
