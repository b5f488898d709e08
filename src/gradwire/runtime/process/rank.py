"""One rank as interpreter: how it answers effects, and what it does with what arrives.

Nothing here waits. Programs that can continue are in a queue, from which the engine takes them
(`engine.py`). A rank is lost when its connection breaks without a goodbye. A program that waits for
a message from it gets `PeerLost` once everything it sent has been read.
"""

import time
from collections import deque
from collections.abc import Callable
from typing import Any

from gradwire.core.errors import RefusedError
from gradwire.core.layout import NodeLayout
from gradwire.core.node import (
    Begin,
    Collective,
    Compute,
    CurrentMembers,
    Framed,
    Join,
    Membership,
    Now,
    Open,
    Reach,
    Recv,
    RecvAny,
    Send,
    Spawn,
)
from gradwire.core.wire import HEADER_NBYTES
from gradwire.runtime.interpreter import checks
from gradwire.runtime.interpreter.calls import Calls
from gradwire.runtime.interpreter.interpreter import WAITING, Interpreter, Task
from gradwire.runtime.ledger import Ledger
from gradwire.runtime.process.computation import ProcessComputation
from gradwire.runtime.process.frames import tag_hash
from gradwire.runtime.process.native_means import NativeMeans
from gradwire.runtime.process.peers import PeerStatus
from gradwire.runtime.process.spans import ProcessSpans
from gradwire.runtime.process.timers import Timers
from gradwire.runtime.process.transport import (
    ARRIVED,
    DONE,
    FINISHED,
    GOODBYE,
    JOINED,
    LOST,
    WOKEN,
    Arrival,
    Transport,
    message_nbytes,
)
from gradwire.runtime.process.unread import UnreadMessages


class RankInterpreter(Interpreter):
    """Answers the effects of one rank's programs, over a transport."""

    def __init__(
        self,
        transport: Transport,
        num_workers: int | None,
        job: int,
        native: bool,
        max_unread_nbytes: int,
    ) -> None:
        self.rank, size = transport.rank, transport.size
        layout = NodeLayout.of(size, num_workers)
        self.job = job
        self.ledger = Ledger(size)  # of what this rank sent
        # What a server or scheduler received from workers, as they count it: the record of workers
        # that are lost.
        self.received = Ledger(size)
        self.native_nbytes = 0  # that native means stand for, sent and received alike
        self.unread = UnreadMessages(self.rank, layout, max_unread_nbytes)
        # Called with a rank that came (True) or was lost (False), and why.
        self.on_change: Callable[[int, bool, str], None] | None = None
        self.spans: ProcessSpans | None = None  # records what this rank does when
        self._start_s = time.monotonic()
        self._transport = transport
        self._ready: deque[tuple[Task, Any, Exception | None]] = deque()
        self._to_compute: deque[tuple[Task, Any] | ProcessComputation] = deque()
        self._timers = Timers()
        self._peers = PeerStatus(self.rank, lambda: self.now)
        # Collectives are of all nodes of the transport, and means of all workers.
        can = hasattr(transport, "native_mean") and not layout.others
        start_mean = self._start_native_mean if can and native and size > 1 else None
        self._natives = NativeMeans(start_mean, self._peers, self._timers, self._resume)
        self._has_failed = False  # a program has raised an exception
        super().__init__(
            layout,
            Calls(1),
            {
                Send: self._send,
                Compute: self._compute_later,
                Begin: self._begin,
                Open: self._open,
                Reach: self._reach,
                Now: lambda task, effect: self.now,
                CurrentMembers: lambda task, effect: frozenset(layout.workers) - self.lost,
                Spawn: self._spawn,
                Collective: self._collective,
            },
            {self.rank: self.unread},
            self._peers.gone,
            tag_hash,
        )

    @property
    def now(self) -> float:
        return time.monotonic() - self._start_s

    @property
    def lost(self) -> frozenset[int]:
        """The ranks that were lost."""
        return frozenset(self._peers.lost)

    @property
    def gone(self) -> frozenset[int]:
        """The ranks that were lost or said goodbye."""
        return frozenset(self._peers.gone)

    @property
    def is_at_rest(self) -> bool:
        """Whether every program waits for a message, and none is there that has not been read.

        Also after a run, unless a program ended it with an exception."""
        if self._has_failed:
            return False
        waits = all(isinstance(task.waiting_for, Recv | RecvAny) for task in self._tasks)
        return waits and not (self._ready or self._to_compute or self.unread.inbox)

    def _resume(self, task: Task, value: Any = None, failure: Exception | None = None) -> None:
        task.waiting_for = None
        self._ready.append((task, value, failure))

    _schedule = _resume

    def _resume_after(self, task: Task, seconds: float) -> None:
        if seconds == 0:  # lets the others run
            self._resume(task)
        else:
            self._timers.set(task, seconds)

    def _time_out_after(self, task: Task, seconds: float) -> None:
        self._timers.set(task, seconds)

    def _add_note(self, task: Task, error: Exception) -> None:
        self._has_failed = True
        if not isinstance(error, RefusedError):
            error.add_note(f"in the program of rank {self.rank} at {self.now:.6g} s")

    # Effects.

    def _send(self, task: Task, effect: Send) -> None:
        dst = effect.dst
        checks.check_send(effect, self.rank, self.size)
        tag = tag_hash(effect.tag)
        if dst != self.rank:
            self.ledger.record(self.rank, dst, effect.nbytes, effect.label)
            if dst in self._peers.gone:
                return
        self._transport.send(dst, self.job, tag, effect.data)

    def _check_sender(self, task: Task, effect: Recv) -> None:
        raise self._peers.error(effect.src)

    def _recv_any(self, task: Task, effect: RecvAny[Any]) -> Any:
        checks.check_wait(effect, self.rank)
        self._take(0.0)
        return super()._recv_any(task, effect)

    def _spawn(self, task: Task, effect: Spawn[Any]) -> Task:
        spawned = self._start(self.rank, effect.program, effect.priority)
        self._natives.spawn(task, spawned)
        return spawned

    def _finish(self, task: Task) -> None:
        super()._finish(task)
        self._natives.end(task)

    def _join(self, task: Task, effect: Join[Any]) -> Any:
        self._natives.join(task, effect.task)
        return super()._join(task, effect)

    def _compute_later(self, task: Task, effect: Compute[Any]) -> Any:
        task.waiting_for = effect
        self._to_compute.append((task, effect.request))
        return WAITING

    def _begin(self, task: Task, effect: Begin) -> ProcessComputation:
        begun = ProcessComputation(effect.request, effect.is_open)
        if effect.is_open:
            self._to_compute.append(begun)
        return begun

    def _open(self, task: Task, effect: Open) -> None:
        begun = effect.computation
        assert isinstance(begun, ProcessComputation)
        if begun.open(effect.layer, is_last=effect.request is not None):
            self._to_compute.append(begun)

    def _reach(self, task: Task, effect: Reach[Any]) -> Any:
        begun = effect.computation
        assert isinstance(begun, ProcessComputation)
        if begun.failure is not None:
            raise begun.failure
        if begun.has_reached(effect.layer):
            return begun.result
        task.waiting_for = effect
        begun.wait(task, effect.layer)
        return WAITING

    def _collective(self, task: Task, effect: Collective) -> Any:
        if not self._natives.start(task, effect):
            return None
        for dst, nbytes in effect.sends:
            self.ledger.record(self.rank, dst, nbytes, effect.label)
            self.native_nbytes += nbytes
        return WAITING

    def _start_native_mean(self, effect: Collective) -> int | None:
        number: int | None = self._transport.native_mean(effect.data)  # type: ignore[attr-defined]
        if number is not None and self.spans is not None:
            self.spans.start_collective(number, effect.label)
        return number

    # Events: timers and what the transport reports.

    def _expire(self) -> bool:
        """Resumes the programs whose timers have expired; whether there were any."""
        has_expired = False
        for task, effect in self._timers.expired():
            failure = None
            if isinstance(effect, RecvAny):
                del self.unread.waiting_any[tag_hash(effect.tag)]
            elif isinstance(effect, Collective):
                failure = self._natives.failure
            self._resume(task, None, failure)
            has_expired = True
        return has_expired

    def _take(self, timeout_s: float | None) -> bool:
        """Takes in what has arrived; whether there was something.

        If too much is unread it takes one arrival: a program may wait for that one.
        """
        arrival = self._transport.next(timeout_s)
        if arrival is None:
            return False
        while arrival is not None:
            self._arrive(arrival)
            if self.unread.is_full:
                break
            arrival = self._transport.next(0.0)
        return True

    def _arrive(self, arrival: Arrival) -> None:
        kind, src, job, tag, message, time_s, _ = arrival
        if kind in (ARRIVED, DONE):
            if job > self.job:
                self._transport.defer(arrival)
            elif job == self.job and kind == DONE:
                self._peers.report_done(src, tag)
            elif job == self.job:
                if self.spans is not None:
                    self.spans.receive(src, tag, time_s)
                self._receive(src, tag, message)
        elif kind == FINISHED:
            if self.spans is not None:
                self.spans.finish_collective(tag, time_s)
            self._natives.finish(tag, message)
        elif kind == JOINED:
            self._peers.join(src)
            self._report(arrival, True)
            if self.on_change is not None:
                self.on_change(src, True, "")
        elif kind != WOKEN:
            self._remove(arrival)

    def _receive(self, src: int, tag: int, message: Any) -> None:
        is_worker = self.layout.is_worker
        if is_worker(src) and not is_worker(self.rank):
            header = HEADER_NBYTES if isinstance(message, Framed) else 0
            self.received.record(src, self.rank, header + message_nbytes(message), "")
        if not self.unread.drops(src, tag):
            self._deliver(src, self.rank, tag, message)

    def _remove(self, arrival: Arrival) -> None:
        """A peer was lost or said goodbye: programs no longer wait for its messages."""
        kind, src, _, tag, message, _, _ = arrival
        if kind == GOODBYE and tag - 1 == src:  # it cannot continue: it counts as lost
            kind, message = LOST, "it was told to stop, or failed"
        if kind == GOODBYE:
            self._peers.left[src] = tag - 1
        elif src in self._peers.gone:
            return
        else:
            self._peers.lose(src, message)
            if self.on_change is not None:
                self.on_change(src, False, message)
            self._report(arrival, False)
        # What it sent before has been delivered.
        waiting = self.unread.waiting
        for key in [key for key in waiting if key[0] == src]:
            self._resume(waiting.pop(key), None, self._peers.error(src))
        self._natives.peer_lost(src)

    def _report(self, arrival: Arrival, is_there: bool) -> None:
        """Sends a change of the membership to the programs that watch it."""
        if self.layout.is_worker(arrival.src):
            time_s = self.now if arrival.time_s is None else arrival.time_s
            change = Framed(Membership(arrival.src, is_there, time_s))
            for rank, tag in self._watchers:
                self._deliver(rank, rank, tag_hash(tag), change)
