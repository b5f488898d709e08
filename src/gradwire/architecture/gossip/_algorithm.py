"""Base of the gossip algorithms: each turns the walk of a worker into a round of averaging.

All update rules are written with the walk u_t in place of -lr * g_t: the change of the parameters
by the local optimizer since the round began. For SGD and rounds of one step it is -lr * g_t, as in
the papers; momentum, Adam and several local steps work likewise.
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

    # Its use of lossy codecs: it refuses them ("refuses"), it sends compressed models, which does
    # not converge ("naively"), or it follows the rule of its paper ("by rule").
    compresses: ClassVar[Literal["refuses", "naively", "by rule"]] = "refuses"
    # The property of the codec that this rule needs to converge.
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
        """The memory of a worker that joins at the time `life` with this model."""
        return self.memory(params)

    def counts(self, memories: Sequence[Mapping[str, Tensor]]) -> dict[str, Counts]:
        """Figures for the report that workers keep in their memories, by name."""
        return {}

    def owed(self, replica: Replica) -> Tensor | None:
        """The part of the model not sent to neighbours yet, for algorithms that send changes."""
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
        # The received model takes the place of the initial one, also for the synchronization.
        memory = {
            name: model if value is replica.params else value
            for name, value in replica.memory.items()
        }
        memory |= self.memory_of_newcomer(model, neighbours.presence.life)
        return replica.having(params=model, memory=memory), first
