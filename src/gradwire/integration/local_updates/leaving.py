"""How ranks that take fewer steps go on serving the rounds of the others (gossip).

A rank that has no more steps to take, or asks for a consensus, has *left*. It says so to all others
once, with the round that it has begun. It stays in that round until it is known whether anybody
goes beyond it. A rank in training answers with the round that it goes on to, now and whenever that
changes. So the rank that has left takes part in as many rounds as the others, without
steps of its own, until all have left. While nobody has left nothing is sent.

Messages are vectors of four numbers: a kind, the round (the step with which it begins), the steps
taken, and whether the rank has left for good (`close`) or will go on (`consensus`).
"""

from collections.abc import Awaitable, Callable
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from gradwire.core.errors import WireError
from gradwire.core.node import Node

T = TypeVar("T")

_GOES_ON, _LEFT, _STOP = range(3)
_MAX_STEP = 1 << 53


class Left(NamedTuple):
    """A rank that takes no more steps."""

    began: int  # the round that it is in
    steps: int  # taken by it, by the clock of rounds
    is_final: bool


class Leaving:
    """What one rank knows of others that have left, from one consensus to the next."""

    def __init__(self, label: str, size: int) -> None:
        self._label, self._size = label, size
        self._number = 0  # of the consensus to come
        self.left: dict[int, Left] = {}  # by rank
        self._going: dict[int, int] = {}  # the latest round that a rank goes on to

    @property
    def _tag(self) -> str:
        return f"{self._label}left {self._number}"

    async def while_answering(
        self, node: Node, next_round: int, program: Callable[[Node], Awaitable[T]]
    ) -> T:
        """Runs a part of a round, and meanwhile tells ranks that leave of the next one."""
        for peer in self.left:
            await self._say(node, peer, _GOES_ON, next_round)
        answering = await node.spawn(self._answer(node, next_round))
        result = await program(node)
        await self._say(node, node.rank, _STOP, 0)
        await node.join(answering)
        return result

    async def _answer(self, node: Node, next_round: int) -> None:
        while True:
            peer, row = await node.recv_any(self._tag)
            if self._read(row, peer) == _STOP and peer == node.rank:
                return
            await self._say(node, peer, _GOES_ON, next_round)

    async def leave(self, node: Node, own: Left) -> None:
        self.left[node.rank] = own
        for shift in range(1, node.size):
            peer = (node.rank + shift) % node.size
            await self._say(node, peer, _LEFT, *own)

    async def goes_on(self, node: Node, began: int) -> bool:
        """After this rank has left: whether any other goes beyond the round that it has begun."""
        for peer in range(node.size):
            while peer not in self.left and self._going.get(peer, began) <= began:
                self._read(await node.recv(peer, self._tag), peer)
        rounds = [*self._going.values(), *(left.began for left in self.left.values())]
        return max(rounds) > began

    def end(self) -> tuple[int, bool]:
        """All have left. The most steps that any of them took, and whether all left for good."""
        assert len(self.left) == self._size
        steps = max(left.steps for left in self.left.values())
        are_final = all(left.is_final for left in self.left.values())
        self.left, self._going = {}, {}
        self._number += 1
        return steps, are_final

    async def _say(
        self, node: Node, peer: int, kind: int, began: int, steps: int = 0, is_final: bool = False
    ) -> None:
        await node.send(peer, self._tag, torch.tensor([kind, began, steps, int(is_final)]))

    def _read(self, row: Tensor, peer: int) -> int:
        """Notes what a rank said; the kind."""
        if row.dtype is not torch.int64 or row.shape != (4,):
            raise WireError(f"rank {peer} sent {row.dtype} {tuple(row.shape)}, expected four int64")
        kind, began, steps, is_final = row.tolist()
        if not (0 <= kind <= _STOP and 0 <= began <= _MAX_STEP and 0 <= steps <= _MAX_STEP):
            raise WireError(f"rank {peer} sent {row.tolist()}, which is no message of leaving")
        if kind == _LEFT:
            self.left[peer] = Left(began, steps, bool(is_final))
        elif kind == _GOES_ON:
            self._going[peer] = max(began, self._going.get(peer, began))
        return int(kind)
