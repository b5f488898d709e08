"""Means by the all-reduce of the process group itself (gloo or nccl), beside the messages.

They run in their own process group, since their order is independent of that of messages, and in
threads of gloo. Their results arrive through the same queue as messages.
"""

import atexit
import threading
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from time import monotonic
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire import kernels
from gradwire.runtime.process.transport import FINISHED, Arrival

_EXIT_S = 10.0  # at the end of the process: how long to wait for collectives that are under way


class FinishedMean(NamedTuple):
    """An all-reduce that has ended, perhaps with an error."""

    number: int
    work: dist.Work
    total: Tensor
    time_s: float | None = None  # when it ended

    def arrival(self, rank: int) -> Arrival:
        message: Any = self.total
        try:
            self.work.wait()  # on an accelerator: what comes after it there
        except RuntimeError as error:
            message = error
        return Arrival(FINISHED, rank, tag=self.number, message=message, time_s=self.time_s)


class GroupMeans:
    """`group` is for tensors on the host, `device_group` for others; None: there is none."""

    def __init__(
        self,
        group: Any,
        device_group: dist.ProcessGroup | None,
        rank: int,
        size: int,
        put: Callable[[Arrival | FinishedMean], None],
        adds_halves: bool = False,
    ) -> None:
        """`adds_halves`: float16 too, in its own precision."""
        self.num_started = 0
        self._group, self._device_group = group, device_group
        self._rank, self._size = rank, size
        self._put = put
        self._numbers = count(1)
        self._dtypes = (torch.float32, torch.float64, *((torch.float16,) if adds_halves else ()))
        self._under_way: set[int] = set()
        self._ended = threading.Condition()  # one of them
        _all.add(self)

    def start(self, x: Tensor) -> int | None:
        """Starts an all-reduce and returns its number. None: not possible for such tensors."""
        group = self._group
        if x.device.type != "cpu" and self._device_group is not None:
            group = self._device_group
        if group is None or x.dtype not in self._dtypes:
            return None
        number = next(self._numbers)
        self.num_started += 1
        # Divided before: one pass, and sums that stay in range.
        total = kernels.empty(x.numel(), x.dtype, x.device).view(x.shape)
        torch.div(x.detach(), self._size, out=total)
        try:
            work = group.allreduce([total])
        except RuntimeError as error:
            self._put(Arrival(FINISHED, self._rank, tag=number, message=error))
            return number
        finished = FinishedMean(number, work, total)

        def done(_: Any) -> None:
            self._put(finished._replace(time_s=monotonic()))
            with self._ended:
                self._under_way.discard(number)
                self._ended.notify_all()

        with self._ended:
            self._under_way.add(number)
        work.get_future().add_done_callback(done)
        return number

    def abort(self) -> None:
        """Ends a collective that may be under way, and that would never end."""
        abort = getattr(self._group, "abort", None)  # torch 2.6 has none
        if abort is not None:
            with suppress(RuntimeError):
                abort()

    def wait_all(self, seconds: float) -> None:
        """Waits until no collective is under way."""
        with self._ended:
            self._ended.wait_for(lambda: not self._under_way, seconds)


_all: "WeakSet[GroupMeans]" = WeakSet()


@atexit.register
def _wait_at_exit() -> None:
    """A collective of gloo that fails while Python ends aborts the process, since its thread cannot
    report it any more. One waits for a rank that is lost until the process of that rank ends."""
    until = monotonic() + _EXIT_S
    for means in list(_all):
        means.wait_all(max(0.0, until - monotonic()))
