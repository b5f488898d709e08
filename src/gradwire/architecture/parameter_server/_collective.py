"""Collectives through servers: a worker sends its message with a job, the server does the job with
everyone's messages and answers all of them.

So that all network cards are busy from the start, worker i begins with server i, and server j with
the workers after the first j n/m: where m servers divide n workers, nobody ever queues for a card
that others leave idle.
"""

import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gradwire.core.errors import PeerLost, WireError
from gradwire.core.group import Group, Job, concatenate, maximum, mean_in_order
from gradwire.core.lifted import ONE_WAY
from gradwire.core.node import Framed, Membership, Node
from gradwire.core.wire import ANSWER, HEADER_NBYTES, REQUEST, why_lost


@dataclass(frozen=True)
class Order:
    """The header of a message for a server: what to do with it and everyone's."""

    label: str
    round: int  # of the exchanges of this tensor
    members: tuple[int, ...]
    job: Job | None  # None: hand the message on
    to: tuple[int, ...] = ()  # to these


@dataclass(frozen=True)
class Lost:
    """The header of an answer that will not come: a member is gone."""

    error: PeerLost


@dataclass(frozen=True)
class _Mean:
    def run(self, messages: tuple[Tensor, ...], state: Any) -> tuple[Tensor, Any]:
        _check_alike(messages)
        return mean_in_order(messages, len(messages)), None


@dataclass(frozen=True)
class _Maximum:
    def run(self, messages: tuple[Tensor, ...], state: Any) -> tuple[Tensor, Any]:
        _check_alike(messages)
        return maximum(messages), None


def _check_alike(messages: Sequence[Tensor]) -> None:
    """What is added must be vectors of one kind."""
    first = messages[0]
    for message in messages:
        if (message.shape, message.dtype) != (first.shape, first.dtype):
            raise WireError(
                f"a server got {tuple(message.shape)} {message.dtype} for a tensor of which it "
                f"also got {tuple(first.shape)} {first.dtype}; all workers must send the same"
            )


@dataclass(frozen=True)
class _Merge:
    """Merges in pairs, as a binomial tree does, so that the result is the same."""

    merge: Callable[[Tensor, Tensor], Tensor]
    settle: Callable[[Tensor], Tensor]

    def run(self, messages: tuple[Tensor, ...], state: Any) -> tuple[Tensor, Any]:
        level = list(messages)
        while len(level) > 1:
            pairs = [self.merge(a, b) for a, b in zip(level[::2], level[1::2])]
            level = pairs + level[len(pairs) * 2 :]
        return self.settle(level[0]), None


class ServerGroup(Group):
    """Workers that talk to servers only. Servers own the shards."""

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
        self, messages: Sequence[Tensor], jobs: Sequence[Job], state: Any
    ) -> tuple[list[Tensor], Any]:
        tag = self._tag()
        orders = list(zip(self.servers, messages, jobs))
        first = self.rank % len(orders)
        for server, message, job in orders[first:] + orders[:first]:
            await self._send(server, Order(self.label, tag[1], self.members, job), message)
        return [await self._answer(server, tag) for server, _, _ in orders], state

    async def at_owner(self, message: Tensor, job: Job) -> Tensor:
        tag, server = self._tag(), self._one_server()
        await self._send(server, Order(self.label, tag[1], self.members, job), message)
        return await self._answer(server, tag)

    async def all_to_all(self, messages: Sequence[Tensor]) -> list[Tensor]:
        """A server sees all messages and hands each on."""
        tag, server = self._tag(), self._one_server()
        for shift in range(1, self.size):
            peer = (self.rank + shift) % self.size
            order = Order(self.label, tag[1], self.members, None, (self.members[peer],))
            await self._send(server, order, messages[peer])
        return await self._handed_on(server, tag, messages)

    async def all_gather(self, message: Tensor) -> list[Tensor]:
        """The message goes to a server once, and from there to all others."""
        tag, server = self._tag(), self._one_server()
        after = self.rank + 1
        others = self.members[after:] + self.members[: self.rank]
        if others:
            await self._send(server, Order(self.label, tag[1], self.members, None, others), message)
        return await self._handed_on(server, tag, [message] * self.size)

    async def _handed_on(
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
        answers, _ = await self.at_owners(shards, [_Mean()] * len(shards), None)
        return answers[0] if len(answers) == 1 else await self.node.share(concatenate, answers)

    async def max(self, x: Tensor) -> Tensor:
        return x if self.size == 1 else await self.at_owner(x, _Maximum())

    async def reduce_tree(
        self,
        x: Tensor,
        merge: Callable[[Tensor, Tensor], Tensor],
        settle: Callable[[Tensor], Tensor] = lambda x: x,
    ) -> Tensor:
        job = _Merge(merge, settle)
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
        assert isinstance(message, Framed)
        if isinstance(message.header, Lost):
            raise message.header.error
        assert message.data is not None
        return message.data


Slot = tuple[str, int]  # label, round
Exchange = tuple[str, int, tuple[int, ...]]  # and the members


async def serve_collectives(node: Node, num_servers: int, keep: dict[Any, Any]) -> None:
    """The program of a server that forms means. `keep`: what jobs keep, by tensor and round."""
    await _Collector(node, num_servers, keep, await node.members()).run()


class _Collector:
    """What a server has received and cannot answer yet."""

    def __init__(
        self, node: Node, num_servers: int, keep: dict[Slot, Any], members: frozenset[int]
    ) -> None:
        self.node = node
        self.num_servers = num_servers
        self.keep = keep
        self.lost = set(range(node.size)) - members
        self.boxes: dict[Exchange, dict[int, Framed]] = {}  # for jobs: rank -> its message
        # How often something was handed on: (from, to) -> count
        self.passed: defaultdict[Exchange, Counter[tuple[int, int]]] = defaultdict(Counter)

    async def run(self) -> None:
        while True:
            rank, message = await self.node.recv_each(REQUEST)
            order = message.header if isinstance(message, Framed) else None
            if isinstance(order, Membership):
                await self._changed(order)
            elif not isinstance(order, Order) or message.data is None:
                raise WireError(f"server {self.node.rank} got {message!r}, expected an order")
            elif order.job is None:
                await self._hand_on(rank, order, message.data)
            else:
                await self._collect(rank, order, message)

    async def _hand_on(self, rank: int, order: Order, data: Tensor) -> None:
        exchange = (order.label, order.round, order.members)
        for peer in order.to:
            self.passed[exchange][rank, peer] += 1
            await self._answer(peer, (*exchange[:2], rank), data)
        for gone in self.lost.intersection(order.members):
            await self._tell_if_waiting(rank, exchange, gone)

    async def _tell_if_waiting(self, rank: int, exchange: Exchange, gone: int) -> None:
        """A member that has sent more than the lost one had for it waits in vain."""
        passed = self.passed[exchange]
        num_begun = max(passed[rank, peer] for peer in exchange[2])
        if num_begun > passed[gone, rank]:
            await self._give_up(rank, (*exchange[:2], gone), gone)

    async def _collect(self, rank: int, order: Order, message: Framed) -> None:
        exchange = (order.label, order.round, order.members)
        gone = next((member for member in order.members if member in self.lost), None)
        if gone is not None:
            await self._give_up(rank, exchange[:2], gone)
            return
        boxes = self.boxes.setdefault(exchange, {})
        if rank not in order.members or rank in boxes:
            raise WireError(f"rank {rank} sent {order.label!r}, round {order.round}, out of turn")
        boxes[rank] = message  # one at a time: nobody goes on before it is answered
        if len(boxes) < len(order.members):
            return
        del self.boxes[exchange]
        messages = tuple(boxes[member].data for member in order.members)
        assert order.job is not None
        slot = exchange[:2]
        answer, kept = await self.node.call(order.job.run, messages, self.keep.get(slot))
        if kept is not None:
            self.keep[slot] = kept
        for member in self._in_turn(order.members):
            await self._answer(member, slot, answer)

    def _in_turn(self, members: tuple[int, ...]) -> tuple[int, ...]:
        """Other servers begin with other members."""
        first = (self.node.rank - self.node.size) * len(members) // self.num_servers
        return members[first:] + members[:first]

    async def _changed(self, change: Membership) -> None:
        """Those that wait for a worker that was lost wait in vain."""
        rank = change.rank
        if change.there:
            self.lost.discard(rank)
            return
        self.lost.add(rank)
        for exchange in [key for key in self.boxes if rank in key[2]]:
            for member in self.boxes.pop(exchange):
                await self._give_up(member, exchange[:2], rank)
        for exchange in [key for key in self.passed if rank in key[2]]:
            for member in exchange[2]:
                if member != rank:
                    await self._tell_if_waiting(member, exchange, rank)

    async def _answer(self, rank: int, tag: tuple[Any, ...], data: Tensor) -> None:
        framed = Framed(None, data)
        await self.node.send_framed(rank, (ANSWER, *tag), framed, HEADER_NBYTES, tag[0])

    async def _give_up(self, rank: int, tag: tuple[Any, ...], gone: int) -> None:
        framed = Framed(Lost(await why_lost(self.node, gone)))
        await self.node.send_framed(rank, (ANSWER, *tag), framed, HEADER_NBYTES, "membership")
