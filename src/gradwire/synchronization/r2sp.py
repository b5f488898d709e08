"""Round-robin synchronous parallel SGD (Chen, Wang and Li 2019, "Round-robin synchronization:
mitigating communication bottlenecks in parameter servers").

Servers take the gradients of the workers in a fixed order, one worker after the other, each as a
step of its own:  x <- x - lr * G_i(x'),  and worker i continues with the model right after its own
step. A gradient that arrives before its turn waits. So every gradient has the same staleness, n - 1
steps of the others, and the exchanges with the servers are staggered: where bsp's pushes and pulls
all meet at a server's network card, here one follows another.

Where we differ: the paper spreads the turns evenly over an iteration and, where workers differ in
speed, gives them mini-batches in proportion. Here all workers set out together and the first round
sets them apart by the time of one exchange, which is what it takes for exchanges not to collide;
mini-batches are of equal size.

A lost worker is removed from the order after its waiting gradient, if any, was applied; a worker
that rejoins gets its old place.

Use it where servers are the bottleneck and workers equally fast: one slow worker holds up all.
"""

from dataclasses import dataclass

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


@dataclass(frozen=True, repr=False)
class R2SP(Pushing):
    """Servers take gradients from one worker after the other, in a fixed order."""

    paper = (
        "Chen, Wang and Li 2019, Round-robin synchronization: mitigating communication bottlenecks "
        "in parameter servers"
    )

    async def serve(self, server: Server) -> None:
        order = _TurnOrder(server)
        while True:
            match await server.event():
                case Push() as push if push.step < order.due(push.rank):
                    # It rejoined, and other servers are behind this one.
                    await order.take(push)
                case Push() as push:
                    order.wait(push)
                case Pull(rank=rank):  # it joins
                    order.saw(rank)
                    await server.answer(rank, order.due(rank))
                case Left(rank=rank) if rank in order.waiting:
                    await order.take_waiting(rank)
                case Left() | Joined():
                    pass
            await order.advance()


class _TurnOrder:
    """Whose turn it is; kept in the server's memory."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.memory = server.memory
        self.memory.setdefault("turn", 0)  # turns so far, of all workers that there might be
        self.memory.setdefault("updates", 0)
        # The updates in what each worker has.
        self.seen: dict[int, int] = self.memory.setdefault("seen", {})
        # Pushes before their turn, by rank: step, gradient, and whether it wants an answer.
        self.waiting: dict[int, tuple[int, Tensor, bool]] = self.memory.setdefault("waiting", {})

    def due(self, rank: int) -> int:
        """The step that this worker's next turn is for."""
        number, place = divmod(self.memory["turn"], self.server.num_workers)
        return int(number) + (rank < place)

    def saw(self, rank: int) -> None:
        self.seen[rank] = self.memory["updates"]

    def wait(self, push: Push) -> None:
        if push.step != self.due(push.rank) or push.rank in self.waiting:
            raise WireError(
                f"rank {push.rank} pushed step {push.step}, but is due for {self.due(push.rank)}"
            )
        self.waiting[push.rank] = (push.step, push.x, push.wants_answer)

    async def take_waiting(self, rank: int) -> None:
        await self.take(Push(rank, *self.waiting.pop(rank)))

    async def take(self, push: Push) -> None:
        server, rank = self.server, push.rank
        server.note("staleness", self.memory["updates"] - self.seen.get(rank, 0))
        await server.update(push.x, push.step)
        self.memory["updates"] += 1
        self.saw(rank)
        if rank in server.members:
            await server.answer(rank, push.step + 1)

    async def advance(self) -> None:
        """Takes what waits, as far as it is its turn."""
        server = self.server
        while server.members:
            rank = self.memory["turn"] % server.num_workers
            if rank in self.waiting:
                await self.take_waiting(rank)
            elif rank in server.members:
                return
            self.memory["turn"] += 1
