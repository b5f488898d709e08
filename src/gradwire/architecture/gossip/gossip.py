"""Gossip: every worker averages with its neighbours on a graph (survey, sec. 4.3).

No node communicates with all others and no link is a bottleneck. There is no common model: each
worker has its own, and the averages keep them close. How close depends on the graph's spectral gap;
how the average is combined with training is up to the algorithm.

`lazy` takes (I + W) / 2 in the place of W: all eigenvalues are then at least 0, which some
algorithms need, and mixing is slower.

Use it where many workers share a slow or unreliable network: a step costs the messages of a few
neighbours, whatever the number of workers, and a worker that is lost concerns its neighbours only.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from gradwire.architecture.gossip import GOSSIP
from gradwire.architecture.gossip._algorithm import GossipAlgorithm
from gradwire.architecture.gossip._mixing import GossipMixing
from gradwire.architecture.gossip._neighbours import Neighbours, is_lossless
from gradwire.architecture.gossip.dpsgd import DPSGD
from gradwire.architecture.graphs import (
    GRAPHS,
    Graph,
    check_column_stochastic,
    check_doubly_stochastic,
    describe,
)
from gradwire.core.codec import Codec
from gradwire.core.errors import GradwireWarning
from gradwire.core.group import Group
from gradwire.core.key import Key
from gradwire.core.node import Node
from gradwire.core.notation import Table
from gradwire.core.protocols import Ability, Architecture, Counts, Replica
from gradwire.core.reducer import Reducer
from gradwire.core.spec import Spec

_TOLERANCE = 1e-6  # of sums, as for graphs
_NUM_SAMPLED_MATRICES = 64  # matrices drawn from a random graph to find all possible neighbours


@dataclass(frozen=True, repr=False)
class Gossip(Architecture):
    """Average with the neighbours on a graph; no node communicates with all others."""

    graph: Graph
    algorithm: GossipAlgorithm = DPSGD()  # noqa: RUF009  a value that never changes
    lazy: bool = False

    registries = Table({"graph": GRAPHS, "algorithm": GOSSIP})
    examples = (
        "gossip(ring)",
        "gossip(ring, diffusion)",
        "gossip(ring, subgradient)",
        "gossip(ring, d2, lazy=True)",
        "gossip(ring, gradient_tracking)",
        "gossip(ring, choco(0.3))",
        "gossip(ring, dcd)",
        "gossip(ring, ecd)",
        "gossip(exponential, sgp)",
        "gossip(ring, adpsgd)",
    )
    short_examples = examples  # every algorithm
    paper = "Lian et al. 2017, Can decentralized algorithms outperform centralized algorithms?"

    @property
    def offers(self) -> tuple[Ability, ...]:
        return ("mix_async",) if self.algorithm.asynchronous else ("mix",)

    def matrix(self, num_workers: int, step: int) -> Tensor:
        """W [n, n] of a step: W[i, j] is the weight that i gives to j."""
        matrix = self.graph.matrix(num_workers, step)
        if self.lazy:
            return (torch.eye(num_workers, dtype=matrix.dtype) + matrix) / 2
        return matrix

    def check(self, num_workers: int) -> None:
        what = f"{self!r} with {num_workers} workers"
        algorithm, graph = self.algorithm, self.graph
        if graph.varies and algorithm.needs_constant:
            raise ValueError(
                f"{what}: {graph!r} changes from step to step, but {algorithm.needs_constant}. "
                "Take a constant graph such as ring, or dpsgd."
            )
        period = graph.period(num_workers)
        matrices = [
            self.matrix(num_workers, step) for step in range(period or _NUM_SAMPLED_MATRICES)
        ]
        for matrix in matrices:
            if algorithm.pushes:
                check_column_stochastic(matrix, what)
                _check_keeps(matrix, what)
            else:
                check_doubly_stochastic(matrix, what)
            if algorithm.needs_symmetric and not torch.allclose(matrix, matrix.T, atol=_TOLERANCE):
                raise ValueError(
                    f"{what}: {graph!r} is directed, but {algorithm.needs_symmetric}. "
                    "Take sgp, or an undirected graph such as ring."
                )
            algorithm.check(matrix, what)
        _check_connected(sum(matrices), what)

    def group(self, node: Node, label: str, members: Sequence[int] | None = None) -> Group:
        raise ValueError(
            f"{self!r} has no collectives: workers know their neighbours only. Take an "
            "architecture that forms means, such as allreduce."
        )

    def memory(self, params: Tensor) -> dict[str, Tensor]:
        return self.algorithm.memory(params)

    def counts(self, memories: Sequence[Mapping[str, Tensor]]) -> dict[str, Counts]:
        return self.algorithm.counts(memories)

    def describe(self, num_workers: int) -> dict[str, str]:
        return {"graph": describe(self.graph, num_workers)}

    def owed(self, replica: Replica) -> Tensor | None:
        return self.algorithm.owed(replica)

    def mixing(self, node: Node, compression: Reducer, key: Key) -> GossipMixing:
        neighbours = Neighbours(
            node,
            partial(self.matrix, node.size),
            self.graph.varies,
            self._possible_neighbours(node),
            partial(_codec_at, compression),
            key,
        )
        return GossipMixing(self.algorithm, neighbours)

    def _possible_neighbours(self, node: Node) -> list[int]:
        """The ranks that are neighbours in some step."""
        period, rank = self.graph.period(node.size), node.rank
        others = [other for other in range(node.size) if other != rank]
        if period is None:
            return others
        total = sum(self.matrix(node.size, step) for step in range(period))
        assert isinstance(total, Tensor)
        return [other for other in others if total[rank, other] or total[other, rank]]

    def check_compression(self, compression: Reducer, spec: Spec) -> None:
        """Refuses unusable codecs, and warns of those that may not converge."""
        what = f"{compression!r} with {self!r}"
        codecs = [_codec(own, what) for own in compression.ends()]
        for codec in codecs:
            _check_alone(codec, what)
        lossy = [codec for codec in codecs if not is_lossless(codec, spec)]
        if not lossy:
            return
        if self.algorithm.compresses == "refuses":
            raise ValueError(
                f"{what}: {self.algorithm!r} has no rule for a codec that loses something. Write "
                f"identity as compression, or gossip({self.graph!r}, choco(0.3)), dcd or ecd."
            )
        for codec in lossy:
            why = self._convergence_problem(codec, spec)
            if why:
                warnings.warn(f"{what}: {why}", GradwireWarning, stacklevel=2)
                return

    def _convergence_problem(self, codec: Codec, spec: Spec) -> str:
        """Why the algorithm is not known to converge with a codec; empty if it is."""
        algorithm, guarantee = self.algorithm, codec.guarantee(spec)
        choco = f"gossip({self.graph!r}, choco(0.3))"
        if algorithm.compresses == "naively":
            return (
                f"{algorithm!r} sends the compressed model itself, and what is lost never comes "
                f"back: workers do not agree in the end. Try {choco}."
            )
        if algorithm.needs_codec == "contraction" and not guarantee.contracts:
            return (
                f"{codec!r} may lose more than there is, and {algorithm!r} sends again what was "
                "lost: the error can grow without bound. Take more levels, smaller buckets or a "
                "contraction such as sign or topk(0.01)."
            )
        if algorithm.needs_codec != "unbiased":
            return ""
        omega = guarantee.omega
        if omega is None:
            is_biased = guarantee.delta is not None or guarantee.grows
            return (
                f"{algorithm!r} converges with unbiased codecs of bounded variance, and {codec!r} "
                f"is {'not one' if is_biased else 'not known to be one'}: workers may end "
                f"elsewhere. Write qsgd(bits=8), or {choco}."
            )
        if omega >= 1:
            return (
                f"{algorithm!r} makes the errors of the codec, and those of {codec!r} may be "
                f"larger than what is sent (variance up to {omega:.3g} times its square): the "
                f"models can diverge. Take more levels or smaller buckets, or {choco} with a "
                "contraction such as topk(0.01)."
            )
        return ""


def _codec(reducer: Reducer, what: str) -> Codec:
    codec = reducer.codec_at(0)
    if codec is not None:
        return codec
    if reducer.wrapped() is not None:
        why = (
            "this compression keeps a memory for exchanges among all workers; algorithms such as "
            "choco keep one of their own for neighbours"
        )
    elif not reducer.can_push:
        why = (
            "this compression averages over all workers at once; neighbours exchange with each "
            "other only"
        )
    else:
        why = (
            "this compression has several parts, each of which averages on its own; neighbours "
            "exchange payloads of one codec for the whole model"
        )
    raise ValueError(f"{what}: {why}. Write a plain codec, such as topk(0.01).")


def _check_alone(codec: Codec, what: str) -> None:
    """Refuses a codec whose payload a single neighbour cannot decode."""
    why = ""
    if codec.traits.statistic is not None:
        why = "all workers must agree on a statistic first, for which neighbours have no means"
    elif codec.traits.needs_feedback:
        why = "it selects from what error feedback accumulates"
    elif codec.traits.merging is not None:
        why = "its payloads are votes that count when they are merged, and a single one is no model"
    if why:
        raise ValueError(f"{what}: {codec!r} cannot be used, since {why}. Try topk or qsgd.")


def _codec_at(compression: Reducer, step: int) -> Codec:
    codec = compression.codec_at(step)
    assert codec is not None  # as checked
    return codec


def _check_keeps(matrix: Tensor, what: str) -> None:
    """Refuses a matrix in which a worker gives away all of its weight."""
    if not bool((matrix.diagonal() > 0).all()):
        k = int((matrix.diagonal() <= 0).nonzero()[0])
        raise ValueError(f"{what}: rank {k} keeps nothing for itself; push-sum needs a part > 0")


def _check_connected(matrix: Tensor | int, what: str) -> None:
    """Refuses a graph that is not strongly connected."""
    assert isinstance(matrix, Tensor)
    size = len(matrix)
    reached = torch.eye(size, dtype=torch.float64) + (matrix > 0).double()
    for _ in range(max(1, size.bit_length())):
        reached = (reached @ reached > 0).double()
    missing = (reached == 0).nonzero()
    if len(missing):
        i, j = missing[0].tolist()
        raise ValueError(
            f"{what}: the graph is not connected, nothing reaches rank {i} from rank {j}, so "
            "they would never agree. Add edges."
        )
