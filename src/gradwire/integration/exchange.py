"""Means of gradients over all ranks, bucket by bucket, through a compression.

A bucket is a flat vector with the names and shapes of the tensors in it. Its exchange is the same
program as in simulated runs, posted to the communicator's thread. The state of compression belongs
to the tensors: where they come in other buckets than before (DDP rebuilds its buckets after the
first iteration), all ranks move it.

With a GradScaler gradients come multiplied by its scale, which changes. They are divided by it
before they are compressed, and means are multiplied by it, so that what is kept from step to step
has one unit.

NaN and infinity, which mixed precision produces while the loss scale is too high, must neither stop
a run nor enter a residual. A rank that finds them sends zeros instead, and with the last bucket of
a step all ranks tell each other. If any rank had some, that bucket's mean is NaN on all ranks, as
it would be without compression, so a GradScaler skips the step everywhere. The state of compression
stays that of the step before.
"""

import json
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from gradwire.compression.feedback.ef import warn_if_unfed
from gradwire.compression.identity import Identity
from gradwire.core.codec import Algebra, State, is_finite
from gradwire.core.errors import DifferentSettingsError
from gradwire.core.group import Group
from gradwire.core.key import Key
from gradwire.core.lifted import lift
from gradwire.core.node import Node
from gradwire.core.spec import Placed, Spec
from gradwire.core.tree import tensors_of
from gradwire.integration.communicator import Communicator
from gradwire.integration.saved_states import check_ranks, checked_states, dtype_of
from gradwire.integration.settings import Settings
from gradwire.training.regroup import regroup_here, regroup_states
from gradwire.warning import GradwireWarning

Layout = tuple[Placed, ...]  # the tensors of a bucket, in order

_LOADED_LATER = (
    "the state of compression was loaded on some ranks only, after the first step: rank {} has "
    "loaded {} states and is in step {}, rank {} has loaded {} and is in step {}. Load it on every "
    "rank, of each its own state_dict, or on none"
)
_LOADED_BY_SOME = (
    "the state of compression (residuals, momenta) was loaded on some ranks only, so all begin "
    "without. To keep it, save the state_dict of each rank, and load it there"
)


class Exchange:
    """The exchanges of one model's gradients. All ranks make theirs with the same settings."""

    def __init__(
        self,
        communicator: Communicator,
        settings: Settings,
        label: str,
        scaler: GradScaler | None = None,
    ) -> None:
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
        self._agreed: Mapping[str, Any] = {}  # besides the settings
        self._is_checked = self._has_begun = False
        self._scaler = scaler
        self._scale = 1.0  # of the gradients in this step
        self._has_loaded = False
        self._num_loads = 0  # since the first step
        self._has_dropped = False  # this rank, what it had loaded
        self._is_exact = isinstance(settings.compression, Identity)

    def agree_on(self, described: Mapping[str, Any]) -> None:
        """What all ranks must have alike besides the settings: compared before the next mean."""
        self._agreed, self._is_checked = described, False

    def mean(
        self, name: str, tensors: Layout, x: Tensor, *, is_last: bool, after: Any = None
    ) -> "Future[Tensor]":
        """Starts to average a bucket. x must not change until the mean is there.

        `after`: an event of the accelerator, after which x is complete.
        """
        if not self._is_checked:
            self._is_checked = True
            # Before anything else is sent: what another method sends cannot be decoded. If it
            # fails, so does everything that is posted after it.
            wait([self.communicator.post(lambda node: self._check(node, tensors, x))])
            if not self._has_begun:
                self._has_begun = True
                wait([self.communicator.post(self._begin)])
                if self._has_dropped:
                    warnings.warn(_LOADED_BY_SOME, GradwireWarning, stacklevel=3)
                warn_if_unfed(self.settings.compression, self._spec(tensors, x), stacklevel=3)
        step = self.step
        if self._scaler is not None and not self._used:  # the first bucket of a step
            self._scale = self._scaler.get_scale()
        self._used.add(tensors)
        return self.communicator.post(
            lambda node: self._mean(node, name, tensors, x, step, is_last, after),
            num_collectives=self.num_collectives,
            borrowed=x,
        )

    @property
    def num_collectives(self) -> int:
        """Native all-reduces that one of its means may take."""
        codec = self.reducer.codec_within(0)
        is_sum = codec is not None and codec.algebra is Algebra.LINEAR
        return 1 if self._is_exact or is_sum else 0

    async def average(self, node: Node, name: str, tensors: Layout, x: Tensor, step: int) -> Tensor:
        """The mean of a bucket of finite values, for a program that the caller posts."""
        self._used.add(tensors)
        return await self._mean(node, name, tensors, x, step, is_last=False, after=None)

    def check_alive(self) -> None:
        """Raises why exchanges have ended, if they have: another rank was lost, or failed."""
        failure = self.communicator.engine.failure
        if failure is not None:
            raise failure

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
        scale = self._scale
        if scale != 1.0:
            x = await node.call(torch.mul, x, 1.0 / scale)
        if not await node.call(is_finite, x):
            self._found_nonfinite = True
            x = torch.zeros_like(x)
        comparing = None
        if is_last:  # all other buckets of the step have been looked at
            comparing = await node.spawn(self._compare_steps(node, f"{label} step"))
        state = await self._state(tensors, x, self._exact_group(node, f"{label} regroup"))
        key = self._key.at(step).private(node.rank).child(name)
        reduced = await self.reducer.mean(x, state, key, group)
        self._states[tensors] = reduced.state
        mean = _apart(reduced.mean, reduced.state)
        if scale != 1.0:
            mean = await node.call(mean.mul_, scale)
        if comparing is None or not await node.join(comparing):
            return mean
        self._is_spoiled = True
        return torch.full_like(mean, float("nan"))

    async def _compare_steps(self, node: Node, label: str) -> bool:
        """Whether some rank has found NaN or infinity in this step. Raises if states were loaded on
        some ranks only."""
        own = [float(self._found_nonfinite), float(self._num_loads), float(self.step)]
        group = self._exact_group(node, label)
        everyone = await group.all_gather(torch.tensor(own, dtype=torch.float64))
        rows = [tuple(map(int, row)) for row in everyone]
        for other, row in enumerate(rows):
            if row[1:] != rows[0][1:]:
                ranks = self.communicator.ranks
                raise DifferentSettingsError(
                    _LOADED_LATER.format(ranks[0], *rows[0][1:], ranks[other], *row[1:])
                )
        return any(row[0] for row in rows)

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
        if old:  # tensors that are new begin on their own
            known = {placed[0] for layout in old for placed in layout}
            for name, start, stop, shape in tensors:
                if name not in known:
                    alone = ((name, 0, stop - start, shape),)
                    old[alone] = self.reducer.init(self._spec(alone, x), group.size)
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
            **self._agreed,
            "tensors": [[name, list(shape)] for name, _, _, shape in tensors],
            "dtype": str(x.dtype),
        }
        group = self._exact_group(node, f"{self.label} settings")
        await compare(own, group, self.communicator.ranks)

    def _exact_group(self, node: Node, label: str) -> Group:
        """For what is not a gradient. Workers with servers have no connections among each other."""
        if self.settings.num_servers:
            return self.settings.architecture.group(node, label)
        return Group(node, label)

    async def _begin(self, node: Node) -> None:
        """All ranks begin with the same step, and all with what was saved or none.

        Scripts of Horovod save and load on rank 0 only, and broadcast the model.
        """
        group = self.settings.architecture.group(node, f"{self.label} begin")
        own = [self.step, self._has_loaded]
        everyone = await group.all_gather(torch.tensor(own, dtype=torch.float64))
        self.step = max(int(row[0]) for row in everyone)
        if len({bool(row[1]) for row in everyone}) > 1:
            self._has_dropped = bool(tensors_of(list(self._states.values())))
            self._states, self._before = {}, {}

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
        rows = checked_states(saved, self.settings.compression)
        if not rows:
            return
        own, size = self.communicator.rank, self.communicator.size
        check_ranks(rows, own, size)
        if len(rows) < rows[0]["size"]:  # that of this rank
            states = [row["state"] for row in rows[0]["buckets"]]
        else:
            states = self._resized(rows, own, size)
        first, self._has_loaded = rows[0], True
        self._num_loads += self._has_begun
        layouts = [_layout(row["tensors"]) for row in first["buckets"]]
        self.step = first["step"]
        self._dtypes = {
            layout: dtype_of(row["dtype"]) for layout, row in zip(layouts, first["buckets"])
        }
        self._states = dict(zip(layouts, states))
        self._before = dict(self._states)

    def _resized(self, rows: Sequence[Mapping[str, Any]], own: int, size: int) -> list[State]:
        buckets = rows[0]["buckets"]
        if not buckets:  # nothing was kept
            return []
        specs = [
            Spec((row["tensors"][-1][2],), dtype_of(row["dtype"]), tensors=_layout(row["tensors"]))
            for row in buckets
        ]
        states = [[bucket["state"] for bucket in row["buckets"]] for row in rows]
        return list(regroup_states(self.reducer, states, specs, specs, size)[own])


def _apart(mean: Tensor, state: State) -> Tensor:
    """The mean in memory of its own: users clip and unscale gradients in place, and some methods
    remember the mean."""
    place = mean.untyped_storage().data_ptr()
    is_kept = any(x.untyped_storage().data_ptr() == place for x in tensors_of(state))
    return mean.clone() if is_kept else mean


async def compare(own: dict[str, Any], group: Group, ranks: Sequence[int]) -> None:
    """Raises on every rank if ranks have different settings.

    `ranks`: those that users know, by rank within the group.
    """
    rows = [json.loads(bytes(row.cpu().numpy())) for row in await group.all_gather(packed(own))]
    check_same(rows, group.rank, ranks)


def check_same(rows: Sequence[dict[str, Any]], rank: int, ranks: Sequence[int]) -> None:
    """Raises on every rank if the settings of one differ from those of the first."""
    for other, row in enumerate(rows):
        for name, value in row.items():
            if value != (expected := rows[0].get(name)):
                first, second = _different(expected, value)
                raise DifferentSettingsError(
                    f"rank {ranks[0]} has {name} = {_shown(first)}, rank {ranks[other]} "
                    f"{_shown(second)} (this is rank {ranks[rank]}): all ranks need the same"
                )


def _different(first: Any, second: Any) -> tuple[Any, Any]:
    """Of long lists the first items that differ."""
    if isinstance(first, list) and isinstance(second, list):
        for pair in zip(first, second):
            if pair[0] != pair[1]:
                return pair
        return f"{len(first)} items", f"{len(second)} items"
    return first, second


def _shown(value: Any) -> str:
    text = str(value)
    return text if len(text) < 200 else f"{text[:200]} ..."


def packed(row: dict[str, Any]) -> Tensor:
    """Plain values as bytes."""
    return torch.frombuffer(bytearray(json.dumps(row).encode()), dtype=torch.uint8)


def _layout(rows: Sequence[Any]) -> Layout:
    return tuple((name, start, stop, tuple(shape)) for name, start, stop, shape in rows)
