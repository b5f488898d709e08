"""Local SGD (Stich 2019, "Local SGD converges fast and communicates little", Alg. 1).

Every worker takes `period` optimizer steps of its own, then all replace their models by the
average. Workers send the change since the last agreement, so that compression works on small
numbers:  x_i <- a + mean_j C(x_j - a)  with a, the anchor, the model they last agreed on.

What becomes of the part of a worker's change that a lossy compression C does not send:
- "reset": it is lost, all workers begin the next round from the new anchor.
- "kept": it stays in the worker's own model, and so is in its next change, too:
  x_i <- x_i - C(x_i - a) + mean_j C(x_j - a);   a <- a + mean_j C(x_j - a). So x_i - a is what
  worker i has not sent. That is a feedback of its own: compression must have none.
With nothing lost both are the same.

What becomes of the momentum at the end of a round:
- "local": each worker keeps its own.
- "average": v_i <- mean_j v_j (Yu, Jin and Yang 2019, "On the linear speedup analysis of
  communication efficient momentum SGD", Alg. 1), not compressed: at least twice the bytes.
- "reset": v_i <- 0; nothing is sent for it.
With adam it is both moments that are averaged, or all of its state that begins anew.

Among neighbours (`gossip`) a round ends with an average of theirs, and momentum is local or reset.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gradwire.core.batched import elementwise
from gradwire.core.protocols import Ability, Replica, Synchronization, Worker
from gradwire.synchronization._rounds import mixed_step


@dataclass(frozen=True, repr=False)
class LocalSGD(Synchronization):
    """Take `period` steps alone, then average the models."""

    period: int
    momentum: Literal["local", "average", "reset"] = "local"  # at the end of a round
    unsent: Literal["reset", "kept"] = "reset"  # what compression leaves out of a change

    examples = (
        "localsgd(8)",
        'localsgd(8, momentum="average")',
        'localsgd(8, unsent="kept")',
    )
    short_examples = ("localsgd(4)",)
    exchanges = "walks"
    paper = "Stich 2019, Local SGD converges fast and communicates little"

    def __post_init__(self) -> None:
        if self.period < 1:
            raise ValueError(f"localsgd: period must be at least 1, got {self.period}")
        if self.momentum not in ("local", "average", "reset"):
            raise ValueError(
                f'localsgd: momentum is "local", "average" or "reset", got {self.momentum!r}'
            )
        if self.unsent not in ("reset", "kept"):
            raise ValueError(f'localsgd: unsent is "reset" or "kept", got {self.unsent!r}')

    @property
    def needs(self) -> tuple[Ability, ...]:
        # Neighbours have their own ways with what they do not send: dcd, choco.
        is_for_all = self.momentum == "average" or self.unsent == "kept"
        return ("mean",) if is_for_all else ("mean", "mix")

    @property
    def keeps_unsent(self) -> bool:
        return self.unsent == "kept"

    @property
    def rounds_are_steps(self) -> bool:
        return self.period == 1

    def memory(self, params: Tensor) -> dict[str, Tensor]:
        return {"anchor": params}  # the model all workers last agreed on

    def agreed(self, replica: Replica) -> Tensor:
        return replica.memory["anchor"]

    async def step(self, worker: Worker, replica: Replica, step: int) -> Replica:
        return await self.step_of_round(worker, replica, step, begin=0)

    async def step_of_round(
        self, worker: Worker, replica: Replica, step: int, begin: int
    ) -> Replica:
        """A step alone, and an agreement if `period` of them since `begin` make a round."""
        # The last step always ends in an agreement.
        ends = (step + 1 - begin) % self.period == 0 or step + 1 == worker.num_steps
        if worker.ability == "mix":
            return await self._mix(worker, replica, step, (step - begin) % self.period == 0, ends)
        gradient, replica = await worker.gradient(replica, step)
        if gradient is not None:
            replica = await worker.update(replica, gradient, step, shared=False)
        if not ends:
            return replica
        anchor = replica.memory["anchor"]
        walk, own = replica.params - anchor, None
        if self.unsent == "kept":
            mean, own, replica = await worker.mean_and_own(walk, replica, step)
        else:
            mean, replica = await worker.mean(walk, replica, step)
        if mean is None:
            return replica.having(params=anchor)  # the walk was dropped: all return to the anchor
        agreed = await worker.node.share(_add_walk, anchor, mean)
        params = agreed
        if own is not None:
            params = await worker.node.call(_add_unsent, agreed, walk, own)
        replica = replica.having(params=params).remembering(anchor=agreed)
        if self.momentum == "local":
            return replica
        return replica.having(optimizer=await self._average_momentum(worker, replica))

    async def _mix(
        self, worker: Worker, replica: Replica, step: int, begins: bool, ends: bool
    ) -> Replica:
        replica = await mixed_step(
            worker, replica, step, begins=begins, ends=ends, period=self.period
        )
        if not ends:
            return replica
        replica = replica.remembering(anchor=replica.params)
        if self.momentum == "local":
            return replica
        return replica.having(optimizer=await self._average_momentum(worker, replica))

    async def _average_momentum(self, worker: Worker, replica: Replica) -> dict[str, Tensor]:
        """The state of the optimizer with which all workers begin a round."""
        state = dict(replica.optimizer)
        if self.momentum == "reset":
            return await worker.node.call(_zeros, state)
        for name, vector in state.items():
            if vector.shape == replica.params.shape:  # not a count of steps, which all agree on
                state[name] = await worker.exact_mean(vector, name)
        return state


@elementwise
def _add_walk(anchor: Tensor, distance: Tensor) -> Tensor:
    return anchor + distance


@elementwise
def _add_unsent(agreed: Tensor, walk: Tensor, sent: Tensor) -> Tensor:
    # In this order it is `agreed`, bit for bit, where all of the walk was sent.
    return agreed + (walk - sent)


@elementwise
def _zeros(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.zeros_like(value) for name, value in state.items()}
