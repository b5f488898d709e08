"""Gossip in a user's own loop: every rank averages with its neighbours on a graph.

    with gradwire.decentralized(model, optimizer, graph="ring", algorithm="choco(0.3)",
                                compression="topk(0.01)"):
        ...                     # optimizer.step() as ever

There is no common model: ranks have models of their own, which averages keep close. `consensus`
averages them exactly; so does the end of the context. The rounds are those of the simulator's
`gossip(graph, algorithm)`, with the parameters as one vector per dtype. Buffers stay local until a
consensus. The ranks are fixed: if one is lost, the others raise `PeerLost`. One that has fewer
steps to take serves the rounds of the others until the end (`leaving.py`).
"""

from collections.abc import Callable, Coroutine, Hashable, Mapping, Sequence
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from gradwire.architecture import ARCHITECTURE
from gradwire.architecture.allreduce.allreduce import AllReduce
from gradwire.architecture.gossip._mixing import GossipMixing
from gradwire.architecture.gossip.gossip import Gossip
from gradwire.core.codec import Compression
from gradwire.core.key import Key
from gradwire.core.lifted import lift
from gradwire.core.node import Framed, Node, Recv, Send
from gradwire.core.replica import Replica
from gradwire.integration.local_updates.context import (
    LocalUpdates,
    Saved,
    check_period,
    exact_averages,
)
from gradwire.integration.local_updates.leaving import Leaving, Left
from gradwire.integration.local_updates.saved import check_unchanged, rows_to_load
from gradwire.integration.settings import Settings

T = TypeVar("T")


class _LabelledNode(Node):
    """A node whose messages carry a label, so that several models can gossip side by side."""

    __slots__ = ("_label",)

    def __init__(self, node: Node, label: str) -> None:
        super().__init__(node.rank, node.size, node.native, node.is_alone)
        self._label = label

    def send_framed(
        self, dst: int, tag: Hashable, message: Framed, header_nbytes: int, label: str = ""
    ) -> Send:
        return super().send_framed(dst, (self._label, tag), message, header_nbytes, label)

    def recv(self, src: int, tag: Hashable) -> Recv:
        return super().recv(src, (self._label, tag))


class DecentralizedUpdates(LocalUpdates):
    """Averages with neighbours every `period` steps."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        architecture: Gossip,
        period: int,
        settings: Settings,
        **options: Any,
    ) -> None:
        self.period, self._architecture = period, architecture
        described = {
            **settings.described(),
            "method": "decentralized",
            "architecture": repr(architecture),
            "period": period,
        }
        super().__init__(model, optimizer, described, by_tensor=False, **options)
        architecture.check(self.communicator.size)
        self._reducer = lift(settings.compression, settings.steps_per_epoch)
        for bucket in self.buckets:
            architecture.check_compression(self._reducer, self.spec(bucket))
        self._key = Key(settings.seed)
        self._mixings: list[GossipMixing] = []  # made by the first program
        # Of each vector: the replica before the round under way, and after its beginning.
        self._before: list[Replica] = []
        self._begun: list[Replica] = []
        self._began = 0  # the step with which the round began
        self._num_served = 0  # steps without one of the optimizer, for ranks that took more
        self._leaving = Leaving(self.label, self.communicator.size)
        self._answers_with: int | None = None  # the round that this rank goes on to, in training
        self._begin_round(self._fresh([self.flat(bucket) for bucket in self.buckets]), 0)
        self.begin()

    # The user's side.

    def consensus(self) -> None:
        """Averages all models exactly, once, and what buffers hold. All ranks call it."""
        self._meet(is_final=False)

    def flush(self) -> None:
        self.consensus()

    def close(self) -> None:
        if self._hook is not None:
            while not self._meet(is_final=True):  # others go on after a consensus
                pass
            self.remove()

    def state_dict(self) -> dict[str, Any]:
        replicas = [
            {"params": own.params, "exchange": list(own.exchange), "memory": dict(own.memory)}
            for own in self._before
        ]
        return {
            "version": 1,
            "method": repr(self._architecture),
            "rank": self.communicator.rank,
            "size": self.communicator.size,
            "num_steps": self.num_steps,
            "num_served": self._num_served,
            "began": self._began,
            "replicas": replicas,
        }

    def load_state_dict(self, saved: Saved) -> None:
        rank, size = self.communicator.rank, self.communicator.size
        rows = rows_to_load(saved, rank, size, lambda row: row)
        for row in rows:
            self._check_saved(row)
        first = rows[0]
        if len(rows) > 1 or first["size"] != size:
            clocks = [row["num_steps"] + row["num_served"] for row in rows]
            models = [[replica["params"] for replica in row["replicas"]] for row in rows]
            walked = [clock - row["began"] for clock, row in zip(clocks, rows)]
            check_unchanged(walked, models, size, "consensus()")
            replicas = self._fresh(models[0])  # what neighbours keep of each other begins anew
        else:
            replicas = [
                Replica(row["params"], {}, {}, tuple(row["exchange"]), row["memory"])
                for row in first["replicas"]
            ]
        self._end_round()  # its messages must not be read by another round
        self.num_steps, self._num_served = first["num_steps"], first["num_served"]
        self._begin_round(replicas, first["began"], writes=False)  # the model is loaded by the user

    def _check_saved(self, row: Mapping[str, Any]) -> None:
        if row["method"] != repr(self._architecture):
            raise ValueError(
                f"the saved state is of {row['method']}, this is {self._architecture!r}: load it "
                "with the same graph and algorithm, or start without it"
            )
        sizes = [len(own.params) for own in self._before]
        given = [len(replica["params"]) for replica in row["replicas"]]
        if given != sizes:
            raise ValueError(
                f"the saved state has vectors of {given} elements, this model needs {sizes}: load "
                "the state of the same model"
            )

    # Rounds.

    @property
    def _clock(self) -> int:
        """The step that rounds count, the same on all ranks after a consensus."""
        return self.num_steps + self._num_served

    def after_step(self) -> None:
        following = self._began + self.period
        if self._clock == following:
            self._answers_with = following
            self._begin_round(self._end_round(), following)
            self._answers_with = None

    def _meet(self, *, is_final: bool) -> bool:
        """Serves until all ranks have left, and averages; whether all left for good."""
        own = Left(self._began, self._clock, is_final)
        self.wait(self.post(lambda node: self._leaving.leave(node, own)))
        while self.wait(self.post(lambda node: self._leaving.goes_on(node, self._began))):
            following = self._began + self.period
            self._num_served += following - self._clock
            self._begin_round(self._end_round(), following)
        replicas = self._average()
        clock, are_final = self._leaving.end()
        if not are_final:
            self._num_served += clock - self._clock
            self._begin_round(replicas, clock)
        return are_final

    def _begin_round(self, replicas: list[Replica], step: int, *, writes: bool = True) -> None:
        async def program(node: Node) -> list[Replica]:
            mixings = self._mixings_on(node)
            return [await m.before(r, step, self.period) for m, r in zip(mixings, replicas)]

        self._before, self._began = replicas, step
        self._begun = self._run(program)
        if writes:
            for bucket, replica in zip(self.buckets, self._begun):
                self.write(bucket, replica.params)

    def _end_round(self) -> list[Replica]:
        begun, step = self._begun, max(self._began, self._clock - 1)
        walks = [self.flat(bucket) - own.params for bucket, own in zip(self.buckets, begun)]

        async def program(node: Node) -> list[Replica]:
            mixings = self._mixings_on(node)
            ended = [await m.after(r, walk, step) for m, r, walk in zip(mixings, begun, walks)]
            for mixing in mixings:
                await _check_present(node, mixing, step)
            return ended

        return self._run(program)

    def _run(self, program: Callable[[Node], Coroutine[Any, Any, T]]) -> T:
        """A part of a round, in which ranks that leave get an answer if this one is in training."""
        following = self._answers_with
        if following is None:
            return self.wait(self.post(program))
        return self.wait(
            self.post(lambda node: self._leaving.while_answering(node, following, program))
        )

    def _average(self) -> list[Replica]:
        """Averages all models as they are now."""
        vectors = [self.flat(bucket) for bucket in self.buckets]
        self._end_round()  # its result is not used: its messages must not be read by another one
        tensors = {str(number): x for number, x in enumerate(vectors)} | self.copy_buffers()
        label = f"{self.label}consensus"
        averages = self.wait(
            self.post(lambda node: exact_averages(node, AllReduce(), label, tensors))
        )
        self.write_buffers(averages)
        vectors = [averages[str(number)] for number in range(len(vectors))]
        for bucket, x in zip(self.buckets, vectors):
            self.write(bucket, x)
        return self._fresh(vectors)

    def _fresh(self, vectors: Sequence[Tensor]) -> list[Replica]:
        """Replicas before the first round, given a model that all ranks have."""
        size, reducer, memory = self.communicator.size, self._reducer, self._architecture.memory
        return [
            Replica(x, {}, {}, (reducer.init(self.spec(bucket), size),), memory(x))
            for bucket, x in zip(self.buckets, vectors)
        ]

    def _mixings_on(self, node: Node) -> list[GossipMixing]:
        if not self._mixings:
            for number in range(len(self.buckets)):
                labelled = _LabelledNode(node, f"{self.label}{number}")
                mixing = self._architecture.mixing(labelled, self._reducer, self._key)
                mixing.neighbours.presence.admits_newcomers = False
                self._mixings.append(mixing)
        return self._mixings


async def _check_present(node: Node, mixing: GossipMixing, step: int) -> None:
    """Raises `PeerLost` if a rank is lost, or a neighbour has left."""
    presence, members = mixing.neighbours.presence, await node.members()
    for rank in range(node.size):
        if rank not in members or not presence.has(rank, step):
            await node.recv(rank, "nothing")  # raises, since nothing can come


def decentralized(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    graph: str = "one_peer_exponential",
    algorithm: str = "dpsgd",
    compression: str | Compression = "identity",
    period: int = 1,
    lazy: bool = False,
    process_group: dist.ProcessGroup | None = None,
    seed: int = 0,
    steps_per_epoch: float | None = None,
    timeout_s: float = 300.0,
    native: bool = True,
) -> DecentralizedUpdates:
    """Averages the model with neighbours on a graph every `period` steps of the optimizer.

    `graph`, `algorithm` and `lazy` are those of `gossip(graph, algorithm, lazy)`: `gradwire list`
    shows them. Compression needs an algorithm with a rule for it, such as choco(0.3), which needs
    a constant graph such as ring. Other settings are those of `ddp_comm_hook`.
    """
    check_period("decentralized", period)
    architecture = ARCHITECTURE.parse(f"gossip({graph}, {algorithm}, lazy={bool(lazy)})")
    if not isinstance(architecture, Gossip) or architecture.algorithm.asynchronous:
        raise ValueError(
            f"{algorithm} has no rounds: each rank averages whenever it likes, beside its training "
            "loop. Take an algorithm with rounds, such as dpsgd or choco(0.3)"
        )
    settings = Settings.parse(compression, "allreduce", seed, steps_per_epoch)
    return DecentralizedUpdates(
        model,
        optimizer,
        architecture,
        period,
        settings,
        process_group=process_group,
        timeout_s=timeout_s,
        native=native,
    )
