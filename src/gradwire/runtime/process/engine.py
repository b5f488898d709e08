"""The engine for real processes: the program of one rank, and what it spawns.

It interprets the same effects as the simulator (`runtime/virtual.py`), for one node, on the thread
that calls `run`. Programs take turns: each runs until it awaits something that is not there yet.
Gradients are computed when no program can go on, so that what can be sent leaves before. Time is
the seconds since the engine was made.

A rank is lost when its connection breaks without a goodbye. Who waits for a message from it gets
`PeerLost` once everything it sent has been read.
"""

import time
from collections import defaultdict, deque
from collections.abc import Callable, Coroutine
from heapq import heappop, heappush
from itertools import count
from math import inf
from typing import Any, TypeVar

from gradwire.core.errors import PeerLost
from gradwire.core.node import (
    Call,
    Compute,
    Framed,
    Join,
    Members,
    Membership,
    Node,
    Now,
    Recv,
    RecvAny,
    Send,
    Sleep,
    Spawn,
    Tag,
    Task,
    Watch,
)
from gradwire.runtime import deadlock
from gradwire.runtime.calls import Calls
from gradwire.runtime.ledger import Ledger
from gradwire.runtime.mailboxes import Mailboxes
from gradwire.runtime.process.frames import tag_hash
from gradwire.runtime.process.transport import ARRIVED, DONE, JOINED, LOST, Arrival, Transport
from gradwire.runtime.requests import Evaluator, no_evaluator

R = TypeVar("R")
Program = Callable[[Node], Coroutine[Any, Any, R]]


class StuckError(RuntimeError):
    """Nothing has happened for too long."""


class ProcessEngine:
    """Runs this rank's program. All ranks make theirs with the same `job`.

    Ranks 0 .. num_workers - 1 are workers. Messages of another job are not read: those of an
    earlier one are dropped, those of a later one kept for it. `timeout_s` is how long nothing may
    happen while programs wait.
    """

    def __init__(
        self,
        transport: Transport,
        num_workers: int | None = None,
        *,
        evaluate: Evaluator = no_evaluator,
        timeout_s: float = 300.0,
        job: int = 0,
    ) -> None:
        self.rank, self.size = transport.rank, transport.size
        self.num_workers = self.size if num_workers is None else num_workers
        assert 1 <= self.num_workers <= self.size, f"{num_workers} workers on {self.size} nodes"
        self.ledger = Ledger(self.size)  # of what this rank sent
        self.compute_s = 0.0  # seconds in gradients
        self.wait_s = 0.0  # seconds in which every program waited
        self.num_effects = 0
        self.job = job
        self._transport = transport
        self._evaluate = evaluate
        self._timeout_s = timeout_s
        self._calls = Calls(1)
        self._start_s = time.monotonic()
        mailboxes = Mailboxes(1)
        self._mailboxes = mailboxes
        # By sender and hash of the tag; of tags alone for those that take any sender.
        self._inbox, self._waiting = mailboxes.inbox[0], mailboxes.waiting[0]
        self._waiting_any = mailboxes.waiting_any[0]
        self._order = count()
        self._ready: deque[tuple[Task[Any], Any, Exception | None]] = deque()
        self._to_compute: deque[tuple[Task[Any], Any]] = deque()
        self._timers: list[tuple[float, int, Task[Any], Any]] = []  # a heap
        self._watchers: dict[Tag, None] = {}
        self._tasks: dict[Task[Any], None] = {}  # those that have not ended, in order
        self._lost: dict[int, tuple[float, str]] = {}  # when that was noticed, and why
        # Who said goodbye, and because of the loss of whom (-1: of nobody).
        self._left: dict[int, int] = {}
        self._num_runs = 0
        self._runs_done: defaultdict[int, int] = defaultdict(int)  # by rank
        for arrival in transport.kept(job):
            self._arrive(arrival)

    @property
    def call_s(self) -> defaultdict[str, float]:
        """Wall-clock seconds in `call` and `share` by function: coding, averaging, updating."""
        return self._calls.seconds

    @property
    def now(self) -> float:
        return time.monotonic() - self._start_s

    @property
    def lost(self) -> frozenset[int]:
        """The ranks that are gone."""
        return frozenset(self._lost)

    def run(self, program: Program[R]) -> R | None:
        """Runs a worker's program to its end, and returns its result.

        Programs that it spawned and that have not ended go on serving the others until all
        workers are done with this run; then they are closed. The program of another role (a
        server) ends in the same way, and its result is None. What nobody has read stays for the
        next run.
        """
        self._num_runs += 1
        main = self._spawn(program(Node(self.rank, self.num_workers)))
        is_worker = self.rank < self.num_workers
        is_told = not is_worker  # whether the others know that this one is done
        try:
            while True:
                self._go_on()
                if main.done and not is_told:
                    is_told = True
                    self._tell_done()
                if main.done and not self._tasks:
                    break
                if (main.done or not is_worker) and self._are_done():
                    break
                self._wait()
            return main.result
        finally:
            for task in self._tasks:
                task.program.close()
            self._tasks.clear()
            self._ready.clear()
            self._to_compute.clear()
            self._timers.clear()
            self._mailboxes.dismiss()
            self._watchers.clear()

    # The loop.

    def _go_on(self) -> None:
        """Everything that can be done without waiting."""
        while True:
            while self._ready:
                self._step(*self._ready.popleft())
            if self._take(0.0) or self._expire():
                continue
            if not self._to_compute:
                return
            task, request = self._to_compute.popleft()
            self._compute(task, request)

    def _wait(self) -> None:
        """Until something happens."""
        began = time.monotonic()
        limit = began + self._timeout_s
        due = self._timers[0][0] if self._timers else inf
        if not self._take(max(0.0, min(limit, due) - began)) and due > limit:
            raise StuckError(self._stuck())
        self.wait_s += time.monotonic() - began

    def _take(self, timeout_s: float) -> bool:
        """Takes in what has arrived; whether there was something."""
        arrival = self._transport.next(timeout_s)
        if arrival is None:
            return False
        while arrival is not None:
            self._arrive(arrival)
            arrival = self._transport.next(0.0)
        return True

    def _expire(self) -> bool:
        """Wakes who has slept or waited long enough; whether there was anyone."""
        now, has_woken = time.monotonic(), False
        while self._timers and self._timers[0][0] <= now:
            _, _, task, effect = heappop(self._timers)
            if task.waiting_for is effect:
                if isinstance(effect, RecvAny):
                    del self._waiting_any[tag_hash(effect.tag)]
                self._wake(task)
                has_woken = True
        return has_woken

    def _compute(self, task: Task[Any], request: Any) -> None:
        began = time.perf_counter()
        try:
            (result,) = self._evaluate([request])
        except Exception as error:
            self._wake(task, None, error)
        else:
            self._wake(task, result)
        self.compute_s += time.perf_counter() - began

    def _wake(self, task: Task[Any], value: Any = None, failure: Exception | None = None) -> None:
        task.waiting_for = None
        self._ready.append((task, value, failure))

    def _spawn(self, program: Coroutine[Any, Any, Any]) -> Task[Any]:
        task = Task(self.rank, program)
        self._tasks[task] = None
        self._ready.append((task, None, None))
        return task

    def _step(self, task: Task[Any], value: Any, failure: Exception | None) -> None:
        """Runs a program until it must wait. `failure` is raised where it awaits an effect."""
        send, throw = task.program.send, task.program.throw
        while True:
            try:
                effect = send(value) if failure is None else throw(failure)
            except StopIteration as end:
                task.done, task.result = True, end.value
                del self._tasks[task]
                for joiner in task.joiners:
                    self._wake(joiner, end.value)
                return
            except Exception as error:
                error.add_note(f"in the program of rank {self.rank} at {self.now:.6g} s")
                raise
            self.num_effects += 1
            value = failure = None
            try:
                is_answered, value = self._answer(task, effect)
            except Exception as error:
                failure = error
                continue
            if not is_answered:
                return

    def _answer(self, task: Task[Any], effect: Any) -> tuple[bool, Any]:
        """Whether an effect has an answer already, and that answer; else the task waits."""
        kind = type(effect)
        if kind is Send:
            self._send(effect)
            return True, None
        if kind is Recv:
            return self._recv(task, effect)
        if kind is Call:
            return True, self._calls.run(effect)[0]
        if kind is Compute:
            task.waiting_for = effect
            self._to_compute.append((task, effect.request))
            return False, None
        if kind is RecvAny:
            return self._recv_any(task, effect)
        if kind is Now:
            return True, self.now
        if kind is Sleep:
            if not effect.seconds >= 0:
                raise ValueError(f"rank {self.rank} sleeps for {effect.seconds} s, below zero")
            if effect.seconds == 0:  # lets the others run
                self._wake(task)
            else:
                self._alarm(task, effect, effect.seconds)
            return False, None
        if kind is Members:
            return True, frozenset(range(self.num_workers)) - self._lost.keys()
        if kind is Watch:
            self._watchers[effect.tag] = None
            return True, None
        if kind is Spawn:
            return True, self._spawn(effect.program)
        if kind is Join:
            if effect.task.done:
                return True, effect.task.result
            effect.task.joiners.append(task)
            task.waiting_for = effect
            return False, None
        raise TypeError(f"rank {self.rank} awaited {effect!r}, which is no effect")

    # Effects.

    def _send(self, effect: Send) -> None:
        dst = effect.dst
        if not 0 <= dst < self.size:
            raise ValueError(
                f"rank {self.rank} sends to {dst}; there are ranks 0 .. {self.size - 1}"
            )
        tag = tag_hash(effect.tag)
        if dst != self.rank:
            self.ledger.record(self.rank, dst, effect.nbytes, effect.label)
            if dst in self._lost or dst in self._left:
                return
        self._transport.send(dst, self.job, tag, effect.data)

    def _recv(self, task: Task[Any], effect: Recv) -> tuple[bool, Any]:
        key = (effect.src, tag_hash(effect.tag))
        box = self._inbox.get(key)
        if box:
            message = box.popleft()[1]
            if not box:
                del self._inbox[key]
            return True, message
        if effect.src in self._lost or effect.src in self._left:
            raise self._peer_lost(effect.src)
        if self._waiting.setdefault(key, task) is not task:
            what = f"{effect.tag!r} from {effect.src}"
            raise RuntimeError(f"rank {self.rank} already waits for {what}")
        task.waiting_for = effect
        return False, None

    def _recv_any(self, task: Task[Any], effect: RecvAny[Any]) -> tuple[bool, Any]:
        timeout_s, tag = effect.timeout_s, tag_hash(effect.tag)
        if timeout_s is not None and not 0 <= timeout_s < inf:
            raise ValueError(
                f"rank {self.rank} waits for {timeout_s} s; a timeout is finite and >= 0"
            )
        self._take(0.0)
        found = self._mailboxes.take_any(0, tag)
        if found is not None or timeout_s == 0:
            return True, found
        if self._waiting_any.setdefault(tag, task) is not task:
            raise RuntimeError(f"rank {self.rank} already waits for {effect.tag!r} from anyone")
        task.waiting_for = effect
        if timeout_s is not None:
            # An effect of its own, by which to know this wait from a later one.
            self._alarm(task, RecvAny(effect.tag, timeout_s), timeout_s)
        return False, None

    def _alarm(self, task: Task[Any], effect: Any, seconds: float) -> None:
        task.waiting_for = effect
        heappush(self._timers, (time.monotonic() + seconds, next(self._order), task, effect))

    # What happens elsewhere.

    def _arrive(self, arrival: Arrival) -> None:
        kind, src, job, tag, message, time_s, _ = arrival
        if kind in (ARRIVED, DONE):
            if job > self.job:
                self._transport.keep(arrival)
            elif job == self.job and kind == DONE:
                self._runs_done[src] = max(self._runs_done[src], tag)
            elif job == self.job:
                self._deliver(src, tag, message)
            return
        if kind == JOINED:
            self._lost.pop(src, None)
            self._left.pop(src, None)
            self._tell_watchers(Membership(src, True, self.now if time_s is None else time_s))
            return
        if kind == LOST:
            if src in self._lost or src in self._left:
                return
            now = self.now
            self._lost[src] = now, message
            self._tell_watchers(Membership(src, False, now if time_s is None else time_s))
        else:
            self._left[src] = tag - 1
        # Who waits for it waits no longer: what it sent before has been delivered.
        for key in [key for key in self._waiting if key[0] == src]:
            self._wake(self._waiting.pop(key), None, self._peer_lost(src))

    def _tell_watchers(self, change: Membership) -> None:
        if change.rank < self.num_workers:
            for watcher in self._watchers:
                self._deliver(self.rank, tag_hash(watcher), Framed(change))

    def _deliver(self, src: int, tag: int, message: Any) -> None:
        task = self._waiting.pop((src, tag), None)
        if task is not None:
            self._wake(task, message)
            return
        task = self._waiting_any.pop(tag, None)
        if task is not None:
            self._wake(task, (src, message))
            return
        self._inbox.setdefault((src, tag), deque()).append((next(self._order), message))

    def _peer_lost(self, rank: int) -> PeerLost:
        """Why nothing will come from this rank."""
        cause = self._left.get(rank, -1)
        if cause not in (-1, rank, self.rank):
            why = f"rank {rank} says so, and left because of it"
            noticed_s, rank = self.now, cause
        else:
            noticed_s, why = self._lost.get(rank, (self.now, "it said goodbye"))
        error = PeerLost(rank, noticed_s, noticed_s)
        error.add_note(f"rank {rank}: {why}")
        return error

    # The end of a run.

    def _tell_done(self) -> None:
        for peer in range(self.size):
            if peer != self.rank and peer not in self._lost and peer not in self._left:
                self._transport.send_done(peer, self.job, self._num_runs)

    def _are_done(self) -> bool:
        """Whether all other workers are done with this run, or gone."""
        return all(
            self._runs_done[peer] >= self._num_runs or peer in self._lost or peer in self._left
            for peer in range(self.num_workers)
            if peer != self.rank
        )

    def _stuck(self) -> str:
        # Of the others' inboxes nothing is known here.
        inboxes = [*({} for _ in range(self.rank)), self._inbox]
        gone = {rank: noticed_s for rank, (noticed_s, _) in self._lost.items()}
        _, *lines = deadlock.report(self._tasks, inboxes, gone).splitlines()
        lines.insert(0, f"rank {self.rank}: nothing has happened for {self._timeout_s:g} s:")
        return "\n".join(lines)
