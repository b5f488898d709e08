"""Means that the transport forms by a collective of its own.

Such collectives match by their order, which must be the same on all ranks. The order in which
programs continue differs between ranks; the order of the actions of one program does not. So only
the main program may start one, and only while it has joined all programs that it spawned: this
holds on all ranks or on none.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from gradwire.core.node import Collective, RunningProgram
from gradwire.runtime.process.peers import PeerStatus
from gradwire.runtime.process.timers import Timers

# How long a failed collective waits for the news that a rank is lost, and how long one that has not
# ended waits after such news: the rank may have left after its own part.
_GRACE_S = 2.0

Task = RunningProgram[Any]


class NativeMeans:
    """The collectives under way. `start_mean` starts one; None: the transport has none."""

    def __init__(
        self,
        start_mean: Callable[[Tensor], int | None] | None,
        peers: PeerStatus,
        timers: Timers,
        resume: Callable[[Task, Any, Exception | None], None],
    ) -> None:
        self._start_mean = start_mean
        self._peers, self._timers, self._resume = peers, timers, resume
        self.failure: Exception | None = None  # raised if no other reason is found in time
        self._main: Task | None = None
        self._unjoined: set[Task] = set()  # spawned by the main program
        self._started: dict[int, Collective] = {}  # by number

    @property
    def are_offered(self) -> bool:
        return self._start_mean is not None

    def begin(self, main: Task) -> None:
        """A run of this program begins."""
        self._main = main

    def spawn(self, task: Task, spawned: Task) -> None:
        if task is self._main:
            self._unjoined.add(spawned)

    def join(self, task: Task, spawned: Task) -> None:
        if task is self._main:
            self._unjoined.discard(spawned)

    def start(self, task: Task, effect: Collective) -> bool:
        """Whether a collective was started, for which the program waits now."""
        if self._start_mean is None or task is not self._main or self._unjoined:
            return False
        if self._peers.gone:
            raise self._peers.error(min(self._peers.gone))
        number = self._start_mean(effect.data)
        if number is None:  # the transport has none for such tensors
            return False
        self._started[number] = effect
        task.waiting_for = effect
        return True

    def finish(self, number: int, outcome: Tensor | Exception) -> None:
        """The transport reports the mean, or an error."""
        effect, main = self._started.pop(number, None), self._main
        if main is None or effect is None or main.waiting_for is not effect:
            return  # no program waits for it any more
        if not isinstance(outcome, Exception):
            self._resume(main, outcome, None)
        elif self._peers.gone:
            self._resume(main, None, self._peers.error(min(self._peers.gone)))
        else:
            # A rank that was lost shows in other connections, too, and by name.
            self.failure = outcome
            outcome.add_note("a native all-reduce failed, and no rank is known to be lost")
            self._timers.set(main, _GRACE_S)

    def peer_lost(self, rank: int) -> None:
        """A collective that waits for this rank gets some time to end."""
        main = self._main
        if main is not None and type(main.waiting_for) is Collective:
            self.failure = self._peers.error(rank)
            self._timers.set(main, _GRACE_S)

    def clear(self) -> None:
        """Forgets what was under way at the end of a run."""
        self._started.clear()
        self._unjoined.clear()
        self._main = None
