"""Collectives through servers: a worker sends its message with a job, the server does the job with
everyone's messages and answers all of them.

So that all network cards are busy from the start, worker i begins with server i, and server j with
the workers after the first j n/m: where m divides n, no message queues for a card while another
card is idle.
"""

import warnings
import zlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from gradwire.architecture.parameter_server._orders import (
    Failed,
    Lost,
    Maximum,
    MeanOfVectors,
    MergeInPairs,
    Order,
)
from gradwire.core.coded import checked_answer
from gradwire.core.errors import GradwireWarning, WireError
from gradwire.core.group import Aggregation, Group, Merging, concatenate
from gradwire.core.limits import Limits, kept_nbytes
from gradwire.core.node import Framed, Membership, Node
from gradwire.core.routes import ONE_WAY
from gradwire.core.spec import Spec
from gradwire.core.wire import ANSWER, HEADER_NBYTES, REQUEST, why_lost

# Exchanges that a server remembers: far more than there are tensors.
_MAX_EXCHANGES = 1 << 16
_DIFFERENT_JOBS = -1  # replaces the digest of a job if the members ordered different jobs


class ServerGroup(Group):
    """Workers that exchange messages with servers only. Servers own the shards."""

    def __init__(
        self,
        node: Node,
        label: str,
        route: str,
        members: Sequence[int] | None,
        num_servers: int,
    ) -> None:
        super().__init__(node, label, route, members)
        self.servers = tuple(range(node.size, node.size + num_servers))

    @property
    def owners(self) -> tuple[int, ...]:
        return self.servers

    def on_route(self, route: str) -> Group:
        # Servers that answer with the mean as it is lose as little as if all were gathered.
        return super().on_route(ONE_WAY if route == "gather" else route)

    async def at_owners(
        self, messages: Sequence[Tensor], jobs: Sequence[Aggregation], state: Any
    ) -> tuple[list[Tensor], Any]:
        tag = self._tag()
        orders = list(zip(self.servers, messages, jobs))
        first = self.rank % len(orders)
        for server, message, job in orders[first:] + orders[:first]:
            await self._send(server, Order(self.label, tag[1], self.members, job), message)
        return [await self._answer(server, tag) for server, _, _ in orders], state

    async def at_owner(self, message: Tensor, job: Aggregation) -> Tensor:
        tag, server = self._tag(), self._one_server()
        await self._send(server, Order(self.label, tag[1], self.members, job), message)
        return await self._answer(server, tag)

    async def all_to_all(self, messages: Sequence[Tensor]) -> list[Tensor]:
        """A server receives all messages and forwards each."""
        tag, server = self._tag(), self._one_server()
        for shift in range(1, self.size):
            peer = (self.rank + shift) % self.size
            order = Order(self.label, tag[1], self.members, None, (self.members[peer],))
            await self._send(server, order, messages[peer])
        return await self._receive_forwarded(server, tag, messages)

    async def all_gather(self, message: Tensor) -> list[Tensor]:
        """The message goes to a server once, and from there to all others."""
        tag, server = self._tag(), self._one_server()
        after = self.rank + 1
        others = self.members[after:] + self.members[: self.rank]
        if others:
            await self._send(server, Order(self.label, tag[1], self.members, None, others), message)
        return await self._receive_forwarded(server, tag, [message] * self.size)

    async def _receive_forwarded(
        self, server: int, tag: tuple[str, int], own: Sequence[Tensor]
    ) -> list[Tensor]:
        received = list(own)
        for shift in range(1, self.size):
            peer = (self.rank - shift) % self.size
            received[peer] = await self._answer(server, (*tag, self.members[peer]))
        return received

    async def mean(self, x: Tensor) -> Tensor:
        if self.size == 1:
            return x
        shards = [shard for shard in x.tensor_split(len(self.servers)) if shard.numel()]
        if not shards:
            return x
        answers, _ = await self.at_owners(shards, [MeanOfVectors()] * len(shards), None)
        for shard, answer in zip(shards, answers):
            checked_answer(answer, Spec.of(shard))
        return answers[0] if len(answers) == 1 else await self.node.share(concatenate, answers)

    async def max(self, x: Tensor) -> Tensor:
        if self.size == 1:
            return x
        return checked_answer(await self.at_owner(x, Maximum()), Spec.of(x))

    async def reduce_tree(self, x: Tensor, merging: Merging) -> Tensor:
        job = MergeInPairs(merging)
        if self.size == 1:
            return (await self.node.call(job.run, (x,), None))[0]
        return await self.at_owner(x, job)

    def _one_server(self) -> int:
        """The server for what is not cut into shards: other tensors go to others."""
        return self.servers[zlib.crc32(self.label.encode()) % len(self.servers)]

    async def _send(self, server: int, order: Order, message: Tensor) -> None:
        framed = Framed(order, message)
        await self.node.send_framed(server, REQUEST, framed, HEADER_NBYTES, self.label)

    async def _answer(self, server: int, tag: tuple[Any, ...]) -> Tensor:
        message = await self.node.recv(server, (ANSWER, *tag))
        header = message.header if isinstance(message, Framed) else message
        if isinstance(header, Lost | Failed):
            raise header.error()
        if header is not None or message.data is None:
            raise WireError(f"server {server} answered {message!r}, expected a tensor")
        return message.data


Exchange = tuple[str, int, tuple[int, ...]]  # label, round, members


async def serve_collectives(
    node: Node, num_servers: int, keep: dict[Any, Any], limits: Limits | None = None
) -> None:
    """The program of a server that forms means.

    `keep`: its whole state, as plain values. The program may be closed while it waits, and another
    one can continue from that state. `limits`: what the workers of this job exchange; orders about
    other tensors are refused, and so are exchanges among some of the workers.
    """
    await _Collector(node, num_servers, keep, await node.members(), limits).run()


def forget_members(keep: dict[Any, Any]) -> None:
    """Makes a server that continues in another job ask for the membership again."""
    keep.pop("lost", None)


class _Collector:
    """The messages that a server has received and cannot answer yet."""

    def __init__(
        self,
        node: Node,
        num_servers: int,
        keep: dict[str, Any],
        members: frozenset[int],
        limits: Limits | None,
    ) -> None:
        self.node = node
        self.num_servers = num_servers
        self.limits = limits
        self.kept: dict[Exchange, Any] = keep.setdefault("kept", {})  # by jobs
        self.kept_nbytes: Counter[str] = Counter()  # by label
        for exchange, state in self.kept.items():
            self.kept_nbytes[exchange[0]] += kept_nbytes(state)
        self.lost: dict[int, None] = keep.setdefault(
            "lost", dict.fromkeys(rank for rank in range(node.size) if rank not in members)
        )
        # For jobs: rank -> its message.
        self.boxes: dict[Exchange, dict[int, Tensor]] = keep.setdefault("boxes", {})
        # What was ordered: the digest of the job.
        self.jobs: dict[Exchange, int] = keep.setdefault("jobs", {})
        # The number of forwarded messages: (from, to) -> count
        self.passed: dict[Exchange, dict[tuple[int, int], int]] = keep.setdefault("passed", {})
        # The exchange of the last message that was forwarded for a rank: (rank, label) -> exchange
        self.latest: dict[tuple[int, str], Exchange] = keep.setdefault("latest", {})

    async def run(self) -> None:
        while True:
            rank, message = await self.node.recv_each(REQUEST)
            order = message.header if isinstance(message, Framed) else None
            if isinstance(order, Membership) and rank >= self.node.size:  # no worker may send it
                await self._change_membership(order)
            elif not isinstance(order, Order):
                # No answer to it is defined.
                what = type(message if order is None else order).__name__
                warnings.warn(
                    f"server {self.node.rank} got a {what} from rank {rank}, expected an order; "
                    "it was dropped",
                    GradwireWarning,
                    stacklevel=2,
                )
            else:
                await self._handle_order(rank, order, message.data)

    async def _handle_order(self, rank: int, order: Order, data: Tensor | None) -> None:
        """An invalid order is answered with an error, which is raised at its sender."""
        try:
            order.check(rank, self.node.size)
            if data is None:
                raise WireError(f"rank {rank} sent no tensor with an order for {order.label!r}")
            if self.limits is not None:
                order.check_limits(rank, self.node.size, self.limits, data.nbytes)
            self._check_turn(rank, order)
        except WireError as error:
            await self._refuse(rank, order, error)
            return
        if order.job is None:
            await self._forward(rank, order, data)
        else:
            await self._collect(rank, order, data)

    def _check_turn(self, rank: int, order: Order) -> None:
        """Refuses a message of a new exchange of a tensor before the last one is complete.

        So a worker cannot fill this server, or other workers, with exchanges that no other worker
        begins.
        """
        label, exchange = order.label, (order.label, order.round, order.members)
        is_open = any(key[0] == label and rank in box for key, box in self.boxes.items())
        latest = self.latest.get((rank, label))
        if latest is not None:
            # In the same exchange other peers may be next.
            peers = order.to if latest == exchange else latest[2]
            passed = self.passed.get(latest, {})
            is_open |= any(passed.get((rank, p), 0) > passed.get((p, rank), 0) for p in peers)
        if is_open:
            raise WireError(f"rank {rank} sent {label!r}, round {order.round}, out of turn")
        if order.job is not None and len(self.boxes) >= _MAX_EXCHANGES:
            num_begun = sum(rank in box for box in self.boxes.values())
            if num_begun >= _MAX_EXCHANGES // self.node.size:
                raise WireError(f"rank {rank} waits for {num_begun} exchanges at one server")

    async def _refuse(self, rank: int, order: Order, error: Exception) -> None:
        if rank >= self.node.size:
            return
        slot = (order.label, order.round)
        peers = [peer for peer in order.members[:1024] if peer != rank]
        tags = [slot] if order.job is not None else [(*slot, peer) for peer in peers]
        for tag in tags:
            await self._report_failure(rank, tag, Failed.of(error))

    async def _forward(self, rank: int, order: Order, data: Tensor) -> None:
        exchange = (order.label, order.round, order.members)
        if exchange not in self.passed and len(self.passed) >= _MAX_EXCHANGES:
            del self.passed[next(iter(self.passed))]  # the oldest: it is over long since
        self.latest[rank, order.label] = exchange
        for peer in order.to:
            passed = self.passed.setdefault(exchange, {})
            passed[rank, peer] = passed.get((rank, peer), 0) + 1
            await self._answer(peer, (*exchange[:2], rank), data)
        for gone in [member for member in order.members if member in self.lost]:
            await self._report_if_waiting(rank, exchange, gone)

    async def _report_if_waiting(self, rank: int, exchange: Exchange, gone: int) -> None:
        """Notifies a member that waits for a message of the lost one."""
        passed = self.passed.get(exchange, {})
        num_begun = max(passed.get((rank, peer), 0) for peer in exchange[2])
        if num_begun > passed.get((gone, rank), 0):
            await self._report_lost(rank, (*exchange[:2], gone), gone)

    async def _collect(self, rank: int, order: Order, message: Tensor) -> None:
        exchange = (order.label, order.round, order.members)
        gone = next((member for member in order.members if member in self.lost), None)
        if gone is not None:
            await self._report_lost(rank, exchange[:2], gone)
            return
        boxes = self.boxes.setdefault(exchange, {})
        if self.jobs.setdefault(exchange, order.digest) != order.digest:
            self.jobs[exchange] = _DIFFERENT_JOBS
        boxes[rank] = message  # one at a time: a worker waits for its answer
        if len(boxes) < len(order.members):
            return
        del self.boxes[exchange]
        is_agreed = self.jobs.pop(exchange) != _DIFFERENT_JOBS
        messages = tuple(boxes[member] for member in order.members)
        assert order.job is not None
        slot = exchange[:2]
        try:
            if not is_agreed:
                raise WireError(
                    f"the members of {order.members} ordered different jobs for {order.label!r}, "
                    f"round {order.round}; all must run the same configuration"
                )
            state = self.kept.get(exchange)
            answer, kept = await self.node.call(order.job.run, messages, state)
            self._store_state(exchange, kept)
        except Exception as error:  # a job may raise anything on hostile messages
            for member in self._rotate_members(order.members):
                await self._report_failure(member, slot, Failed.of(error))
            return
        for member in self._rotate_members(order.members):
            await self._answer(member, slot, answer)

    def _store_state(self, exchange: Exchange, state: Any) -> None:
        """Stores the state of an exchange for the next round. Members make it, so it is bounded."""
        if state is None:
            return
        label, before = exchange[0], self.kept.get(exchange)
        nbytes = self.kept_nbytes[label] + kept_nbytes(state)
        nbytes -= 0 if before is None else kept_nbytes(before)
        if self.limits is not None:
            self.limits.check_kept(label, nbytes)
        elif before is None and len(self.kept) >= _MAX_EXCHANGES:
            raise WireError(f"a server keeps something of {len(self.kept)} exchanges already")
        self.kept[exchange], self.kept_nbytes[label] = state, nbytes

    def _rotate_members(self, members: tuple[int, ...]) -> tuple[int, ...]:
        """The members in the order of answers: each server begins with a different one."""
        first = (self.node.rank - self.node.size) * len(members) // self.num_servers
        return members[first:] + members[:first]

    async def _change_membership(self, change: Membership) -> None:
        """Notifies the members that wait for a worker that was lost."""
        rank = change.rank
        if change.there:
            self.lost.pop(rank, None)
            return
        self.lost[rank] = None
        for exchange in [key for key in self.boxes if rank in key[2]]:
            self.jobs.pop(exchange, None)
            for member in self.boxes.pop(exchange):
                await self._report_lost(member, exchange[:2], rank)
        for exchange in [key for key in self.passed if rank in key[2]]:
            for member in exchange[2]:
                if member != rank:
                    await self._report_if_waiting(member, exchange, rank)

    async def _answer(self, rank: int, tag: tuple[Any, ...], data: Tensor) -> None:
        framed = Framed(None, data)
        await self.node.send_framed(rank, (ANSWER, *tag), framed, HEADER_NBYTES, tag[0])

    async def _report_lost(self, rank: int, tag: tuple[Any, ...], gone: int) -> None:
        await self._report_failure(rank, tag, Lost.of(await why_lost(self.node, gone)))

    async def _report_failure(self, rank: int, tag: tuple[Any, ...], why: Lost | Failed) -> None:
        """Reports why there is no answer."""
        framed = Framed(why)
        await self.node.send_framed(rank, (ANSWER, *tag), framed, HEADER_NBYTES, "membership")
