"""Partitions of the training examples over workers: `iid`, `dirichlet(0.5)`, `by_label(2)`,
`by_role`. A partition is an expression; `shards` gives each worker its indices, the same on every
rank because they are drawn from a shared key.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from gradwire.core.key import Key
from gradwire.core.notation import Expression

_MAX_DRAWS = 100


class Examples(Protocol):
    """What partitions must know of a data set; labels and roles only some of them."""

    @property
    def name(self) -> str: ...

    @property
    def num_train(self) -> int: ...

    @property
    def train_targets(self) -> Tensor: ...

    @property
    def num_classes(self) -> int: ...

    @property
    def roles(self) -> tuple[Tensor, ...] | None: ...


class DataPartition(Expression, ABC):
    """A rule that deals training examples to workers."""

    @abstractmethod
    def shards(self, dataset: Examples, num_workers: int, key: Key) -> list[Tensor] | None:
        """The train indices of each worker, int64, ascending: disjoint, and all of them.

        None means that no worker owns examples: all draw from one order, new every epoch.
        """

    def _check_workers(self, num_workers: int, most: int, what: str) -> None:
        if not 1 <= num_workers <= most:
            raise ValueError(f"{self} needs 1 .. {most} workers ({what}), got {num_workers}")

    def _labels(self, dataset: Examples) -> Tensor:
        if dataset.train_targets.dim() != 1:
            raise ValueError(
                f"{self} needs one label per example, but targets of {dataset.name} have shape "
                f"{list(dataset.train_targets.shape)}. Try iid, or by_role on shakespeare_roles."
            )
        return dataset.train_targets.cpu().to(torch.int64)


@dataclass(frozen=True, repr=False)
class Iid(DataPartition):
    """Every worker draws from all examples, in one order that is new every epoch."""

    def shards(self, dataset: Examples, num_workers: int, key: Key) -> list[Tensor] | None:
        self._check_workers(num_workers, dataset.num_train, "an example each")
        return None


@dataclass(frozen=True, repr=False)
class Dirichlet(DataPartition):
    """Label skew: the examples of each class are dealt in shares drawn from Dirichlet(alpha).

    A large alpha tends to equal shares, a small one to one worker per class. The shares are over
    workers, class by class, so that all examples are used (Yurochkin et al. 2019); Hsu et al.
    draw, with the same effect, shares over classes for each worker. A draw that leaves a worker
    without examples is drawn again.
    """

    paper: ClassVar[str] = (
        "Hsu et al. 2019, Measuring the effects of non-identical data distribution for "
        "federated visual classification"
    )
    examples = ("dirichlet(0.5)",)
    alpha: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.alpha) and self.alpha > 0):
            raise ValueError(f"dirichlet needs a finite alpha above 0, got {self.alpha}")

    def shards(self, dataset: Examples, num_workers: int, key: Key) -> list[Tensor]:
        labels = self._labels(dataset)
        self._check_workers(num_workers, len(labels), "an example each")
        order = key.child("order").permutation(len(labels))
        members = [order[labels[order] == label] for label in range(dataset.num_classes)]
        for attempt in range(_MAX_DRAWS):
            shares = dirichlet(self.alpha, len(members), num_workers, key.child(attempt))
            shards = _deal(members, shares)
            if all(len(shard) for shard in shards):
                return shards
        raise ValueError(
            f"{self} left some of {num_workers} workers without any of the {len(labels)} examples "
            f"of {dataset.name} in {_MAX_DRAWS} draws. Use a larger alpha or fewer workers."
        )


@dataclass(frozen=True, repr=False)
class ByLabel(DataPartition):
    """Examples sorted by label and cut into equal pieces; every worker has some pieces.

    A worker sees few labels: `labels_per_worker`, and one more for each of its pieces that
    crosses from one label to the next.
    """

    paper: ClassVar[str] = (
        "McMahan et al. 2017, Communication-efficient learning of deep networks from "
        "decentralized data"
    )
    labels_per_worker: int = 2

    def __post_init__(self) -> None:
        if self.labels_per_worker < 1:
            raise ValueError(
                f"by_label needs at least 1 label per worker, got {self.labels_per_worker}"
            )

    def shards(self, dataset: Examples, num_workers: int, key: Key) -> list[Tensor]:
        labels = self._labels(dataset)
        self._check_workers(
            num_workers, len(labels) // self.labels_per_worker, "an example per label"
        )
        num_pieces = num_workers * self.labels_per_worker
        pieces = torch.argsort(labels, stable=True).tensor_split(num_pieces)
        return _gather(pieces, key.child("pieces").permutation(num_pieces), num_workers)


@dataclass(frozen=True, repr=False)
class ByRole(DataPartition):
    """The speaking roles of a play, dealt whole: a worker speaks as one role or several."""

    paper: ClassVar[str] = "Caldas et al. 2018, LEAF: a benchmark for federated settings"

    def shards(self, dataset: Examples, num_workers: int, key: Key) -> list[Tensor]:
        if dataset.roles is None:
            raise ValueError(
                f"by_role needs a data set with speaking roles; {dataset.name} has none. "
                "Try shakespeare_roles, or iid."
            )
        self._check_workers(num_workers, len(dataset.roles), "a role each")
        order = key.child("roles").permutation(len(dataset.roles))
        return _gather(dataset.roles, order, num_workers)


def _gather(pieces: tuple[Tensor, ...], order: Tensor, num_workers: int) -> list[Tensor]:
    """Deals whole pieces in turn, in the given order."""
    dealt = [pieces[i] for i in order.tolist()]
    return [torch.cat(dealt[rank::num_workers]).sort().values for rank in range(num_workers)]


def _deal(members: list[Tensor], shares: Tensor) -> list[Tensor]:
    """Cuts each class by its row of `shares` [num_classes, num_workers]; one shard per worker."""
    ends = shares.cumsum(dim=1)[:, :-1]
    parts = [
        of_class.tensor_split((ends[label] * len(of_class)).to(torch.int64))
        for label, of_class in enumerate(members)
    ]
    return [torch.cat(of_worker).sort().values for of_worker in zip(*parts)]


def dirichlet(alpha: float, num_draws: int, size: int, key: Key) -> Tensor:
    """Draws from the symmetric Dirichlet distribution, float64 [num_draws, size].

    Normalised gamma variates, in logarithms: for a small alpha the variates underflow, their
    shares need not. G(a) = G(a + 1) U^(1/a) lifts the shape to where the method of Marsaglia and
    Tsang applies.
    """
    count = num_draws * size
    uniform = 1.0 - key.child("boost").uniform64(count)  # in (0, 1]
    logarithm = log_gamma_variates(alpha + 1.0, count, key.child("gamma")) + uniform.log() / alpha
    return torch.softmax(logarithm.reshape(num_draws, size), dim=1)


def log_gamma_variates(shape: float, count: int, key: Key) -> Tensor:
    """Logarithms of Gamma(shape, 1) variates for shape >= 1, float64 [count].

    Marsaglia and Tsang 2000, "A simple method for generating gamma variables": d v with
    v = (1 + c x)^3, x normal, d = shape - 1/3, c = 1 / sqrt(9 d), accepted when
    log u < x^2 / 2 + d - d v + d log v. A round accepts over 95%, so a few rounds do.
    """
    assert shape >= 1.0
    d = shape - 1.0 / 3.0
    c = 1.0 / math.sqrt(9.0 * d)
    result = torch.full((count,), torch.nan, dtype=torch.float64)
    attempt = 0
    while (pending := result.isnan()).any():
        draws = key.child(attempt)
        x = draws.child("normal").normal(count).to(torch.float64)
        u = 1.0 - draws.child("uniform").uniform64(count)  # in (0, 1]
        v = (1.0 + c * x) ** 3
        log_v = v.clamp(min=1e-300).log()
        accepted = (v > 0) & (u.log() < 0.5 * x * x + d - d * v + d * log_v)
        result = torch.where(pending & accepted, math.log(d) + log_v, result)
        attempt += 1
    return result
