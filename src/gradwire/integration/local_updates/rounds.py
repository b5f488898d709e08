"""Averages of models over all ranks, part by part: what local SGD and DiLoCo have in common.

A round averages the change of one part of the model since the last agreement on it (the anchor), so
that compression works on small numbers and error feedback keeps what it drops. Before it, ranks
exchange a short notice: the part, the step, which buffers changed.

Ranks may take different numbers of steps. A rank that leaves early (`flush`, `close`) takes part in
the rounds of the others, with what it has changed, until all have left; then all average what is
outstanding and have the same model. One that has left for good goes on so until all have.

Buffers that changed on some rank are averaged as well, uncompressed: floats (the statistics of
batch normalisation) by their mean, others by their maximum. They go with the first part.
"""

import json
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradwire.compression.feedback.ef import warn_if_unfed
from gradwire.core.codec import is_finite
from gradwire.core.errors import NonFiniteError, RefusedError, WireError
from gradwire.core.group import Group
from gradwire.core.node import Node
from gradwire.integration.buckets import ParameterBucket
from gradwire.integration.exchange import Exchange, packed
from gradwire.integration.local_updates.context import (
    LocalUpdates,
    Saved,
    Tensors,
    exact_averages,
)
from gradwire.integration.local_updates.saved import check_unchanged, rows_to_load
from gradwire.integration.settings import Settings

_NUM_LABELS = 16  # of the notices of rounds that may be under way together


class Round(NamedTuple):
    """The result of a round, the same on all ranks."""

    means: dict[int, list[Tensor]]  # of changes, by part
    extras: Tensors  # averages of buffers, and of what else was given
    everyone_left: bool
    are_final: bool = False  # and none of them continues
    spoiled: tuple[int, ...] = ()  # ranks with NaN or infinity: nothing was averaged


class Notice(NamedTuple):
    """What a rank tells the others before a round."""

    part: int | None  # None: this rank has left
    step: int
    is_finite: bool
    since: list[int]  # steps since the last round of each part
    changed: list[str]  # buffers
    extras: list[str]  # names of other tensors to be averaged, if all ranks have them
    closes: bool  # it has left for good


class AveragingRounds(LocalUpdates):
    """Averages parts of a model, each at its own steps. Parts are buckets in turn."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        settings: Settings,
        described: dict[str, Any],
        *,
        num_parts: int,
        **options: Any,
    ) -> None:
        super().__init__(model, optimizer, {**settings.described(), **described}, **options)
        self._exchange = Exchange(self.communicator, settings, self.label)
        self._exchange.reducer.check_names(self.names)
        for bucket in self.buckets:
            warn_if_unfed(settings.compression, self.spec(bucket), stacklevel=4)
        self.anchors = [self.flat(bucket) for bucket in self.buckets]
        self._num_parts = num_parts
        self._since = [0] * num_parts  # steps since the last round of each part
        self._buffers_before = self.copy_buffers()
        self._num_rounds = 0

    def buckets_of(self, part: int) -> list[int]:
        """The numbers of its buckets: strided, which Douillard et al. (2025) find best."""
        return list(range(part, len(self.buckets), self._num_parts))

    # What a method adds.

    @abstractmethod
    def apply(self, part: int, means: Sequence[Tensor], mixing: float | None = None) -> None:
        """Uses the mean changes of a part; `mixing` in place of that of the method."""

    def extras(self) -> Tensors:
        """Other tensors that are averaged with the first part, by name."""
        return {}

    def take_extras(self, averages: Tensors) -> None:
        """Their averages."""

    def after_step(self) -> None:
        self._since = [count + 1 for count in self._since]

    # Rounds.

    def start_round(self, part: int) -> "Future[Round]":
        """Starts to average a part."""
        changes = self._changes(part)
        self._since[part] = 0
        return self._post(part, lambda asked: changes, changes, has_extras=part == 0)

    def finish_round(self, future: "Future[Round]", mixing: float | None = None) -> Round:
        """Waits for the result of a round and uses it."""
        result = self.wait(future)
        if result.spoiled:
            ranks = self.communicator.ranks
            spoiled = _listed([ranks[own] for own in result.spoiled])
            raise NonFiniteError(
                f"NaN or infinity in the parameters of rank {spoiled}: nothing was averaged (this "
                f"is rank {ranks[self.communicator.rank]}). Lower the learning rate, or clip "
                "gradients"
            )
        for part, means in result.means.items():
            self.apply(part, means, mixing)
        self._take_buffers(result.extras)
        self.take_extras(result.extras)
        return result

    def flush(self) -> None:
        self.leave(is_final=False)

    def close(self) -> None:
        if self._hook is not None:
            while not self.leave(is_final=True):  # others continue after a flush
                pass
            self.remove()

    def leave(self, *, is_final: bool) -> bool:
        """Takes part in the rounds of others until all have left; whether all have for good."""
        while True:
            everything = [own for part in range(self._num_parts) for own in self._changes(part)]
            result = self.finish_round(
                self._post(None, self._changes, everything, has_extras=True, closes=is_final), 0.0
            )
            for part in result.means:
                self._since[part] = 0
            if result.everyone_left:
                return result.are_final

    def _changes(self, part: int) -> list[Tensor]:
        return [self.flat(self.buckets[i]) - self.anchors[i] for i in self.buckets_of(part)]

    def _post(
        self,
        part: int | None,
        changes: Callable[[int], list[Tensor]],
        sent: Sequence[Tensor],
        *,
        has_extras: bool,
        closes: bool = False,
    ) -> "Future[Round]":
        buffers = self.copy_buffers() if has_extras else {}
        changed = [n for n, own in buffers.items() if not torch.equal(own, self._buffers_before[n])]
        extras = self.extras() if has_extras else {}
        notice = Notice(
            part,
            self.num_steps - 1,
            all(is_finite(x) for x in sent),
            list(self._since),
            changed,
            list(extras),
            closes,
        )
        self._num_rounds += 1
        label = f"{self.label}round {self._num_rounds % _NUM_LABELS}"
        return self.post(lambda node: self._round(node, label, notice, changes, buffers, extras))

    async def _round(
        self,
        node: Node,
        label: str,
        own: Notice,
        changes: Callable[[int], list[Tensor]],
        buffers: Tensors,
        extras: Tensors,
    ) -> Round:
        rows = await Group(node, label).all_gather(packed(own._asdict()))
        notices = [read_notice(row, rank, own) for rank, row in enumerate(rows)]
        everyone_left = all(notice.part is None for notice in notices)
        are_final = all(notice.closes for notice in notices)
        spoiled = tuple(rank for rank, notice in enumerate(notices) if not notice.is_finite)
        if spoiled:
            return Round({}, {}, everyone_left, are_final, spoiled)
        parts = _parts(notices)
        step = max(notice.step for notice in notices)
        means = {}
        for part in parts:
            tasks = [
                await node.spawn(self._mean(node, self.buckets[i], x, step))
                for i, x in zip(self.buckets_of(part), changes(part))
            ]
            means[part] = [await node.join(task) for task in tasks]
        self._exchange.finish_step()
        averages: Tensors = {}
        if 0 in parts or everyone_left:
            changed = {name for notice in notices for name in notice.changed}
            common = set.intersection(*(set(notice.extras) for notice in notices))
            chosen = {n: x for n, x in buffers.items() if n in changed}
            chosen |= {name: x for name, x in extras.items() if name in common}
            architecture = self._exchange.settings.architecture
            averages = await exact_averages(node, architecture, label, chosen)
        return Round(means, averages, everyone_left, are_final)

    async def _mean(self, node: Node, bucket: ParameterBucket, x: Tensor, step: int) -> Tensor:
        return await self._exchange.average(node, bucket.name, bucket.layout, x, step)

    def _take_buffers(self, averages: Tensors) -> None:
        self.write_buffers(averages)
        for name, average in averages.items():
            if name in self._buffers_before:
                self._buffers_before[name] = average.clone()

    # State.

    def state_dict(self) -> dict[str, Any]:
        return {
            "version": 1,
            "num_steps": self.num_steps,
            "since": list(self._since),
            "anchors": [anchor.clone() for anchor in self.anchors],
            "buffers": dict(self._buffers_before),
            "exchange": self._exchange.state_dict(),
        }

    def load_state_dict(self, saved: Saved) -> None:
        rows = self._rows(saved)
        first = rows[0]
        self._exchange.load_state_dict([row["exchange"] for row in rows])
        self.num_steps = max(row["num_steps"] for row in rows)
        self._since = list(first["since"])
        self._buffers_before = dict(first["buffers"])
        for anchor, value in zip(self.anchors, first["anchors"]):
            anchor.copy_(value)

    def _rows(self, saved: Saved) -> list[Mapping[str, Any]]:
        """The state of this rank; those of all ranks, if there was another number of them."""
        rows = rows_to_load(
            saved, self.communicator.rank, self.communicator.size, lambda row: row["exchange"]
        )
        sizes = [len(anchor) for anchor in self.anchors]
        for row in rows:
            given = [len(anchor) for anchor in row["anchors"]]
            if given != sizes:
                raise ValueError(
                    f"the saved state has vectors of {given} elements, this model needs {sizes}: "
                    "load the state of the same model and settings"
                )
            if len(row["since"]) != self._num_parts:
                raise ValueError(
                    f"the saved state is of {len(row['since'])} parts, this has "
                    f"{self._num_parts}: load it with the same number of fragments"
                )
        if len(rows) > 1 or rows[0]["exchange"]["size"] != self.communicator.size:
            check_unchanged(
                [max(row["since"]) for row in rows],
                [row["anchors"] for row in rows],
                self.communicator.size,
                "flush()",
            )
        return rows


def _parts(notices: Sequence[Notice]) -> list[int]:
    """The parts of a round: that of the ranks that continue, or all that are outstanding."""
    asked = {notice.part for notice in notices if notice.part is not None}
    if len(asked) > 1:
        named = [
            f"rank {rank} averages part {notice.part} after step {notice.step}"
            for rank, notice in enumerate(notices)
        ]
        raise RefusedError(f"{'; '.join(named)}: ranks have loaded states of different steps")
    if asked:
        return [part for part in asked if part is not None]
    num_parts = len(notices[0].since)
    return [part for part in range(num_parts) if any(notice.since[part] for notice in notices)]


def read_notice(row: Tensor, rank: int, own: Notice) -> Notice:
    """The notice that a rank sent; raises if the bytes are not one like the own."""
    try:
        notice = Notice(**json.loads(bytes(row.cpu().numpy())))
        part, step, finite, since, changed, extras, closes = notice
        is_good = (
            (part is None or (isinstance(part, int) and 0 <= part < len(own.since)))
            and isinstance(step, int)
            and isinstance(finite, bool)
            and isinstance(closes, bool)
            and len(since) == len(own.since)
            and all(isinstance(count, int) for count in since)
            and all(isinstance(name, str) for name in (*changed, *extras))
        )
    except (TypeError, ValueError):
        is_good = False
    if not is_good:
        raise WireError(f"rank {rank} sent bytes that are not the notice of a round")
    return notice


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
