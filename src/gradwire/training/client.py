"""A worker's side of push and pull with servers that hold the model."""

from typing import Protocol

from torch import Tensor

from gradwire.core.codec import State, is_finite
from gradwire.core.errors import NonFiniteError, WireError
from gradwire.core.group import Gate, concatenate
from gradwire.core.node import Framed, Node
from gradwire.core.protocols import Backward, Bucket, Pulled, Replica
from gradwire.core.wire import HEADER_NBYTES, Failed
from gradwire.training.plan import Plan
from gradwire.training.wire import (
    AnswerHeader,
    PullHeader,
    PushHeader,
    answer_codec,
    answer_key,
    apply_change,
    tags_of,
)


class PendingPush(Backward, Protocol):
    """A vector that is pushed when it is ready."""

    was_dropped: bool  # it was NaN or infinite, and zeros took its place


class ServerClient:
    """One worker's side of push and pull. `label`: of the model, where servers hold several."""

    def __init__(self, plan: Plan, node: Node, life: float, label: str = "") -> None:
        self.plan = plan
        self.node = node
        self.life = life  # its incarnation: when it joined
        # The compression's state after the last message; a crash loses it.
        self.exchange: tuple[State, ...] | None = None
        self._request, self._answer = tags_of(label)
        self._buckets = plan.buckets()
        self._shards = plan.shards()
        self._units = plan.units()

    async def request_model(self, step: int) -> None:
        """Asks all servers for the model."""
        for server in range(len(self._shards)):
            header = PullHeader(step, self.life)
            await self.node.send_framed(
                self._server_rank(server), self._request, Framed(header), HEADER_NBYTES, "pull"
            )

    def _server_rank(self, number: int) -> int:
        """The rank of a server."""
        return self.node.size + number

    async def push(
        self, backward: PendingPush, replica: Replica, step: int, wants_answer: bool
    ) -> Replica:
        """Sends each piece to its server when its bucket is ready."""
        plan, states = self.plan, list(replica.exchange)
        key = plan.key.at(step).private(self.node.rank)

        def turn(number: int) -> int:
            # Workers begin with different servers, so that no server is idle while another is
            # crowded.
            return (self._units[number].server - self.node.rank) % len(self._shards)

        async def reduce(bucket: Bucket, x: Tensor, gate: Gate | None = None) -> None:
            pieces = [i for i, unit in enumerate(self._units) if unit.lies_in(bucket)]
            for i in sorted(pieces, key=turn):
                unit, piece = self._units[i], self._units[i].bucket
                own = x[piece.start - bucket.start : piece.stop - bucket.start]
                pushed = await plan.reducer.push(own, states[i], key.child(piece.name), self.node)
                states[i] = pushed.state
                num_parts = len(pushed.messages)
                for part, message in enumerate(pushed.messages):
                    header = PushHeader(i, part, num_parts, step, wants_answer, self.life)
                    await self.node.send_framed(
                        self._server_rank(unit.server),
                        self._request,
                        Framed(header, message),
                        HEADER_NBYTES,
                        bucket.name,
                    )

        await plan.scheduling.exchange(backward, self._buckets, reduce)
        if backward.was_dropped:
            replica = with_dropped_step(replica)
        self.exchange = tuple(states)
        return replica.having(exchange=self.exchange)

    async def receive_model(self, replica: Replica, before: tuple[State, ...]) -> Pulled:
        """Waits for the answers of all servers.

        For a server that did not accept the push, the compression's state is reset to `before`, so
        that the residual stays complete.
        """
        plan, pieces, clocks = self.plan, [], []
        states, accepted = list(replica.exchange), True
        for server, shard in enumerate(self._shards):
            header, message = await self._receive_answer(self._server_rank(server))
            clocks.append(header.clock)
            if not header.accepted:
                accepted = False
                for i, unit in enumerate(self._units):
                    if unit.server == server:
                        states[i] = before[i]
            piece = await self._decode_shard(server, shard, header, message, replica)
            if not is_finite(piece):
                raise NonFiniteError(
                    f"server {server} answered a model with NaN or infinity. Lower the learning "
                    "rate or set clip_norm."
                )
            pieces.append(piece)
        # Workers in lockstep share one result; caching the results of others would only use memory.
        work = self.node.share if plan.synchronization.pauses else self.node.call
        whole = pieces[0] if len(pieces) == 1 else await work(concatenate, tuple(pieces))
        self.exchange = tuple(states)
        replica = replica.having(params=whole, exchange=self.exchange)
        if plan.compresses_answers:
            replica = replica.remembering(pulled=whole)
        return Pulled(replica, min(clocks), accepted, max(clocks))

    async def _decode_shard(
        self, server: int, shard: Bucket, header: AnswerHeader, message: Tensor, replica: Replica
    ) -> Tensor:
        """A server's part of the model. Servers are not trusted either."""
        plan, own = self.plan, replica.params[shard.start : shard.stop]
        if header.is_whole:
            if message.shape != own.shape or message.dtype != own.dtype:
                raise WireError(
                    f"server {server} answered {list(message.shape)} x {message.dtype}, expected "
                    f"{list(own.shape)} x {own.dtype}"
                )
            return message
        if not plan.compresses_answers:
            raise WireError(f"server {server} answered with a change, expected the model itself")
        known = replica.memory["pulled"][shard.start : shard.stop]
        key = answer_key(plan.key, header.number, self.node.rank, server)
        try:
            codec = answer_codec(plan.reducer, header.clock)
            spec = plan.spec(shard, known.dtype)
            return await self.node.call(apply_change, codec, known, message, spec, key)
        except Exception as error:  # a codec may raise anything on hostile bytes
            raise WireError(f"server {server} answered what is no change: {error}") from error

    async def _receive_answer(self, server: int) -> tuple[AnswerHeader, Tensor]:
        """The next answer of a server to this incarnation of the worker."""
        while True:
            message = await self.node.recv(server, self._answer)
            header = message.header if isinstance(message, Framed) else None
            if isinstance(header, Failed):
                raise header.error()
            if not isinstance(header, AnswerHeader) or message.data is None:
                raise WireError(
                    f"server {server - self.node.size} answered {message!r:.200}, expected a model"
                )
            if header.life == self.life:
                return header, message.data


def with_dropped_step(replica: Replica) -> Replica:
    """The replica after a dropped step."""
    return replica.having(num_dropped=replica.num_dropped + 1)
