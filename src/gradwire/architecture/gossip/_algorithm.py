"""What the gossip algorithms share: how each of them turns a walk into a round.

All update rules are written with the walk u_t in the place of -lr * g_t: what the local optimizer
added to the parameters since the round began. For SGD and rounds of one step it is -lr * g_t, as
in the papers; momentum, Adam and several local steps work likewise.
"""

from abc import ABC
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

from torch import Tensor

from gradwire.core.notation import Expression
from gradwire.core.protocols import Counts, Replica, Worker

if TYPE_CHECKING:
    from gradwire.architecture.gossip._neighbours import Neighbours


class GossipAlgorithm(Expression, ABC):
    """How neighbours average. Hyper-parameters only; state lies in the memory of replicas."""

    # What it does with a codec that loses something: nothing ("refuses"), the obvious that does not
    # converge ("naively"), or what its paper proves ("by rule").
    compresses: ClassVar[Literal["refuses", "naively", "by rule"]] = "refuses"
    # What the codec must be for that rule to converge.
    needs_codec: ClassVar[Literal["unbiased", "contraction", ""]] = ""
    # Why the graph must not vary, and why weights must be symmetric; empty if they may be anything.
    needs_constant: ClassVar[str] = ""
    needs_symmetric: ClassVar[str] = ""
    # Whether it needs columns of sum one only, not rows.
    pushes: ClassVar[bool] = False
    # Whether it has no rounds: `step` in the place of `before` and `after`.
    asynchronous: ClassVar[bool] = False

    def check(self, matrix: Tensor, what: str) -> None:
        """Refuses a mixing matrix that it does not converge with."""

    def memory(self, params: Tensor) -> dict[str, Tensor]:
        """What it keeps with each replica, given the model that all start from."""
        return {}

    def memory_of_newcomer(self, params: Tensor, life: float) -> dict[str, Tensor]:
        """What one keeps that comes (back) at the time `life` and has got this model."""
        return self.memory(params)

    def counts(self, memories: Sequence[Mapping[str, Tensor]]) -> dict[str, Counts]:
        """Figures for the report that workers keep in their memories, by name."""
        return {}

    def owed(self, replica: Replica) -> Tensor | None:
        """What of the model has not been sent to neighbours yet, where changes travel."""
        return None

    async def before(self, neighbours: "Neighbours", replica: Replica, step: int) -> Replica:
        """At the start of the round number `step`, before its first gradient."""
        return replica

    async def after(
        self, neighbours: "Neighbours", replica: Replica, walk: Tensor, step: int
    ) -> Replica:
        """At its end. `replica` is as `before` left it; `step` is the number of the round."""
        raise NotImplementedError(f"{self!r} has no rounds")

    async def step(
        self, neighbours: "Neighbours", worker: Worker, replica: Replica, step: int
    ) -> Replica:
        """One training step, for asynchronous ones."""
        raise NotImplementedError(f"{self!r} works in rounds")

    async def rejoin(self, neighbours: "Neighbours", replica: Replica) -> tuple[Replica, int]:
        """Takes a neighbour's model; nothing else is known of the time before."""
        model, first = await neighbours.presence.rejoin(
            replica.params, in_rounds=not self.asynchronous
        )
        # What was the initial model is the current one, also for the synchronization.
        memory = {
            name: model if value is replica.params else value
            for name, value in replica.memory.items()
        }
        memory |= self.memory_of_newcomer(model, neighbours.presence.life)
        return replica.having(params=model, memory=memory), first
