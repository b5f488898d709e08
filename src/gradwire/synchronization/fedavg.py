"""Federated averaging (McMahan et al. 2017, "Communication-efficient learning of deep networks from
decentralized data", Alg. 1).

In every round m = max(1, round(fraction * n)) clients are drawn. Each gets the model x, takes E
epochs of SGD on its own n_k examples, and sends its walk x_k - x:

    x <- x + sum_k (n_k / sum_j n_j) (x_k - x)        over the clients k of the round

The others send and receive nothing. Momentum restarts in every round; a client continues its pass
over its data where it stopped.

A round takes R steps of the run, as many as E epochs of an average client have mini-batches; the
K_k mini-batches of client k are spread evenly over them. The last step of a run ends its round. An
epoch has floor(n_k / B) mini-batches of B examples and at least one, as a run's epochs do (in the
paper ceil(n_k / B), the last one being smaller).

With servers (`parameter_server`) they hold the model: clients pull it and push their walks. On the
simulator, the walk of a lost client is left out, and the others are weighted among themselves; a
client that rejoins takes part from the next round on, with the mini-batches that it would have
reached without the loss. On real processes clients pause together, so the loss of one stops the
run, which can be resumed from a checkpoint. A walk that is not finite ends a run, or counts as zero
with nonfinite="skip". With a collective mean (`allreduce`) the clients of a round average among
themselves, and a client that was not in the last round gets the model from one that was; there
"skip" drops the walks of all clients.

Use it where clients have much data of their own and a slow link to the server: `fedavg(0.1)`.
Clients with unlike data drift apart in long rounds; take fewer epochs there.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.core.epochs import steps_of_epochs, steps_per_epoch
from gradwire.core.errors import WireError
from gradwire.core.key import Key
from gradwire.core.protocols import (
    Ability,
    Joined,
    Left,
    Pull,
    Pulled,
    Push,
    Replica,
    Server,
    Synchronization,
    Worker,
)
from gradwire.core.ramp import ramps


@dataclass(frozen=True, repr=False)
class FedAvg(Synchronization):
    """A fraction of the clients trains for some epochs; the server averages by data size."""

    fraction: float
    epochs: float = 1.0

    examples = ("fedavg(0.5)", "fedavg(1.0, epochs=2.0)")
    exchanges = "walks"
    paper = (
        "McMahan et al. 2017, Communication-efficient learning of deep networks from decentralized "
        "data"
    )

    def __post_init__(self) -> None:
        if not 0 < self.fraction <= 1:
            raise ValueError(f"fedavg: fraction must be in (0, 1], got {self.fraction}")
        if not 0 < self.epochs < float("inf"):
            raise ValueError(f"fedavg: epochs must be above 0, got {self.epochs}")

    @property
    def needs(self) -> tuple[Ability, ...]:
        return ("push_pull", "mean")

    def check(self, num_workers: int, num_buckets: int) -> None:
        if ramps(self):
            raise ValueError(
                f"{self!r}: all must agree on where rounds begin, so its numbers cannot change. "
                "Write constants."
            )

    def memory(self, params: Tensor) -> dict[str, Tensor]:
        return {
            "anchor": params,  # the newest model it got
            "round": torch.tensor(-1),  # after which that was the model
            "batches": torch.tensor(0),  # seen so far
        }

    def agreed(self, replica: Replica) -> Tensor:
        return replica.memory["anchor"]

    def newest(self, replicas: Sequence[Replica]) -> Replica:
        return max(replicas, key=lambda replica: int(replica.memory["round"]))

    async def step(self, worker: Worker, replica: Replica, step: int) -> Replica:
        span = self._span(worker.num_examples, worker.batch_size)
        number, place = divmod(step, span)
        clients = self._clients(worker.key, worker.size, number)
        if place == 0 and worker.ability == "mean":
            replica = await self._hand_over(worker, replica, number)
        if worker.rank not in clients:
            return replica
        if place == 0:
            replica = await self._begin(worker, replica, step)
        replica = await self._walk(worker, replica, step, place, span)
        if place + 1 < span and step + 1 < worker.num_steps:
            return replica
        anchor = replica.memory["anchor"]
        walk = await worker.node.call(torch.sub, replica.params, anchor)
        if worker.ability == "push_pull":
            return await worker.push(walk, replica, step)
        weight = _weights(worker.num_examples, clients)[worker.rank]
        walk = await worker.node.call(_scale, walk, weight)
        mean, replica = await worker.mean(walk, replica, step, members=clients)
        # The walk was dropped: all return to the anchor.
        params = anchor if mean is None else await worker.node.share(torch.add, anchor, mean)
        return replica.having(params=params).remembering(anchor=params, round=torch.tensor(number))

    async def _begin(self, worker: Worker, replica: Replica, step: int) -> Replica:
        """At the beginning of a round: the newest model, and no momentum."""
        if worker.ability == "push_pull":
            replica = (await worker.pull(replica, step)).replica
            replica = replica.remembering(anchor=replica.params)
        fresh = {name: torch.zeros_like(value) for name, value in replica.optimizer.items()}
        return replica.having(params=replica.memory["anchor"], optimizer=fresh)

    async def _walk(
        self, worker: Worker, replica: Replica, step: int, place: int, span: int
    ) -> Replica:
        """This client's mini-batches in one of the steps of a round."""
        num_batches = self._num_batches(worker.num_examples[worker.rank], worker.batch_size)
        for _ in range(place * num_batches // span, (place + 1) * num_batches // span):
            count = int(replica.memory["batches"])
            gradient, replica = await worker.gradient(replica, count)
            if gradient is not None:
                replica = await worker.update(replica, gradient, step, shared=False)
            replica = replica.remembering(batches=torch.tensor(count + 1))
        return replica

    async def _hand_over(self, worker: Worker, replica: Replica, number: int) -> Replica:
        """Clients of the last round send the model to those of this round that lack it."""
        if number == 0:
            return replica
        had = self._clients(worker.key, worker.size, number - 1)
        new = [rank for rank in self._clients(worker.key, worker.size, number) if rank not in had]
        holders = {rank: had[i % len(had)] for i, rank in enumerate(new)}
        anchor = await worker.fetch(replica.memory["anchor"], holders, "model")
        if worker.rank not in holders:
            return replica
        return replica.remembering(anchor=anchor, round=torch.tensor(number - 1))

    async def resume(self, worker: Worker, pulled: Pulled) -> tuple[Replica, int]:
        # Servers may be in different rounds. Each waits for this client from its next round on;
        # this pull tells servers that are behind the later round at which the client begins.
        first = pulled.latest
        replica = (await worker.pull(pulled.replica, first)).replica
        span = self._span(worker.num_examples, worker.batch_size)
        num_rounds = sum(
            worker.rank in self._clients(worker.key, worker.size, number)
            for number in range(first // span)
        )
        num_batches = self._num_batches(worker.num_examples[worker.rank], worker.batch_size)
        batches = torch.tensor(num_rounds * num_batches)
        return replica.remembering(anchor=replica.params, batches=batches), first

    async def serve(self, server: Server) -> None:
        memory = server.memory
        memory.setdefault("round", 0)
        pushes: dict[int, Tensor] = memory.setdefault("pushes", {})
        waiting: dict[int, int] = memory.setdefault("waiting", {})  # rank -> step of its pull
        begins: dict[int, int] = memory.setdefault(
            "begins", {}
        )  # the first round of each late joiner
        joining: dict[int, int] = memory.setdefault("joining", {})  # the same, not yet agreed on
        span = self._span(server.num_examples, server.batch_size)
        while True:
            match await server.event():
                case Push(rank=rank, step=step, x=x):
                    clients = self._clients(server.key, server.num_workers, memory["round"])
                    if step // span != memory["round"] or rank not in clients or rank in pushes:
                        raise WireError(
                            f"rank {rank} pushed its walk of round {step // span}, but round "
                            f"{memory['round']} is collected, of the clients {clients}, with "
                            f"walks of {sorted(pushes)}"
                        )
                    pushes[rank] = x
                case Pull(rank=rank, step=step) if step < 0:  # it joins
                    begins[rank] = joining[rank] = memory["round"] + 1
                    await server.answer(rank, begins[rank] * span)
                case Pull(rank=rank, step=step) if rank in joining:  # it reports its first round
                    begins[rank] = max(joining.pop(rank), step // span)
                    await server.answer(rank, step)
                case Pull(rank=rank, step=step):
                    waiting[rank] = step
                case Joined(rank=rank):
                    begins[rank] = memory["round"] + 1
                case Left(rank=rank):
                    waiting.pop(rank, None)
                    joining.pop(rank, None)
            while server.members:
                clients = self._clients(server.key, server.num_workers, memory["round"])
                there = [r for r in clients if r in server.members]
                due = [r for r in there if begins.get(r, 0) <= memory["round"]]
                if any(rank not in pushes for rank in due):
                    break
                await self._finish_round(server, pushes)
                memory["round"] += 1
                pushes.clear()
            for rank, step in list(waiting.items()):
                if step // span <= memory["round"]:
                    del waiting[rank]
                    await server.answer(rank, step)

    async def _finish_round(self, server: Server, pushes: Mapping[int, Tensor]) -> None:
        if not pushes:  # all of its clients were lost
            return
        ranks = sorted(pushes)
        weights = _weights(server.num_examples, ranks)
        walks = [await server.call(_scale, pushes[rank], weights[rank]) for rank in ranks]
        server.params = await server.call(torch.add, server.params, await server.mean(walks))

    def _clients(self, key: Key, num_workers: int, number: int) -> list[int]:
        """The clients of a round, in order; all ranks draw the same."""
        count = max(1, round(self.fraction * num_workers))
        drawn = key.child("fedavg").at(number).permutation(num_workers)[:count]
        return sorted(drawn.tolist())

    def _num_batches(self, num_examples: float, batch_size: int) -> int:
        return steps_of_epochs(self.epochs, steps_per_epoch(num_examples, batch_size))

    def _span(self, num_examples: Sequence[int], batch_size: int) -> int:
        """How many steps a round takes."""
        return self._num_batches(sum(num_examples) / len(num_examples), batch_size)


def _weights(num_examples: Sequence[int], clients: Sequence[int]) -> dict[int, float]:
    """By how much to multiply each walk so that the mean of all is weighted by data size."""
    total = sum(num_examples[rank] for rank in clients)
    return {rank: len(clients) * num_examples[rank] / total for rank in clients}


def _scale(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1.0 else x * factor
