"""Collectives over a group of nodes, written with `send` and `recv`.

An architecture gives a `Group`; compression routes its payloads through it. The exchanges here
are direct: every rank sends to every other, in an order rotated by its own rank so that no
receiver is hit by all at once (pairwise exchange, Thakur et al. 2005, sec. 4). On a network of
full-duplex NICs a direct exchange takes one latency and the bytes of one node.
"""

import copy
from collections.abc import Awaitable, Callable, Hashable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.core.batched import batched
from gradwire.core.exchange import Column, Outgoing, Shards, ToAll, ToEach, as_argument
from gradwire.core.metering import Work, makes_new
from gradwire.core.node import Node, Recv, Send, Tag
from gradwire.core.rows import joined_in_memory, split_vector, whole_of

_MOST_ON_CPU = 1 << 13  # elements of a shard
FEWEST = 4  # members whose exchange may be one effect: for fewer, messages cost less


class Aggregation(Protocol):
    """How the owner of a shard combines the members' messages for it. A value."""

    def run(self, messages: tuple[Tensor, ...], state: Any) -> tuple[Tensor, Any]:
        """The answer to all members, and the owner's state for the next time (None at first)."""
        ...


class Merging(Protocol):
    """How two messages become one. A value."""

    def merge(self, a: Tensor, b: Tensor, /) -> Tensor: ...

    def finalize(self, merged: Tensor, /) -> Tensor:
        """The last operation on the result, done once for all."""
        return merged


Gate = Callable[[], Awaitable[None]]


class Group:
    """Some of the workers (all, if none are named) as seen from one of them.

    `rank` and `size` count within the group; `members` are the workers' own numbers.
    """

    def __init__(
        self, node: Node, label: str, route: str = "auto", members: Sequence[int] | None = None
    ) -> None:
        self.node = node
        self.label = label  # of the tensor being exchanged: names its bytes in the ledger
        self.route = route  # how OPAQUE payloads are averaged: "gather", "scatter" or "auto"
        self.members = tuple(range(node.size)) if members is None else tuple(members)
        self.size = len(self.members)
        self.rank = node.rank if members is None else self.members.index(node.rank)
        self.is_everyone = self.size == node.size
        self.exact = False  # whether means must be those of what was sent, better than 16 bits
        # Waits between the two phases of an exchange: results are there, but not yet sent to all.
        self.gate: Gate | None = None
        self._round = 0

    async def _pass_gate(self) -> None:
        if self.gate is not None:
            await self.gate()

    def _tag(self) -> tuple[str, int]:
        # Every rank goes through the same rounds, so the count agrees; messages between two
        # ranks stay in order, so the count of a later group may repeat.
        self._round += 1
        return (self.label, self._round)

    def send(self, peer: int, tag: Tag, message: Tensor) -> Send:
        """To the member number `peer`."""
        return self.node.send(self.members[peer], tag, message, self.label)

    def recv(self, peer: int, tag: Tag) -> Recv:
        """From the member number `peer`."""
        return self.node.recv(self.members[peer], tag)

    async def _exchange(self, outgoing: Outgoing) -> Sequence[Tensor]:
        """Everyone sends to everyone."""
        tag = self._tag()
        if self.size >= FEWEST:
            effect = self.node.exchange(self.members, self.rank, tag, outgoing, self.label)
            answer = await effect
            if answer is not None:
                return answer
        messages = outgoing.messages(self.size)
        received = list(messages)
        for shift in range(1, self.size):
            peer = (self.rank + shift) % self.size
            await self.send(peer, tag, messages[peer])
        for shift in range(1, self.size):
            peer = (self.rank - shift) % self.size
            received[peer] = await self.recv(peer, tag)
        return received

    async def all_to_all(self, messages: Sequence[Tensor]) -> Sequence[Tensor]:
        """Member j receives `messages[j]`; returns what each sent to this one."""
        return await self._exchange(ToEach(messages))

    async def all_gather(self, message: Tensor) -> Sequence[Tensor]:
        """Everyone's message, by rank; lengths may differ."""
        return await self._exchange(ToAll(message))

    @property
    def owners(self) -> tuple[int, ...]:
        """The nodes that average a shard each."""
        return self.members

    def on_route(self, route: str) -> "Group":
        """The same group, with OPAQUE payloads averaged in this way."""
        other = copy.copy(self)
        other.route = route
        return other

    async def at_owners(
        self, messages: Sequence[Tensor], jobs: Sequence[Aggregation], state: Any
    ) -> tuple[list[Tensor], Any]:
        """Owner j runs `jobs[j]` on all members' `messages[j]`: all answers, by owner.

        `state` is what this rank keeps as an owner; owners that are no members keep their own.
        """
        received = await self.all_to_all(messages)
        answer, state = await self.node.call(jobs[self.rank].run, tuple(received), state)
        await self._pass_gate()
        return list(await self.all_gather(answer)), state

    async def at_owner(self, message: Tensor, job: Aggregation) -> Tensor:
        """One owner combines the messages of all members, which all get its answer."""
        raise NotImplementedError(f"{type(self).__name__} has no owner that is not a member")

    async def mean(self, x: Tensor) -> Tensor:
        """The mean over all ranks of a flat vector, by an all-reduce: scatter, average, gather."""
        if self.size == 1:
            return x
        node = self.node
        received = await self._exchange(Shards(x, self.size))
        mine = await node.call(mean_in_order, as_argument(received), self.size)
        await self._pass_gate()
        return await node.share(concatenate, as_argument(await self.all_gather(mine)))

    async def max(self, x: Tensor) -> Tensor:
        """The elementwise maximum over all ranks of a short vector."""
        gathered = await self.all_gather(x)
        return await self.node.share(maximum, as_argument(gathered))

    async def reduce_tree(self, x: Tensor, merging: Merging) -> Tensor:
        """Merges pairwise up a binomial tree; rank 0 finalizes the result and sends it down."""
        node, up, down = self.node, self._tag(), self._tag()
        span = 1
        while span < self.size and self.rank % (2 * span) == 0:
            if self.rank + span < self.size:
                other = await self.recv(self.rank + span, up)
                x = await node.call(merging.merge, x, other)
            span *= 2
        if self.rank == 0:
            x = await node.call(merging.finalize, x)
        else:
            await self.send(self.rank - span, up, x)
            x = await self.recv(self.rank - span, down)
        while span > 1:
            span //= 2
            if self.rank + span < self.size:
                await self.send(self.rank + span, down, x)
        return x


class MeansOfShards:
    """Means of shards, one after another: the k-th pieces of all calls as one vector."""

    reports = False

    def least_work(self, args: tuple[Any, ...]) -> Sequence[Work]:
        return ()

    def keys(self, args: tuple[Any, ...]) -> tuple[Hashable, Hashable] | None:
        pieces, count = args
        if isinstance(pieces, Column):
            first, (start, stop) = pieces.rows.whole[0], pieces.span
            if not adds_together(pieces):
                return None
            kind = len(pieces), count, first.dtype, first.device, stop - start
            return kind, (id(pieces.rows), count)
        if not isinstance(pieces, tuple):
            return None
        first = pieces[0]
        on_cpu = first.device.type == "cpu"
        # On a CPU a long total would fall out of the cache between two pieces.
        if first.dim() != 1 or is_half(first) or (on_cpu and first.numel() > _MOST_ON_CPU):
            return None
        group = len(pieces), count, first.dtype, first.device  # lengths may differ
        return (group, first.numel(), len(set(map(id, pieces)))), group

    def run(self, calls: Sequence[tuple[Any, ...]]) -> list[Tensor]:
        count = calls[0][1]
        if isinstance(calls[0][0], Column):  # which share one mean
            return [mean_in_order(*args) for args in calls]
        order = sorted(range(len(calls)), key=lambda i: calls[i][0][0].data_ptr())
        joined = []
        for number in range(len(calls[0][0])):
            pieces = [calls[i][0][number] for i in order]
            whole = joined_in_memory(pieces)
            joined.append(torch.cat(pieces) if whole is None else whole)
        mean = mean_in_order(tuple(joined), count)
        own: list[Any] = [None] * len(calls)
        for i, part in zip(order, mean.split([calls[i][0][0].numel() for i in order])):
            own[i] = part
        return own


@batched(MeansOfShards())
def mean_in_order(pieces: Iterable[Tensor], count: int) -> Tensor:
    """The mean of `count` pieces, added in order, as a new tensor of their dtype.

    16-bit floats are added in float32 and rounded once, so that they cannot overflow.
    """
    if isinstance(pieces, Column):
        if adds_together(pieces):
            rows = pieces.rows
            if rows.means is None:
                mean = mean_in_order(tuple(rows.whole), count)
                rows.means = split_vector(mean, len(rows.whole))
            return rows.means[pieces.rank]
        pieces = tuple(pieces)
    if isinstance(pieces, tuple) and is_half(pieces[0]):
        first = pieces[0]
        out = kernels.empty(first.numel(), first.dtype, first.device)
        return kernels.mean_halves(pieces, count, out).view(first.shape)
    pieces = iter(pieces)  # one after the other: all at once might not fit
    first = next(pieces)
    total = _empty_like(first)
    if is_half(first):
        total.copy_(first)
        wide = _empty_like(first)
        for piece in pieces:
            total += wide.copy_(piece)
        return total.div_(count).to(first.dtype)
    second = next(pieces, None)
    if second is None:
        total.copy_(first)
    else:
        torch.add(first, second, out=total)
    for piece in pieces:
        total += piece
    return total.div_(count)


def adds_together(column: Column) -> bool:
    """Whether the owners of shards form their means at once, as that of whole vectors."""
    first, (start, stop) = column.rows.whole[0], column.span
    return first.device.type != "cpu" or stop - start <= _MOST_ON_CPU


def _empty_like(x: Tensor) -> Tensor:
    dtype = torch.float32 if is_half(x) else x.dtype
    return kernels.empty(x.numel(), dtype, x.device).view(x.shape)


def is_half(x: Tensor) -> bool:
    return x.dtype in (torch.float16, torch.bfloat16)


@makes_new
def concatenate(pieces: Sequence[Tensor]) -> Tensor:
    """One after the other; all have one dtype. Nobody changes what was made of rows at once."""
    whole, first = whole_of(pieces), pieces[0]
    if whole is not None:
        return whole
    numel = sum(piece.numel() for piece in pieces)
    return torch.cat(list(pieces), out=kernels.empty(numel, first.dtype, first.device))


def maximum(pieces: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(pieces)).amax(dim=0)
