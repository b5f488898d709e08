"""One worker among its neighbours: whom it hears and tells, what is sent, who is there.

In a round i sends one message to each j with W[j, i] > 0 and waits for one of each j with
W[i, j] > 0. If j is lost, its weight goes to oneself, W_ii += W_ij, from then on: the matrix of
those that are left stays symmetric with rows of sum one if it was so before.

Who comes (back) says hello to its neighbours. A porter, a program beside the training, answers at
once with the first round that has not begun, and from that round on both sides count on each
other: nobody waits for a message that will not come. A worker that has done its last step goes on
answering. Of two that have just come, the one that came first answers when it has its own answers,
and the lower rank if they came at once. Messages of a worker's earlier life are dropped: it says
`Back` on the link before anything else.

Between a crash and its notice messages to the lost worker go nowhere.
"""

import math
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.architecture.gossip._posts import (
    ANSWER,
    HEADER_NBYTES,
    HELLO,
    INITIAL,
    NUMBER_NBYTES,
    ROUNDS,
    WELCOME,
    Back,
    Hello,
    Post,
    Stranger,
    Welcome,
)
from gradwire.core.codec import Codec, State
from gradwire.core.errors import PeerLost
from gradwire.core.group import is_half
from gradwire.core.key import Key
from gradwire.core.node import Framed, Node
from gradwire.core.protocols import Replica
from gradwire.core.spec import Spec

LABEL = "model"  # in the ledger


class Heard(NamedTuple):
    """What a neighbour said in a round."""

    rank: int
    weight: float  # W[i, rank]
    x: Tensor  # a vector, or a packed payload
    push_weight: float | None = None
    version: tuple[float, int] | None = None


class Neighbours:
    """The neighbours of one worker, and what it knows of them. Lives as long as a segment."""

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
        self.model: Tensor | None = None  # as it is given to newcomers
        self.next = 0  # the first round that has not begun
        self.life = INITIAL
        self.last_sent: int | None = None  # the last round in which it sent something
        self.is_new = False  # whether it has not been in a round since it came
        self.asked: int | None = None  # who has not answered a request yet
        self._matrix = matrix
        self._varies = varies
        self._others = tuple(others)  # who is a neighbour in some round
        self._known: tuple[dict[int, float], dict[int, float]] | None = None
        self._since: dict[int, float] = {}  # the first round with this one; infinity: lost
        self._lives: dict[int, float] = {}
        self._flushed: dict[int, float] = {}  # drop messages until this life begins
        self._ahead: defaultdict[int, deque[Framed]] = defaultdict(deque)  # read too early
        self._to_introduce: set[int] = set()
        # What strangers said by way of introduction, and which version of it.
        self.introduced: dict[int, tuple[tuple[float, int], Tensor]] = {}
        self._has_porter = False
        # Whom this worker said hello, and when, while it waits for answers; None if it does not.
        self._greeted: dict[int, float] | None = None
        self._deferred: list[tuple[int, Hello]] = []

    # Who is there.

    async def attend(self, model: Tensor, step: int) -> None:
        """Training has come to this step: rounds from the next one on can have newcomers."""
        self.model, self.next = model, step + 1
        if not self._has_porter:
            self._has_porter = True
            await self.node.spawn(self._porter())

    def life_of(self, rank: int) -> float:
        return self._lives.get(rank, INITIAL)

    def met(self, rank: int, life: float) -> None:
        """A message says which life of its sender it is from."""
        self._lives[rank] = max(life, self.life_of(rank))

    def sources(self, step: int) -> dict[int, float]:
        """Whom this one hears in a round, with weights W[i, j]: those believed to be there."""
        return self._there(self._weights(step)[0], step)

    def targets(self, step: int) -> dict[int, float]:
        """Who hears this one in a round, with weights W[j, i]."""
        return self._there(self._weights(step)[1], step)

    def _there(self, weights: Mapping[int, float], step: int) -> dict[int, float]:
        since = self._since
        return {rank: w for rank, w in weights.items() if since.get(rank, 0) <= step}

    def _weights(self, step: int) -> tuple[dict[int, float], dict[int, float]]:
        if self._known is None or self._varies:
            matrix, rank = self._matrix(step), self.rank
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
        """The message of this round to all who hear this one; the sum of their weights W[j, i]."""
        header_nbytes = HEADER_NBYTES + (0 if push_weight is None else NUMBER_NBYTES)
        header_nbytes += 0 if version is None else 2 * NUMBER_NBYTES
        message = Framed(Post("data", step, push_weight, version), x)
        self.last_sent = step
        share, members = 0.0, await self.node.members()
        for rank, weight in self.targets(step).items():
            if rank in members:  # else the message would be lost
                share += weight
                await self.node.send_framed(rank, ROUNDS, message, header_nbytes, LABEL)
        return share

    async def receive(self, step: int) -> list[Heard]:
        """What the neighbours that are there said in this round, by rank."""
        heard = []
        for rank, weight in self.sources(step).items():
            message = await self._read(rank, step)
            if message is not None:
                assert message.data is not None
                header = message.header
                heard.append(Heard(rank, weight, message.data, header.weight, header.version))
        return heard

    async def combined(self, own: Tensor, heard: Sequence[Heard]) -> Tensor:
        """sum_j W_ij x_j, where the weights of those that were not heard are one's own."""
        if not heard:
            return own
        weights = tuple(one.weight for one in heard)
        return await self.node.call(weighted_sum, own, tuple(one.x for one in heard), weights)

    async def weighted(self, x: Tensor, step: int) -> Tensor:
        """sum_j W_ij x_j: one whole round."""
        await self.send(x, step)
        return await self.combined(x, await self.receive(step))

    async def miss(self, step: int) -> None:
        """Tells the neighbours that the round that ends with this step began without this one.

        Their rounds may have begun in another segment of the run, and not know it any more.
        """
        message, members = Framed(Post("missed", step)), await self.node.members()
        for rank in self._others:
            if rank in members:
                await self.node.send_framed(rank, ROUNDS, message, HEADER_NBYTES, LABEL)

    async def introduce(self, x: Tensor, version: tuple[float, int], step: int) -> None:
        """Tells those that are new to this one what its messages will be changes of."""
        for rank in sorted(self._to_introduce & self.targets(step).keys()):
            self._to_introduce.discard(rank)
            message = Framed(Post("introduction", step, version=version), x)
            nbytes = HEADER_NBYTES + 2 * NUMBER_NBYTES
            await self.node.send_framed(rank, ROUNDS, message, nbytes, LABEL)

    async def ask_who(self, rank: int) -> None:
        """Asks a neighbour to introduce itself, in its next round."""
        await self.node.send_framed(rank, HELLO, Framed(Stranger()), HEADER_NBYTES, LABEL)

    async def _read(self, rank: int, step: int) -> Framed | None:
        """The neighbour's message of this round; None if it is not there."""
        ahead = self._ahead[rank]
        while True:
            if ahead:
                message = ahead.popleft()
            else:
                try:
                    message = await self._next(rank)
                except PeerLost:
                    self._since[rank] = math.inf
                    return None
            header = message.header
            if isinstance(header, Back):
                if self._flushed.get(rank) == header.life:
                    del self._flushed[rank]
            elif rank not in self._flushed and header.step >= step:
                if header.step > step:  # it was not in this round
                    ahead.appendleft(message)
                    return None
                if header.kind == "data":
                    return message
                if header.kind == "introduction":
                    self.introduced[rank] = header.version, message.data
            if self._since.get(rank, 0) > step:  # it came back meanwhile
                return None

    async def _next(self, rank: int) -> Framed:
        message = await self.node.recv(rank, ROUNDS)
        assert isinstance(message, Framed)
        return message

    # Payloads.

    def is_exact(self, step: int) -> bool:
        """Whether nothing is lost in compression: then vectors are sent as they are."""
        return is_lossless(self.codec(step))

    async def encoded(
        self, x: Tensor, exchange: tuple[State, ...], step: int
    ) -> tuple[Tensor, tuple[State, ...]]:
        """A packed payload of x, and what compression keeps."""
        (state,) = exchange
        key = self._key_of(self.rank, step)
        codec = self.codec(step)
        payload, inner = await self.node.call(codec.encode, x, state["codec"], key)
        return payload.buffer, ({**state, "codec": inner},)

    async def decoded(self, heard: Sequence[Heard], replica: Replica, step: int) -> list[Heard]:
        """What the neighbours said, in place of its payloads."""
        return [one._replace(x=await self.decode(one.rank, one.x, replica, step)) for one in heard]

    async def decode(self, rank: int, buffer: Tensor, replica: Replica, step: int) -> Tensor:
        """What everyone hears who gets this payload, a vector like the parameters."""
        (state,) = replica.exchange
        spec = replace(Spec.of(replica.params), tensors=state.get("tensors", ()))
        key = self._key_of(rank, step)
        return await self.node.share(_decode, self.codec(step), spec, key, buffer)

    def _key_of(self, rank: int, step: int) -> Key:
        return self.key.at(step).private(rank).child("gossip")

    # Newcomers.

    async def _porter(self) -> None:
        while True:
            rank, message = await self.node.recv_any(HELLO)
            if isinstance(message.header, Stranger):
                self._to_introduce.add(rank)
            else:
                await self._greet(rank, message.header)

    async def _greet(self, rank: int, hello: Hello) -> None:
        if hello.sent_s < self.life:
            return  # said to this worker in a life before
        self.met(rank, hello.life)
        if self._greeted is not None:  # it waits for answers itself
            if hello.life > self._greeted.get(rank, math.inf):
                del self._greeted[rank]  # it has come since, and what it was told is lost
            if hello.again or (rank in self._greeted and rank < self.rank):
                await self._answer(rank, Welcome(hello.life, None), None)
            else:
                self._deferred.append((rank, hello))
            return
        self._flushed[rank] = hello.life
        self._ahead[rank].clear()
        self._since[rank] = self.next
        self._to_introduce.add(rank)
        if hello.wants_answer:
            model = self.model if hello.wants_model else None
            await self._answer(rank, Welcome(hello.life, self.next), model)

    async def _answer(self, rank: int, welcome: Welcome, model: Tensor | None) -> None:
        nbytes = HEADER_NBYTES + NUMBER_NBYTES
        await self.node.send_framed(rank, WELCOME, Framed(welcome, model), nbytes, LABEL)

    async def rejoin(self, model: Tensor, *, in_rounds: bool) -> tuple[Tensor, int]:
        """Says hello; returns a model of a worker that is there, and the step to start with.

        Without rounds only the one that is asked for its model must answer. If nobody is there,
        it starts with the model it has, from the beginning.
        """
        node = self.node
        self.life = await node.now()
        members = await node.members() - {self.rank}
        near = [rank for rank in self._others if rank in members]
        far = [rank for rank in sorted(members) if rank not in near]
        self._since = dict.fromkeys(self._others, math.inf)
        asked = [*near, *far][:1]
        waits = set(near) | set(asked) if in_rounds else set(asked)
        self._greeted = dict.fromkeys(waits, self.life)
        self._has_porter = True
        await node.spawn(self._porter())
        found: Tensor | None = None
        steps: dict[int, int] = {}
        for rank in {*near, *asked}:
            await self._hello(rank, rank in waits, rank in asked)
        for rank in sorted(waits):
            found = await self._welcome(rank, steps, found)
        for rank in [*near, *far]:  # the one that was asked is lost, or new itself
            if found is not None:
                break
            is_new = any(rank == other for other, _ in self._deferred)
            if not is_new and (rank in steps or rank not in waits):
                self._greeted[rank] = await node.now()
                await self._hello(rank, True, True, again=True)
                found = await self._welcome(rank, steps, found)
        first = min((steps[rank] for rank in steps), default=0)
        if in_rounds:
            near_steps = {rank: step for rank, step in steps.items() if rank in self._others}
            self._since.update(near_steps)
        else:
            self._since = {}
        self.is_new = True
        self.model, self.next = model if found is None else found, first
        self._to_introduce = set(self._others)
        self._greeted = None
        for rank, hello in self._deferred:
            await self._greet(rank, hello)
        self._deferred.clear()
        return self.model, first

    async def _hello(
        self, rank: int, wants_answer: bool, wants_model: bool, again: bool = False
    ) -> None:
        now = await self.node.now()
        hello = Framed(Hello(self.life, now, wants_answer, wants_model, again))
        back = Framed(Back(self.life))
        nbytes = HEADER_NBYTES + NUMBER_NBYTES
        await self.node.send_framed(rank, HELLO, hello, nbytes + NUMBER_NBYTES, LABEL)
        # Whoever waits for a message of the life before shall not do so for ever.
        for tag in (ROUNDS, WELCOME, ANSWER):
            await self.node.send_framed(rank, tag, back, nbytes, LABEL)

    async def _welcome(
        self, rank: int, steps: dict[int, int], found: Tensor | None
    ) -> Tensor | None:
        """Waits for an answer; the model, if there is one in it."""
        assert self._greeted is not None
        message: Framed | None = None
        while message is None and rank in self._greeted:
            try:
                answer = await self.node.recv(rank, WELCOME)
            except PeerLost:
                self._greeted.pop(rank, None)
                break
            assert isinstance(answer, Framed)
            # Else it is for the life before, or says that it is back: then see whom it greeted.
            if isinstance(answer.header, Welcome) and answer.header.life == self.life:
                message = answer
        if message is None:
            steps.pop(rank, None)
            return found
        if message.header.step is not None:
            steps[rank] = message.header.step
        return found if message.data is None else message.data


def weighted_sum(own: Tensor, others: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """The others with their weights, and oneself with what is missing to one."""
    total = own.float() if is_half(own) else own
    total = total * (1 - math.fsum(weights))
    for other, weight in zip(others, weights):
        total.add_(other, alpha=weight)
    return total.to(own.dtype)


def is_lossless(codec: Codec) -> bool:
    return codec.guarantee(Spec((1 << 10,), torch.float32)).delta == 1.0


def _decode(codec: Codec, spec: Spec, key: Key, buffer: Tensor) -> Tensor:
    return codec.decode(codec.unpack(buffer, spec), spec, key)
