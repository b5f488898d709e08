"""The simulator: n programs in one process, in deterministic virtual time.

Events wait in a heap ordered by (time, sequence). A program runs until it awaits something that
is not there yet; what it did until then took no virtual time. Gradient requests are evaluated as
late as possible: when the first of those outstanding is due, all go to the task's evaluator
together, also if they were made at different times.

The first nodes are the workers; the others (servers, a scheduler) run daemons, which end with the
workers. Workers may crash, come back and come late, messages may get lost
(`runtime/network/faults.py`).
"""

from array import array
from collections.abc import Sequence
from heapq import heappop, heappush
from typing import Any

from gradwire.core.errors import DeadlockError
from gradwire.core.key import Key
from gradwire.core.layout import NodeLayout
from gradwire.core.node import (
    Begin,
    Call,
    Compute,
    CurrentMembers,
    Now,
    Open,
    Reach,
    Recv,
    RecvAny,
    Send,
)
from gradwire.core.profile import Profile
from gradwire.kernels import cpu_backend
from gradwire.runtime.interpreter import deadlock
from gradwire.runtime.interpreter.calls import Calls, Evaluator, no_evaluator
from gradwire.runtime.interpreter.interpreter import Program, R, Task
from gradwire.runtime.interpreter.mailboxes import Mailbox
from gradwire.runtime.network.faults import Fault, Loss, parse_faults
from gradwire.runtime.network.links import Links
from gradwire.runtime.network.network import Network, Nics
from gradwire.runtime.network.outages import Outages
from gradwire.runtime.virtual.clock import Seconds
from gradwire.runtime.virtual.coding_time import CodingTime, MeasuredCoding
from gradwire.runtime.virtual.computation import LayerTimes
from gradwire.runtime.virtual.events import (
    CALLED,
    COMPUTED,
    EXCHANGED,
    FAULT,
    FLOW,
    FREE,
    HEAD,
    HEADS,
    HELD,
    PARCEL_HEAD,
    PASSES,
    REACHED,
    SEND,
    TAIL,
    TIMEOUT,
    WAKE,
    WORK,
    Events,
)
from gradwire.runtime.virtual.fabric_transport import FabricTransport
from gradwire.runtime.virtual.gradients import PendingGradients
from gradwire.runtime.virtual.group_effects import GroupEffects, refusals
from gradwire.runtime.virtual.late_calls import LateCalls
from gradwire.runtime.virtual.lost_workers import LostWorkers, OnChange
from gradwire.runtime.virtual.priority_transport import PriorityTransport
from gradwire.runtime.virtual.spans import VirtualSpans
from gradwire.runtime.virtual.trace import Occupy, Trace
from gradwire.runtime.virtual.transport import SimulatedTransport

_NO_KEY = Key(0)
_MAX_FUTILE = 100_000


class VirtualEngine(LostWorkers):
    """Runs programs on virtual nodes. Clocks, NICs and ledger are kept from one run to the next.

    Nodes 0 .. num_workers - 1 are workers (by default all nodes). `heartbeat_s` is how long it
    takes until a crash is noticed. `coding` says how long calls take; None: no time. `on_crash`
    and `on_return` are called with rank and time when a worker's programs have been closed, and
    before a new one is made for it.
    """

    _calls_type: type[Calls] = LateCalls
    _knows_exchanges = True  # and passes, as one effect

    def __init__(
        self,
        network: Network,
        num_workers: int | None = None,
        *,
        evaluate: Evaluator = no_evaluator,
        seconds: Seconds = lambda rank, request: 0.0,
        profile: Profile | None = None,
        has_priorities: bool = False,
        coding: CodingTime | None = None,
        record: bool = False,
        faults: Sequence[str | Fault] = (),
        heartbeat_s: float = 0.5,
        key: Key = _NO_KEY,  # of the messages that get lost
        on_crash: OnChange | None = None,
        on_return: OnChange | None = None,
    ) -> None:
        # Python finds attributes faster as long as an object has no more than 30.
        size = network.size
        layout = NodeLayout.of(size, num_workers)
        num_workers = layout.num_workers
        self.clocks = [0.0] * size  # when each node's program last ended
        self.on_crash, self.on_return = on_crash, on_return
        parsed = parse_faults(faults, num_workers)
        self._outages = Outages(parsed, num_workers, heartbeat_s)
        self._loses_workers = bool(self._outages.pending)
        loss = next((fault for fault in parsed if isinstance(fault, Loss)), None)
        links = Links(size, loss, key) if parsed else None
        self._events = Events()
        kind = PriorityTransport if has_priorities else SimulatedTransport
        if network.fabric is not None:
            kind = FabricTransport
        self._transport = kind(network, self._events, links, self._outages.gone)
        self.nics, self.ledger = self._transport.nics, self._transport.ledger
        is_plain = kind is SimulatedTransport and type(self.nics) is Nics and links is None
        is_plain = is_plain and self._knows_exchanges and not isinstance(coding, MeasuredCoding)
        calls = self._calls_type(num_workers, coding)
        self._coding_free = array("d", bytes(8 * size))  # when each node has finished its calls
        self._group_effects: GroupEffects | None = None
        if is_plain and cpu_backend() == "native":
            self._group_effects = GroupEffects(
                self.nics, self.ledger, self._events, self._coding_free, calls, self._release
            )
        grouped = refusals() if self._group_effects is None else self._group_effects.handlers
        self._seconds = seconds
        self._layer_times = LayerTimes(profile)
        self._held = {}
        self._record = record
        self.trace: Trace | None = None  # of the last run, if it was recorded
        self._gradients = PendingGradients(evaluate)
        self._mains: list[Task | None] = []  # of the workers; None: not there
        self._rejoin: Program[Any] | None = None
        self._called_last: set[Task] = set()
        self._num_futile = 0  # timeouts in a row while nothing else was to happen
        super().__init__(
            layout,
            calls,
            {
                Send: self._transport.send,
                Call: self._call,
                Compute: self._compute,
                Begin: self._begin,
                Open: self._open,
                Reach: self._reach,
                Occupy: lambda task, effect: self._occupy(task, effect, effect.seconds),
                **grouped,
                Now: lambda task, effect: self._events.now,
                CurrentMembers: lambda task, effect: self._outages.members,
            },
            {rank: Mailbox() for rank in range(size)},
            self._outages.lost,  # always the same dictionary
        )

    @property
    def now(self) -> float:
        """The time at which the last worker finished."""
        return max(self.clocks[: self.num_workers])

    @property
    def time_s(self) -> float:
        """The virtual time of what happens now."""
        return self._events.now

    def coding_free_s(self, rank: int) -> float:
        """When a node has finished the calls that it has made so far."""
        return self._coding_free[rank]

    def gradient_s(self, rank: int, request: Any) -> float:
        """How long a gradient takes."""
        return self._seconds(rank, request)

    @property
    def alive(self) -> frozenset[int]:
        """The workers that are there, whatever the others believe."""
        return self._outages.alive

    def run(
        self,
        programs: Sequence[Program[R]],
        daemons: Sequence[Program[Any]] = (),
        rejoin: Program[R] | None = None,
        spans: VirtualSpans | None = None,
    ) -> list[R | Any]:
        """Runs one program per worker, each from its clock on; returns their results.

        The run is over when the workers that are there are done and nothing is under way. Daemons,
        one per other node, start with the first worker; those that then wait are closed, and so
        are spawned programs. (A program whose wait would end by a timeout gets that answer once
        more. One that sleeps continues: a daemon must not sleep for ever.)

        What should happen to a worker after it is done, or after all are, happens in the next run.
        `rejoin` makes the program of a worker that comes (back); the result of one that is gone
        is None. `spans` records what every node does when.
        """
        self.layout.check_programs(programs, daemons)
        outages = self._outages
        if rejoin is None and outages.returns:
            raise ValueError("workers come (back): give the run a program for them, `rejoin`")
        self._rejoin = rejoin
        handlers = self._handlers
        try:
            for event in outages.pending:
                self._events.push_first(event[0], FAULT, event)
            self._mains = [
                None if rank in outages.gone else self._start_at(rank, program, self.clocks[rank])
                for rank, program in enumerate(programs)
            ]
            begin = min((self.clocks[rank] for rank in outages.alive), default=self.now)
            others = [
                self._start_at(rank, daemon, begin)
                for rank, daemon in zip(self.layout.others, daemons)
            ]
            if self._record:
                self.trace = Trace([*self._mains, *others])
                if self._loses_workers:
                    self.trace.depends_on_time()
                self._handlers = self.trace.record(self._handlers)
            if spans is not None:
                self._handlers = {**spans.record(self, self._handlers), **refusals()}
            if isinstance(self._calls, LateCalls):
                self._calls.may_hold = spans is None and not self._loses_workers
            self._loop(spans)
            return [None if main is None else main.result for main in self._mains]
        finally:
            self._close_programs()
            self._handlers = handlers
            self._mains.clear()
            self._events.clear()
            self._gradients.clear()
            self._called_last.clear()
            self._held.clear()
            self._num_futile = 0
            self._transport.clear()
            if self._group_effects is not None:
                self._group_effects.clear()

    def snapshot(self) -> dict[str, Any]:
        """The state from which a new engine can continue, without the ledger."""
        return {
            "clocks": list(self.clocks),
            "transport": self._transport.snapshot(),
            "outages": self._outages.snapshot(),
            "unread": [
                (rank, *message)
                for rank, mailbox in self._mailboxes.items()
                for message in mailbox.unread()
            ],
        }

    def restore(self, saved: dict[str, Any]) -> None:
        self.clocks = list(saved["clocks"])
        self._transport.restore(saved["transport"])
        self._outages.restore(saved["outages"])
        for rank, *message in saved["unread"]:
            self._mailboxes[rank].put(*message)

    def _loop(self, spans: VirtualSpans | None) -> None:
        events, nics, grouped = self._events, self.nics, self._group_effects
        heap = events.heap
        while heap:
            now, _, kind, what = heappop(heap)
            events.now = now
            if kind == HEAD:  # a message's first bit reaches its receiver
                src, dst, _, _, nbytes = what
                tail = nics.arrive(now, src, dst, nbytes)
                heappush(heap, (tail, next(events.numbers), TAIL, what))  # `push` without a call
                if spans is not None:
                    spans.receive_head(now, tail, what)
            elif kind == TAIL:
                if spans is not None:
                    spans.receive_tail(now, what)
                src, dst, tag, message, _ = what
                self._deliver(src, dst, tag, message)
            elif kind == HEADS:
                assert grouped is not None
                grouped.exchanges.run_heads(*what)
            elif kind == EXCHANGED:
                assert grouped is not None
                resumed = grouped.exchanges.finish(*what)
                if resumed is not None:
                    self._step(*resumed)
            elif kind == PASSES:
                assert grouped is not None
                resumed = grouped.passes.run(*what)
                if resumed is not None:
                    self._step(*resumed)
            elif kind == HELD:
                if not what.is_evaluated:
                    self._release()
            elif kind == COMPUTED:
                self._step(what.task, self._gradients.result(what))
            elif kind == WAKE:
                self._step(*what)
            elif kind == CALLED:
                self._step_called(*what)
            elif kind == REACHED:
                task, gradient = what[0], what[1].gradient
                self._step(task, None if gradient is None else self._gradients.result(gradient))
            elif kind == TIMEOUT:
                events.num_idle -= 1
                self._time_out(*what)
            elif kind == FAULT:
                events.num_idle -= 1
                self._apply_fault(what, now)
            elif kind == SEND:
                self._transport.attempt(what)
            elif kind == PARCEL_HEAD:
                self._transport.receive_head(what)
            elif kind == FLOW:
                self._transport.progress(what)
            elif kind == FREE:
                self._transport.free(what)
            elif kind == WORK:
                what()
            else:
                if spans is not None:
                    spans.receive_parcel(now, what)
                for src, dst, tag, message, _ in self._transport.receive_tail(what):
                    self._deliver(src, dst, tag, message)
        if any(main is not None and not main.done for main in self._mains):
            raise DeadlockError(self._deadlock())

    def _finish(self, task: Task) -> None:
        self.clocks[task.rank] = max(self.clocks[task.rank], self._events.now)
        super()._finish(task)

    def _add_note(self, task: Task, error: Exception) -> None:
        now = self._events.now
        error.add_note(f"in the program of rank {task.rank} at virtual time {now:.6g} s")

    def _check_sender(self, task: Task, effect: Recv) -> None:
        if not self._transport.is_under_way(effect.src, task.rank, effect.tag):
            raise self._outages.error(effect.src)

    def _time_out(self, task: Task, effect: RecvAny[Any]) -> None:
        if task.waiting_for is not effect:
            return  # a message came in time
        if not self._events.only_idle:
            self._num_futile = 0
        elif self._is_over():
            # Nothing will happen any more; a daemon that waits again and again must end.
            if task in self._called_last:
                return
            self._called_last.add(task)
        else:
            self._num_futile += 1
            if self._num_futile >= _MAX_FUTILE and not self._outages.pending:
                raise DeadlockError(self._deadlock())
        del self._mailboxes[task.rank].waiting_any[effect.tag]
        self._step(task)

    def _deadlock(self) -> str:
        inboxes = [mailbox.inbox for mailbox in self._mailboxes.values()]
        return deadlock.report(self._tasks, inboxes, self._outages.gone)
