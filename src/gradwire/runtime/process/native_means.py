"""Means that the transport forms by a collective of its own.

Such collectives match by their order, which must be the same on all ranks. The order in which
programs continue differs between ranks; the order of the actions of one program does not. So
programs take turns in the order in which they were spawned: one may start a collective when all
that were spawned before it, and what those spawned, have ended. A program that has not joined all
that it spawned gets none; that, too, holds on all ranks or on none.

Posted programs (`posting.py`) take turns in the order in which they were posted. One that may start
a single collective lets the next have its turn once it has started it.
"""

from collections import defaultdict
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
Path = tuple[int, ...]  # the number of a program among those of its parent, after the parent's path


class NativeMeans:
    """The collectives under way. `start_mean` starts one and returns its number, or None where
    that is not possible for such a tensor. It is None itself if the transport has none."""

    def __init__(
        self,
        start_mean: Callable[[Collective], int | None] | None,
        peers: PeerStatus,
        timers: Timers,
        resume: Callable[[Task, Any, Exception | None], None],
    ) -> None:
        self._start_mean = start_mean
        self._peers, self._timers, self._resume = peers, timers, resume
        self.failure: Exception | None = None  # raised if no other reason is found in time
        self._paths: dict[Task, Path] = {}  # of the programs that have not ended
        self._num_spawned: defaultdict[Task, int] = defaultdict(int)
        self._unjoined: defaultdict[Task, set[Task]] = defaultdict(set)
        self._waiting: dict[Path, tuple[Task, Collective]] = {}  # for their turn
        self._started: dict[int, tuple[Task, Collective]] = {}  # by number
        self._num_posted = 0
        self._left: dict[Task, int] = {}  # collectives that posted programs may still start

    @property
    def are_offered(self) -> bool:
        return self._start_mean is not None

    def begin(self, main: Task) -> None:
        """A run of this program begins."""
        self._paths[main] = ()

    def begin_posting(self) -> None:
        """Programs will be posted."""
        self._num_posted = 0

    def post(self, task: Task, most: int | None) -> None:
        """A program was posted that starts at most one collective, or none, or any number."""
        if not self.are_offered:
            return
        if most != 0:
            self._paths[task] = (self._num_posted,)
            self._num_posted += 1
        if most is not None:
            self._left[task] = most

    def spawn(self, task: Task, spawned: Task) -> None:
        if not self.are_offered:
            return
        if task in self._left:  # what it may start, it starts itself
            self._left[spawned] = 0
            return
        self._paths[spawned] = (*self._paths[task], self._num_spawned[task])
        self._num_spawned[task] += 1
        self._unjoined[task].add(spawned)

    def join(self, task: Task, spawned: Task) -> None:
        if task in self._unjoined:
            self._unjoined[task].discard(spawned)

    def end(self, task: Task) -> None:
        """A program has ended: it may be the turn of another."""
        self._unjoined.pop(task, None)
        self._num_spawned.pop(task, None)
        self._left.pop(task, None)
        self._give_up_turn(task)

    def _give_up_turn(self, task: Task) -> None:
        self._paths.pop(task, None)
        if self._waiting:
            self._start_next()

    def start(self, task: Task, effect: Collective) -> bool:
        """Whether the program waits for a collective now, or for its turn to start one."""
        if self._start_mean is None or self._unjoined[task] or self._left.get(task) == 0:
            return False
        if self._peers.gone:
            raise self._peers.error(min(self._peers.gone))
        path = self._paths[task]
        if self._has_turn(path):
            return self._start(task, effect)
        task.waiting_for = effect
        self._waiting[path] = (task, effect)
        return True

    def _has_turn(self, path: Path) -> bool:
        """Whether all programs before this one have ended, but for those that spawned it."""
        return not any(
            other < path and other != path[: len(other)] for other in self._paths.values()
        )

    def _start(self, task: Task, effect: Collective) -> bool:
        assert self._start_mean is not None
        number = self._start_mean(effect)
        if number is not None:
            self._started[number] = (task, effect)
            task.waiting_for = effect
        if task in self._left:
            self._left[task] -= 1
            if self._left[task] == 0:
                self._give_up_turn(task)
        return number is not None

    def _start_next(self) -> None:
        """Starts the collectives whose turn it is."""
        for path in sorted(self._waiting):
            if not self._has_turn(path):
                return
            task, effect = self._waiting.pop(path)
            if task.waiting_for is effect and not self._start(task, effect):
                self._resume(task, None, None)

    def finish(self, number: int, outcome: Tensor | Exception) -> None:
        """The transport reports the mean, or an error."""
        task, effect = self._started.pop(number, (None, None))
        if task is None or effect is None or task.waiting_for is not effect:
            return  # no program waits for it any more
        if not isinstance(outcome, Exception):
            self._resume(task, outcome, None)
        elif self._peers.gone:
            self._resume(task, None, self._peers.error(min(self._peers.gone)))
        else:
            # A rank that was lost shows in other connections, too, and by name.
            self.failure = outcome
            outcome.add_note("a native all-reduce failed, and no rank is known to be lost")
            self._timers.set(task, _GRACE_S)

    def peer_lost(self, rank: int) -> None:
        """Collectives that wait for this rank get some time to end."""
        for task in {*self._paths, *self._left}:
            if type(task.waiting_for) is Collective:
                self.failure = self._peers.error(rank)
                self._timers.set(task, _GRACE_S)

    def clear(self) -> None:
        """Forgets what was under way at the end of a run."""
        self._started.clear()
        self._waiting.clear()
        self._paths.clear()
        self._unjoined.clear()
        self._num_spawned.clear()
        self._left.clear()
