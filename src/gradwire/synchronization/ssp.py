"""Stale synchronous parallel SGD (Ho et al. 2013, "More effective distributed ML via a stale
synchronous parallel parameter server"; survey, eq. 6).

The clock of a worker is the number of gradients it has pushed. A worker at clock c may continue
when all clocks are at least c - s, so that the fastest is at most s ahead of the slowest. Its model
then has three parts (Ho et al. 2013, sec. 3, with s for the staleness):

    x_{i,c} = x_0 - lr/n sum_{k < c-s} sum_j G_{j,k}        of all workers: guaranteed
                  - lr/n sum_{c-s <= k < c} G_{i,k}         its own: it reads its writes
                  - lr/n sum_{(j,k) in S} G_{j,k}           of others, what happens to be there

The survey's eq. 6 counts one step less into the first part; then s = 0 would not be bsp, as it is
in the paper and here.

Where we differ. A push counts 1/n, as in bsp, where the paper adds up. A clock that all workers
have pushed is complete: its pushes are averaged in the order of the ranks and make one step of the
optimizer, whatever that is. So with s = 0 the result is that of bsp, bit for bit. Pushes of clocks
that are not complete are included in pulled models as plain steps, lr/n times the gradient, until
their clock is complete; momentum and Adam's scaling come then.

Where a push lets several workers continue, the slowest gets its answer first: the others wait for
it, and answers leave one after the other.

Each server has its own clock. The pushes of a lost worker remain: a clock is averaged over all
workers that pushed it. The others no longer wait for the lost one. A worker that rejoins starts at
the clock of the slowest.

Use it where workers are slow occasionally, not permanently: a small s hides the delays of single
steps (s = 1 .. 4), but in the long run all are as fast as the slowest.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gradwire.core.errors import WireError
from gradwire.core.protocols import (
    Joined,
    Left,
    Pull,
    Push,
    Server,
)
from gradwire.synchronization._pushing import Pushing

_MAX_REPEATS = 16  # pushes of one step by one worker, which came back in between


@dataclass(frozen=True, repr=False)
class SSP(Pushing):
    """Push a gradient, pull a model; the fastest waits if it is too far ahead of the slowest."""

    staleness: int

    examples = ("ssp(3)", "ssp(0)")
    short_examples = ("ssp(2)",)
    paper = (
        "Ho et al. 2013, More effective distributed ML via a stale synchronous parallel parameter "
        "server"
    )

    def __post_init__(self) -> None:
        if self.staleness < 0:
            raise ValueError(f"ssp: staleness must be at least 0, got {self.staleness}")

    async def serve(self, server: Server) -> None:
        window = _Window(server)
        while True:
            match await server.event():
                case Push() as push:
                    await window.add(push, self.staleness)
                case Pull(rank=rank, step=step):
                    if step >= 0:
                        raise WireError(f"rank {rank} pulls in step {step}, but did not come back")
                    await window.join(rank)
                    await server.answer(rank, window.clocks[rank], params=window.shown)
                case Joined(rank=rank):
                    await window.join(rank)
                case Left(rank=rank):
                    await window.leave(rank)
            await window.advance()
            for rank, clock in window.allowed(self.staleness):
                server.note("ahead", clock - window.slowest)
                await server.answer(rank, clock, params=window.shown)


class _Window:
    """The pushes that a server has and whose clocks are not complete; kept in its memory."""

    def __init__(self, server: Server) -> None:
        self.server = server
        memory = server.memory
        memory.setdefault("num_complete", 0)  # clocks; the model of the server has just these
        # Of each member: how many steps it has pushed.
        self.clocks: dict[int, int] = memory.setdefault("clocks", dict.fromkeys(server.members, 0))
        self.waiting: dict[int, int] = memory.setdefault("waiting", {})  # their clocks, in order
        # step -> {(rank, how many pushes of this step the rank had made before) -> gradient}
        self.pushes: dict[int, dict[tuple[int, int], Tensor]] = memory.setdefault("pushes", {})
        self.sums: dict[int, Tensor] = memory.setdefault("sums", {})  # of these, by step
        self.memory: dict[str, Any] = memory
        self.shown = memory.setdefault("shown", server.params)  # the model with all pushes

    @property
    def slowest(self) -> int:
        """The lowest clock."""
        return min(self.clocks.values(), default=self.memory["num_complete"])

    async def add(self, push: Push, staleness: int) -> None:
        server, (rank, step, x, _) = self.server, push
        if step < self.memory["num_complete"]:  # a worker that came back; servers differ
            clock = self.memory["num_complete"]
            await server.answer(rank, clock, accepted=False, params=self.shown)
            return
        if step != self.clocks[rank]:
            raise WireError(f"rank {rank} pushed step {step}, but is at {self.clocks[rank]}")
        if step > self.slowest + staleness:
            raise WireError(
                f"rank {rank} pushed step {step}, but the slowest worker is at {self.slowest} and "
                f"it may be {staleness} steps ahead"
            )
        # A worker that was lost and came back may push a step twice: both count.
        number = sum(other == rank for other, _ in self.pushes.get(step, ()))
        if number == _MAX_REPEATS:
            raise WireError(f"rank {rank} pushed step {step} {number} times, and comes back again")
        self.pushes.setdefault(step, {})[rank, number] = x
        total = self.sums.get(step)
        self.sums[step] = x if total is None else await server.call(_add_scaled, total, x, 1.0)
        self.clocks[rank] = self.waiting[rank] = step + 1
        if self.slowest <= self.memory["num_complete"]:  # otherwise it is recomputed anyway
            self._show(await server.call(_add_scaled, self.shown, x, self._share(step)))

    async def join(self, rank: int) -> None:
        self.clocks[rank] = self.memory["num_complete"]
        self.waiting.pop(rank, None)
        await self._show_all()

    async def leave(self, rank: int) -> None:
        self.clocks.pop(rank, None)
        self.waiting.pop(rank, None)
        await self._show_all()

    async def advance(self) -> None:
        """Completes the clocks that all members have pushed."""
        server, memory = self.server, self.memory
        before = memory["num_complete"]
        while self.slowest > memory["num_complete"]:
            step = memory["num_complete"]
            pushes = self.pushes.pop(step, {})
            self.sums.pop(step, None)
            if pushes:
                mean = await server.mean([pushes[number] for number in sorted(pushes)])
                await server.update(mean, step)
            memory["num_complete"] += 1
        if memory["num_complete"] > before:
            await self._show_all()

    def allowed(self, staleness: int) -> list[tuple[int, int]]:
        """Ranks and clocks of those that need not wait any longer, the slowest first.

        The others wait for the slowest, so it must not wait until they have their answers.
        """
        ready = [(r, c) for r, c in self.waiting.items() if self.slowest >= c - staleness]
        for rank, _ in ready:
            del self.waiting[rank]
        return sorted(ready, key=lambda one: one[1])

    def _share(self, step: int) -> float:
        """By how much a push of this step moves the model that is shown."""
        return -self.server.lr(step) / max(1, len(self.clocks))

    async def _show_all(self) -> None:
        shown = self.server.params
        for step, total in sorted(self.sums.items()):
            shown = await self.server.call(_add_scaled, shown, total, self._share(step))
        self._show(shown)

    def _show(self, shown: Tensor) -> None:
        self.shown = self.memory["shown"] = shown


def _add_scaled(x: Tensor, y: Tensor, factor: float) -> Tensor:
    return x.add(y, alpha=factor)
