"""Membership among neighbours: which are present from which round on, and how a worker joins.

A worker that joins, for the first time or again, sends a notice to its neighbours. A program beside
the training answers at once with the first round that has not begun. From that round on both sides
expect each other's messages, so no worker waits for a message that will not come. A worker
continues to answer after its last step. If two workers join at the same time, the earlier one (of
equal times the lower rank) answers when it has received its own answers. Messages of a worker's
earlier incarnation are dropped: `NewIncarnation` is the first message of a new one on each link.
"""

import math
from collections.abc import Sequence

from torch import Tensor

from gradwire.architecture.gossip._posts import (
    ANSWER,
    HEADER_NBYTES,
    INITIAL,
    JOIN,
    JOIN_ANSWER,
    LABEL,
    NUMBER_NBYTES,
    ROUNDS,
    JoinAnswer,
    JoinNotice,
    NewIncarnation,
    UnknownVersion,
)
from gradwire.core.codec import is_finite
from gradwire.core.errors import NonFiniteError, PeerLost
from gradwire.core.node import Framed, Node


class NeighbourPresence:
    """Membership as one worker knows it, and how it announces itself to the others."""

    def __init__(self, node: Node, others: Sequence[int]) -> None:
        self.node = node
        self.others = tuple(others)  # the ranks that are neighbours in some round
        self.admits_newcomers = True  # whether `attend` starts to answer notices
        self.model: Tensor | None = None  # the model that joining workers receive
        self.next = 0  # the first round that has not begun
        self.life = INITIAL
        self.is_new = False  # whether it joined and has not been in a round since
        self.strangers: set[int] = set()  # neighbours without the version that changes refer to
        self._since: dict[int, float] = {}  # the first round with a neighbour; infinity: lost
        self._lives: dict[int, float] = {}
        self._stale: dict[int, float] = {}  # messages are dropped until this incarnation begins
        self._answers_notices = False
        # The neighbours whose answers it waits for, with the time of its notice; None if it does
        # not wait.
        self._awaited: dict[int, float] | None = None
        self._deferred: list[tuple[int, JoinNotice]] = []

    async def attend(self, model: Tensor, step: int) -> None:
        """Training has reached this step: joining workers can take part from the next round on."""
        self.model, self.next = model, step + 1
        if self.admits_newcomers and not self._answers_notices:
            self._answers_notices = True
            await self.node.spawn(self._answer_notices())
            # Pending notices must be handled before the `NewIncarnation` that belongs to each is
            # read.
            await self.node.sleep(0.0)

    def has(self, rank: int, step: int) -> bool:
        """Whether a neighbour takes part in a round."""
        return self._since.get(rank, 0) <= step

    def lose(self, rank: int) -> None:
        self._since[rank] = math.inf

    def is_stale(self, rank: int) -> bool:
        """Whether messages of a neighbour still come from its earlier incarnation."""
        return rank in self._stale

    def is_back(self, rank: int, life: float) -> None:
        """The messages that follow are of this incarnation."""
        if self._stale.get(rank) == life:
            del self._stale[rank]

    def life_of(self, rank: int) -> float:
        return self._lives.get(rank, INITIAL)

    def record_incarnation(self, rank: int, life: float) -> None:
        """Records the incarnation that a message names."""
        self._lives[rank] = max(life, self.life_of(rank))

    async def _answer_notices(self) -> None:
        while True:
            rank, message = await self.node.recv_any(JOIN)
            if isinstance(message.header, UnknownVersion):
                self.strangers.add(rank)
            else:
                await self._handle_notice(rank, message.header)

    async def _handle_notice(self, rank: int, notice: JoinNotice) -> None:
        if notice.sent_s < self.life:
            return  # meant for an earlier incarnation of this worker
        self.record_incarnation(rank, notice.life)
        if self._awaited is not None:  # this worker is joining, too
            if notice.life > self._awaited.get(rank, math.inf):
                del self._awaited[rank]  # the neighbour rejoined since, and its answer is lost
            if notice.again or (rank in self._awaited and rank < self.node.rank):
                await self._answer(rank, JoinAnswer(notice.life, None), None)
            else:
                self._deferred.append((rank, notice))
            return
        self._stale[rank] = notice.life
        self._since[rank] = self.next
        self.strangers.add(rank)
        if notice.wants_answer:
            model = self.model if notice.wants_model else None
            await self._answer(rank, JoinAnswer(notice.life, self.next), model)

    async def _answer(self, rank: int, answer_header: JoinAnswer, model: Tensor | None) -> None:
        nbytes = HEADER_NBYTES + NUMBER_NBYTES
        await self.node.send_framed(rank, JOIN_ANSWER, Framed(answer_header, model), nbytes, LABEL)

    async def rejoin(self, model: Tensor, *, in_rounds: bool) -> tuple[Tensor, int]:
        """Joins; returns the model of a present worker, and the step to start with.

        Without rounds only the worker that is asked for its model must answer. If no other worker
        is present, it starts with its own model, from the beginning.
        """
        node = self.node
        self.life = await node.now()
        members = await node.members() - {self.node.rank}
        near = [rank for rank in self.others if rank in members]
        far = [rank for rank in sorted(members) if rank not in near]
        self._since = dict.fromkeys(self.others, math.inf)
        asked = [*near, *far][:1]
        waits = set(near) | set(asked) if in_rounds else set(asked)
        self._awaited = dict.fromkeys(waits, self.life)
        self._answers_notices = True
        await node.spawn(self._answer_notices())
        found: Tensor | None = None
        steps: dict[int, int] = {}
        for rank in sorted({*near, *asked}):
            await self._send_notice(rank, rank in waits, rank in asked)
        for rank in sorted(waits):
            found = await self._receive_answer(rank, steps, found)
        for rank in [*near, *far]:  # the worker that was asked is lost, or joining itself
            if found is not None:
                break
            is_new = any(rank == other for other, _ in self._deferred)
            if not is_new and (rank in steps or rank not in waits):
                self._awaited.setdefault(rank, self.life)
                await self._send_notice(rank, True, True, again=True)
                found = await self._receive_answer(rank, steps, found)
        first = min((steps[rank] for rank in steps), default=0)
        if in_rounds:
            near_steps = {rank: step for rank, step in steps.items() if rank in self.others}
            self._since.update(near_steps)
        else:
            self._since = {}
        self.is_new = True
        self.model, self.next = model if found is None else found, first
        self.strangers = set(self.others)
        self._awaited = None
        for rank, notice in self._deferred:
            await self._handle_notice(rank, notice)
        self._deferred.clear()
        return self.model, first

    async def _send_notice(
        self, rank: int, wants_answer: bool, wants_model: bool, again: bool = False
    ) -> None:
        now = await self.node.now()
        notice = Framed(JoinNotice(self.life, now, wants_answer, wants_model, again))
        back = Framed(NewIncarnation(self.life))
        nbytes = HEADER_NBYTES + NUMBER_NBYTES
        await self.node.send_framed(rank, JOIN, notice, nbytes + NUMBER_NBYTES, LABEL)
        # Neighbours that wait for a message of the former incarnation must not wait forever.
        for tag in (ROUNDS, JOIN_ANSWER, ANSWER):
            await self.node.send_framed(rank, tag, back, nbytes, LABEL)

    async def _receive_answer(
        self, rank: int, steps: dict[int, int], found: Tensor | None
    ) -> Tensor | None:
        """Waits for an answer; returns its model, if it has one."""
        assert self._awaited is not None
        message: Framed | None = None
        while message is None and rank in self._awaited:
            try:
                answer = await self.node.recv(rank, JOIN_ANSWER)
            except PeerLost:
                self._awaited.pop(rank, None)
                break
            assert isinstance(answer, Framed)
            # Otherwise it is for an earlier incarnation, or a `NewIncarnation`: check `_awaited`
            # again.
            if isinstance(answer.header, JoinAnswer) and answer.header.life == self.life:
                message = answer
        if message is None:
            steps.pop(rank, None)
            return found
        if message.header.step is None:
            steps.pop(rank, None)
        else:
            steps[rank] = message.header.step
        if message.data is None:
            return found
        if not is_finite(message.data):
            raise nonfinite_error(rank)
        return message.data


def nonfinite_error(rank: int) -> NonFiniteError:
    """The error for NaN or infinity in a neighbour's message."""
    return NonFiniteError(
        f"rank {rank} sent NaN or infinity. Lower the learning rate or set clip_norm."
    )
