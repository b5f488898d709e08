"""Means of gradients over all ranks, bucket by bucket, through a compression.

A bucket is a flat vector with the names and shapes of the tensors in it. Its exchange is the same
program as in simulated runs, posted to the communicator's thread. The state of compression belongs
to the tensors: where they come in other buckets than before (DDP rebuilds its buckets after the
first iteration), all ranks move it.

NaN and infinity, which mixed precision produces while the loss scale is too high, must neither stop
a run nor enter a residual. A rank that finds them sends zeros instead, and with the last bucket of
a step all ranks tell each other. If any rank had some, that bucket's mean is NaN on all ranks, as
it would be without compression, so a GradScaler skips the step everywhere. The state of compression
stays that of the step before.
"""

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor

from gradwire.compression.feedback.ef import warn_if_unfed
from gradwire.compression.identity import Identity
from gradwire.core.codec import State, is_finite
from gradwire.core.errors import DifferentSettingsError
from gradwire.core.group import Group
from gradwire.core.key import Key
from gradwire.core.lifted import lift
from gradwire.core.node import Node
from gradwire.core.spec import Placed, Spec
from gradwire.integration.communicator import Communicator
from gradwire.integration.settings import Settings
from gradwire.training.regroup import regroup_here, regroup_states

Layout = tuple[Placed, ...]  # the tensors of a bucket, in order


class Exchange:
    """The exchanges of one model's gradients. All ranks make theirs with the same settings."""

    def __init__(self, communicator: Communicator, settings: Settings, label: str) -> None:
        self.communicator = communicator
        self.settings = settings
        self.reducer = lift(settings.compression, settings.steps_per_epoch)
        self.step = 0
        self.label = label  # of this one among those of the communicator
        self._key = Key(settings.seed)
        # These belong to the communicator's thread while programs are under way.
        self._states: dict[Layout, State] = {}
        self._dtypes: dict[Layout, torch.dtype] = {}
        self._before: dict[Layout, State] = {}  # those of the step before
        self._used: set[Layout] = set()  # in this step
        self._found_nonfinite = False  # on this rank, in this step
        self._is_spoiled = False  # this step, on some rank
        self._is_checked = False
        self._is_exact = isinstance(settings.compression, Identity)

    def mean(
        self, name: str, tensors: Layout, x: Tensor, *, is_last: bool, after: Any = None
    ) -> "Future[Tensor]":
        """Starts to average a bucket. x must not change until the mean is there.

        `after`: an event of the accelerator, after which x is complete.
        """
        if not self._is_checked:
            self._is_checked = True
            self.communicator.post(lambda node: self._check(node, tensors, x))
            warn_if_unfed(self.settings.compression, self._spec(tensors, x), stacklevel=3)
        step = self.step
        self._used.add(tensors)
        return self.communicator.post(
            lambda node: self._mean(node, name, tensors, x, step, is_last, after),
            num_collectives=1 if self._is_exact else 0,
        )

    async def average(self, node: Node, name: str, tensors: Layout, x: Tensor, step: int) -> Tensor:
        """The mean of a bucket of finite values, for a program that the caller posts."""
        self._used.add(tensors)
        return await self._mean(node, name, tensors, x, step, is_last=False, after=None)

    def finish_step(self) -> bool:
        """All means of a step are there; whether they can be used."""
        is_good = not self._is_spoiled
        if self._is_spoiled:
            self._states = dict(self._before)
        else:
            self._forget_old_buckets()
            self._before = dict(self._states)
        self._used.clear()
        self._found_nonfinite = self._is_spoiled = False
        self.step += 1
        return is_good

    def _forget_old_buckets(self) -> None:
        """Drops the states of buckets whose tensors now come in others."""
        names = {placed[0] for layout in self._used for placed in layout}
        for layout in list(self._states):
            if layout not in self._used and names >= {placed[0] for placed in layout}:
                del self._states[layout]

    async def _mean(
        self,
        node: Node,
        name: str,
        tensors: Layout,
        x: Tensor,
        step: int,
        is_last: bool,
        after: Any,
    ) -> Tensor:
        if after is not None:
            torch.cuda.current_stream(x.device).wait_event(after)
        label = f"{self.label}{name}"
        group = self.settings.architecture.group(node, label)
        if self._is_exact:  # NaN is added like any other value
            return await group.mean(x)
        if not await node.call(is_finite, x):
            self._found_nonfinite = True
            x = torch.zeros_like(x)
        told = None
        if is_last:  # all other buckets of the step have been looked at
            flag = torch.tensor([float(self._found_nonfinite)])
            told = await node.spawn(Group(node, f"{label} nonfinite").max(flag))
        state = await self._state(tensors, x, Group(node, f"{label} regroup"))
        key = self._key.at(step).private(node.rank).child(name)
        reduced = await self.reducer.mean(x, state, key, group)
        self._states[tensors] = reduced.state
        if told is None:
            return reduced.mean
        bad: Tensor = await node.join(told)
        if not float(bad):
            return reduced.mean
        self._is_spoiled = True
        return torch.full_like(reduced.mean, float("nan"))

    async def _state(self, tensors: Layout, x: Tensor, group: Group) -> State:
        """The state of a bucket; a new one, or moved from other buckets, at its first exchange."""
        if tensors in self._states:
            return self._states[tensors]
        spec, names = self._spec(tensors, x), {placed[0] for placed in tensors}
        old = {
            layout: state
            for layout, state in self._states.items()
            if names & {placed[0] for placed in layout}
        }
        if {placed[0] for layout in old for placed in layout} >= names:
            specs = [self._spec(layout, x) for layout in old]
            (state,) = await regroup_here(self.reducer, list(old.values()), specs, [spec], group)
        else:
            state = self.reducer.init(spec, group.size)
        self._states[tensors], self._dtypes[tensors] = state, x.dtype
        return state

    def _spec(self, tensors: Layout, x: Tensor) -> Spec:
        return Spec((tensors[-1][2],), x.dtype, tensors=tensors)

    async def _check(self, node: Node, tensors: Layout, x: Tensor) -> None:
        """Raises if ranks have different settings or tensors."""
        own = {
            **self.settings.described(),
            "tensors": [[name, list(shape)] for name, _, _, shape in tensors],
            "dtype": str(x.dtype),
        }
        group = Group(node, f"{self.label} settings")
        everyone = [json.loads(bytes(row.numpy())) for row in await group.all_gather(packed(own))]
        check_same(everyone, node.rank)

    # State.

    def state_dict(self) -> dict[str, Any]:
        """What this rank keeps from step to step."""
        buckets = [
            {"tensors": layout, "dtype": str(self._dtypes[layout]), "state": state}
            for layout, state in self._states.items()
        ]
        return {
            "version": 1,
            "compression": repr(self.settings.compression),
            "rank": self.communicator.rank,
            "size": self.communicator.size,
            "step": self.step,
            "buckets": buckets,
        }

    def load_state_dict(self, saved: "Mapping[str, Any] | Sequence[Mapping[str, Any]]") -> None:
        """Continues from what this rank saved, or from what all ranks did that there were.

        With those of all ranks, the number of ranks may have changed: what is still to be sent of
        ranks that are gone is sent by others.
        """
        rows = [saved] if isinstance(saved, Mapping) else list(saved)
        own, size = self.communicator.rank, self.communicator.size
        self._check_saved(rows)
        if len(rows) < rows[0]["size"]:  # that of this rank
            states = [row["state"] for row in rows[0]["buckets"]]
        else:
            states = self._resized(rows, own, size)
        first = rows[0]
        layouts = [_layout(row["tensors"]) for row in first["buckets"]]
        self.step = first["step"]
        self._dtypes = {
            layout: _dtype(row["dtype"]) for layout, row in zip(layouts, first["buckets"])
        }
        self._states = dict(zip(layouts, states))
        self._before = dict(self._states)

    def _check_saved(self, rows: Sequence[Mapping[str, Any]]) -> None:
        own, size = self.communicator.rank, self.communicator.size
        written = repr(self.settings.compression)
        for row in rows:
            if row.get("version") != 1 or row["compression"] != written:
                raise ValueError(
                    f"the saved state is of {row.get('compression')}, this is {written}: load it "
                    "with the same compression, or start without it"
                )
        if len(rows) == 1 and rows[0]["size"] > 1:
            rank, count = rows[0]["rank"], rows[0]["size"]
            if (rank, count) != (own, size):
                raise ValueError(
                    f"the saved state is that of rank {rank} of {count}, this is rank {own} of "
                    f"{size}. Give the states of all {count} ranks as a list"
                )
        elif [row["rank"] for row in rows] != list(range(rows[0]["size"])):
            raise ValueError(
                f"states of the ranks {[row['rank'] for row in rows]}, expected those of all "
                f"{rows[0]['size']} ranks in order"
            )

    def _resized(self, rows: Sequence[Mapping[str, Any]], own: int, size: int) -> list[State]:
        buckets = rows[0]["buckets"]
        specs = [
            Spec((row["tensors"][-1][2],), _dtype(row["dtype"]), tensors=_layout(row["tensors"]))
            for row in buckets
        ]
        states = [[bucket["state"] for bucket in row["buckets"]] for row in rows]
        return list(regroup_states(self.reducer, states, specs, specs, size)[own])


def check_same(rows: Sequence[dict[str, Any]], rank: int) -> None:
    """Raises on every rank if the settings of one differ from those of rank 0."""
    for other, row in enumerate(rows):
        for name, value in row.items():
            if value != rows[0].get(name):
                raise DifferentSettingsError(
                    f"rank 0 has {name} = {_shown(rows[0].get(name))}, rank {other} "
                    f"{_shown(value)} (this is rank {rank}): all ranks need the same"
                )


def _shown(value: Any) -> str:
    text = str(value)
    return text if len(text) < 200 else f"{text[:200]} ..."


def packed(row: dict[str, Any]) -> Tensor:
    """Plain values as bytes."""
    return torch.frombuffer(bytearray(json.dumps(row).encode()), dtype=torch.uint8)


def _dtype(text: str) -> torch.dtype:
    found = getattr(torch, text.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"the saved state has a tensor of the unknown dtype {text!r}")
    return found


def _layout(rows: Sequence[Any]) -> Layout:
    return tuple((name, start, stop, tuple(shape)) for name, start, stop, shape in rows)
