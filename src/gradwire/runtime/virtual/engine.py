"""The simulator: n programs in one process, in deterministic virtual time.

Events wait in a heap ordered by (time, sequence). A program runs until it awaits something that
is not there yet; what it did until then took no virtual time. Gradient requests are evaluated as
late as possible: when the first of those outstanding is due, all go to the task's evaluator
together, also if they were made at different times.

The first nodes are the workers; the others (servers, a scheduler) run daemons, which end with the
workers. Workers may crash, come back and come late, messages may get lost
(`runtime/network/faults.py`).
"""

from collections import defaultdict, deque
from collections.abc import Callable, Coroutine, Sequence
from heapq import heappop
from math import inf
from typing import Any, TypeVar

from gradwire.core.errors import DeadlockError
from gradwire.core.key import Key
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
from gradwire.runtime.interpreter import deadlock
from gradwire.runtime.interpreter.calls import Calls
from gradwire.runtime.interpreter.mailboxes import Mailboxes
from gradwire.runtime.network.faults import Fault, Loss, parse_faults
from gradwire.runtime.network.links import Links, Message
from gradwire.runtime.network.network import Network
from gradwire.runtime.network.outages import CRASH, NOTICE, Event, Outages
from gradwire.runtime.virtual.coding_time import CodingTime
from gradwire.runtime.virtual.events import (
    COMPUTED,
    FAULT,
    HEAD,
    PARCEL_HEAD,
    SEND,
    TAIL,
    TIMEOUT,
    WAKE,
    Events,
)
from gradwire.runtime.virtual.requests import Evaluator, Requests, no_evaluator
from gradwire.runtime.virtual.trace import Trace
from gradwire.runtime.virtual.transport import Transport

R = TypeVar("R")
Program = Callable[[Node], Coroutine[Any, Any, R]]
Seconds = Callable[[int, Any], float]

OnChange = Callable[[int, float], None]

_NO_KEY = Key(0)
_MAX_FUTILE = 100_000


class VirtualEngine:
    """Runs programs on virtual nodes. Clocks, NICs and ledger go on from one run to the next.

    Nodes 0 .. num_workers - 1 are workers (all nodes, unless told). `heartbeat_s` is how long it
    takes until a crash is noticed. `coding` says how long calls take; None: no time. `on_crash`
    and `on_return` are called with rank and time when a worker's programs have been closed, and
    before a new one is made for it.
    """

    def __init__(
        self,
        network: Network,
        num_workers: int | None = None,
        *,
        evaluate: Evaluator = no_evaluator,
        seconds: Seconds = lambda rank, request: 0.0,
        coding: CodingTime | None = None,
        record: bool = False,
        faults: Sequence[str | Fault] = (),
        heartbeat_s: float = 0.5,
        key: Key = _NO_KEY,  # of the messages that get lost
        on_crash: OnChange | None = None,
        on_return: OnChange | None = None,
    ) -> None:
        # Python finds attributes faster as long as an object has no more than 30.
        self.size = network.size
        self.num_workers = self.size if num_workers is None else num_workers
        assert 1 <= self.num_workers <= self.size, f"{num_workers} workers on {self.size} nodes"
        self.clocks = [0.0] * self.size  # when each node's program last ended
        self.num_effects = 0
        self.on_crash = on_crash
        self.on_return = on_return
        parsed = parse_faults(faults, self.num_workers)
        self._outages = Outages(parsed, self.num_workers, heartbeat_s)
        self._lost = self._outages.lost  # always the same dictionary
        self._loses_workers = bool(self._outages.pending)
        loss = next((fault for fault in parsed if isinstance(fault, Loss)), None)
        links = Links(self.size, loss, key) if parsed else None
        self._events = Events()
        self._transport = Transport(network, self._events, links, self._outages.gone)
        self.nics, self.ledger = self._transport.nics, self._transport.ledger
        self._calls = Calls(self.num_workers, coding)
        self._seconds = seconds
        self._record = record
        self.trace: Trace | None = None  # of the last run, if it was recorded
        self._requests = Requests(evaluate)
        self._mailboxes = Mailboxes(self.size)
        self._inbox = self._mailboxes.inbox
        self._waiting = self._mailboxes.waiting
        self._waiting_any = self._mailboxes.waiting_any
        self._watchers: dict[tuple[int, Tag], None] = {}  # in order
        self._tasks: list[Task[Any]] = []
        self._mains: list[Task[Any] | None] = []  # of the workers; None: not there
        self._rejoin: Program[Any] | None = None
        self._called_last: set[Task[Any]] = set()
        self._num_futile = 0  # timeouts in a row while nothing else was to happen

    @property
    def now(self) -> float:
        """The time at which the last worker finished."""
        return max(self.clocks[: self.num_workers])

    @property
    def call_s(self) -> defaultdict[str, float]:
        """Wall-clock seconds in `call` and `share` by function: coding, averaging, updating."""
        return self._calls.seconds

    @property
    def alive(self) -> frozenset[int]:
        """The workers that are there, whatever the others believe."""
        return self._outages.alive

    def run(
        self,
        programs: Sequence[Program[R]],
        daemons: Sequence[Program[Any]] = (),
        rejoin: Program[R] | None = None,
    ) -> list[R | Any]:
        """Runs one program per worker, each from its clock on; returns their results.

        The run is over when the workers that are there are done and nothing is under way. Daemons,
        one per other node, start with the first worker; those that then wait are closed, and so
        are spawned programs. (A program whose wait would end by a timeout gets that answer once
        more. One that sleeps goes on: a daemon must not sleep for ever.)

        What should happen to a worker after it is done, or after all are, happens in the next run.
        `rejoin` makes the program of a worker that comes (back); the result of one that is gone
        is None.
        """
        num_others = self.size - self.num_workers
        assert len(programs) == self.num_workers, (
            f"{len(programs)} programs for {self.num_workers} workers"
        )
        assert len(daemons) == num_others, f"{len(daemons)} daemons for {num_others} other nodes"
        outages = self._outages
        if rejoin is None and outages.returns:
            raise ValueError(
                "workers come (back) in this run: give it a program for them, `rejoin`"
            )
        self._rejoin = rejoin
        try:
            for event in outages.pending:
                self._events.push_first(event[0], FAULT, event)
            self._mains = [
                None if rank in outages.gone else self._start(rank, program, self.clocks[rank])
                for rank, program in enumerate(programs)
            ]
            begin = min((self.clocks[rank] for rank in outages.alive), default=self.now)
            others = [
                self._start(rank, daemon, begin)
                for rank, daemon in enumerate(daemons, self.num_workers)
            ]
            if self._record:
                self.trace = Trace([*self._mains, *others])
                if self._loses_workers:
                    self.trace.depends_on_time()
            self._loop()
            return [None if main is None else main.result for main in self._mains]
        finally:
            for task in self._tasks:  # after an error the other programs must not linger
                task.program.close()
            self._tasks.clear()
            self._mains.clear()
            self._events.clear()
            self._requests.clear()
            self._mailboxes.dismiss()
            self._calls.forget()
            self._watchers.clear()
            self._called_last.clear()
            self._num_futile = 0
            self._transport.clear()

    def snapshot(self) -> dict[str, Any]:
        """What a new engine can go on from, besides the ledger."""
        return {
            "clocks": list(self.clocks),
            "transport": self._transport.snapshot(),
            "outages": self._outages.snapshot(),
            "unread": self._mailboxes.snapshot(),
        }

    def restore(self, saved: dict[str, Any]) -> None:
        self.clocks = list(saved["clocks"])
        self._transport.restore(saved["transport"])
        self._outages.restore(saved["outages"])
        self._mailboxes.restore(saved["unread"])

    def _start(self, rank: int, program: Program[Any], at: float) -> Task[Any]:
        task = Task(rank, program(Node(rank, self.num_workers)))
        self._tasks.append(task)
        self._events.push(at, WAKE, (task, None))
        return task

    def _loop(self) -> None:
        heap, push, nics = self._events.heap, self._events.push, self.nics
        while heap:
            now, _, kind, what = heappop(heap)
            if kind == HEAD:  # a message's first bit reaches its receiver
                src, dst, _, _, nbytes = what
                push(nics.arrive(now, src, dst, nbytes), TAIL, what)
            elif kind == TAIL:
                self._deliver(now, what)
            elif kind == COMPUTED:
                self._step(what.task, self._requests.result(what), now)
            elif kind == WAKE:
                task, value = what
                self._step(task, value, now)
            elif kind == TIMEOUT:
                self._events.num_idle -= 1
                task, effect = what
                self._time_out(task, effect, now)
            elif kind == FAULT:
                self._events.num_idle -= 1
                self._fault(what, now)
            elif kind == SEND:
                self._transport.attempt(what, now)
            elif kind == PARCEL_HEAD:
                self._transport.arriving(what, now)
            else:
                for message in self._transport.arrived(what):
                    self._deliver(now, message)
        if any(main is not None and not main.done for main in self._mains):
            raise DeadlockError(self._deadlock())

    def _step(
        self, task: Task[Any], value: Any, now: float, failure: Exception | None = None
    ) -> None:
        """Runs a program until it must wait. `failure` is raised where it awaits an effect."""
        send, throw = task.program.send, task.program.throw
        rank = task.rank
        trace, transport = self.trace, self._transport
        task.waiting_for = None
        while True:
            try:
                effect = send(value) if failure is None else throw(failure)
            except StopIteration as end:
                self._finish(task, end.value, now)
                return
            except Exception as error:
                error.add_note(f"in the program of rank {rank} at virtual time {now:.6g} s")
                raise
            self.num_effects += 1
            kind = type(effect)
            value = failure = None
            if kind is Send:
                try:
                    transport.send(rank, effect, now)
                except ValueError as error:
                    failure = error
                    continue
                if trace is not None:
                    trace.send(task, effect)
            elif kind is Recv:
                if trace is not None:
                    trace.recv(task, effect)
                key = (effect.src, effect.tag)
                inbox = self._inbox[rank]
                box = inbox.get(key)
                if box:
                    value = box.popleft()[1]
                    if not box:
                        del inbox[key]
                    continue
                if self._lost and self._is_lost(rank, effect):
                    failure = self._outages.error(effect.src)
                    continue
                other = self._waiting[rank].setdefault(key, task)
                if other is not task:
                    what = f"{effect.tag!r} from {effect.src}"
                    failure = RuntimeError(f"rank {rank} already waits for {what}")
                    continue
                task.waiting_for = effect
                return
            elif kind is Call:
                try:
                    value, cost = self._calls.run(effect)
                except Exception as error:
                    failure = error
                    continue
                if cost > 0.0:
                    if trace is not None:
                        trace.pause(task, cost)
                    task.waiting_for = effect
                    self._events.push(now + cost, WAKE, (task, value))
                    return
            elif kind is Compute:
                seconds = self._seconds(rank, effect.request)
                if trace is not None:
                    trace.pause(task, seconds)
                self._events.push(now + seconds, COMPUTED, self._requests.add(task, effect.request))
                task.waiting_for = effect
                return
            elif kind is Now:
                value = now
                if trace is not None:
                    trace.depends_on_time()
            elif kind is Sleep:
                if not effect.seconds >= 0:
                    failure = ValueError(f"rank {rank} sleeps for {effect.seconds} s, below zero")
                    continue
                if trace is not None:
                    trace.pause(task, effect.seconds)
                task.waiting_for = effect
                self._events.push(now + effect.seconds, WAKE, (task, None))
                return
            elif kind is RecvAny:
                timeout_s = effect.timeout_s
                if trace is not None:
                    if effect.is_gathering:
                        trace.recv(task, effect)
                    elif timeout_s is not None:
                        trace.depends_on_time()
                if timeout_s is not None and not 0 <= timeout_s < inf:
                    failure = ValueError(
                        f"rank {rank} waits for {timeout_s} s; a timeout is finite and >= 0"
                    )
                    continue
                value = self._mailboxes.take_any(rank, effect.tag)
                if trace is not None and value is not None and not effect.is_gathering:
                    trace.depends_on_time()
                if value is None and timeout_s != 0:
                    other = self._waiting_any[rank].setdefault(effect.tag, task)
                    if other is not task:
                        what = f"{effect.tag!r} from anyone"
                        failure = RuntimeError(f"rank {rank} already waits for {what}")
                        continue
                    task.waiting_for = effect
                    if timeout_s is not None:
                        # An effect of its own, by which to know this wait from a later one.
                        task.waiting_for = RecvAny(effect.tag, timeout_s)
                        wait = (task, task.waiting_for)
                        self._events.push_last(now + timeout_s, TIMEOUT, wait)
                    return
            elif kind is Members:
                value = self._outages.members
            elif kind is Watch:
                self._watchers[rank, effect.tag] = None
            elif kind is Spawn:
                value = Task(rank, effect.program)
                self._tasks.append(value)
                self._events.push(now, WAKE, (value, None))
                if trace is not None:
                    trace.spawn(task, value)
            elif kind is Join:
                if trace is not None:
                    trace.join(task, effect.task)
                if not effect.task.done:
                    effect.task.joiners.append(task)
                    task.waiting_for = effect
                    return
                value = effect.task.result
            else:
                failure = TypeError(f"rank {rank} awaited {effect!r}, which is no effect")

    def _finish(self, task: Task[Any], result: Any, now: float) -> None:
        task.done, task.result = True, result
        if now > self.clocks[task.rank]:
            self.clocks[task.rank] = now
        for joiner in task.joiners:
            self._events.push(now, WAKE, (joiner, result))

    def _deliver(self, now: float, message: Message) -> None:
        src, dst, tag, data, _ = message
        task = self._waiting[dst].pop((src, tag), None)
        if task is not None:
            self._step(task, data, now)
            return
        task = self._waiting_any[dst].pop(tag, None)
        if task is not None:
            # Not before: whom nobody writes to is no matter of time.
            if self.trace is not None and not task.waiting_for.is_gathering:
                self.trace.depends_on_time()
            self._step(task, (src, data), now)
            return
        arrived = (next(self._events.numbers), data)
        self._inbox[dst].setdefault((src, tag), deque()).append(arrived)

    def _time_out(self, task: Task[Any], effect: RecvAny[Any], now: float) -> None:
        if task.waiting_for is not effect:
            return  # a message came in time
        if not self._events.only_idle:
            self._num_futile = 0
        elif self._is_over():
            # Nothing will happen any more; a daemon that waits again and again must not go on.
            if task in self._called_last:
                return
            self._called_last.add(task)
        else:
            self._num_futile += 1
            if self._num_futile >= _MAX_FUTILE and not self._outages.pending:
                raise DeadlockError(self._deadlock())
        del self._waiting_any[task.rank][effect.tag]
        self._step(task, None, now)

    def _is_over(self) -> bool:
        """Whether the workers that are there are done."""
        there = [main.done for main in self._mains if main is not None]
        return all(there) and (bool(there) or not self._outages.returns)

    def _is_lost(self, rank: int, effect: Recv) -> bool:
        """Whether a message will not come, since its sender is known to be gone."""
        if effect.src not in self._lost:
            return False
        return not self._transport.is_under_way(effect.src, rank, effect.tag)

    def _deadlock(self) -> str:
        return deadlock.report(self._tasks, self._inbox, self._outages.gone)

    def _fault(self, event: Event, now: float) -> None:
        """Something happens to a worker, unless it must wait for the next run."""
        _, what, rank = event
        outages, main = self._outages, self._mains[rank]
        if event not in outages.pending or self._is_over():
            return
        if what == CRASH:
            if main is not None and not main.done:
                outages.pending.remove(event)
                self._crash(rank, now)
        elif what == NOTICE:
            self._notice(rank, now)
        elif rank in outages.gone:
            outages.pending.remove(event)
            self._come_back(rank, now)

    def _crash(self, rank: int, now: float) -> None:
        """Nothing of this node goes on: no program, no request, no event, no message to it."""
        for task in self._tasks:
            if task.rank == rank:
                task.program.close()
        self._tasks = [task for task in self._tasks if task.rank != rank]
        self._requests.forget(rank)
        self._mailboxes.empty(rank)
        self._events.forget(rank, self._transport.cut(rank, now))
        self._watchers = {key: None for key in self._watchers if key[0] != rank}
        self._mains[rank] = None
        self.clocks[rank] = now
        notice = self._outages.crash(rank, now)
        self._events.push_first(notice[0], FAULT, notice)
        if self.on_crash is not None:
            self.on_crash(rank, now)

    def _notice(self, rank: int, now: float) -> None:
        """Those that watch are told; those that wait for the lost worker wait no longer."""
        self._outages.notice(rank, now)
        self._tell(Membership(rank, False, now), now)
        left = [
            task
            for task in self._mailboxes.waiting_for(rank)
            if self._is_lost(task.rank, task.waiting_for)
        ]
        for task in left:
            del self._waiting[task.rank][rank, task.waiting_for.tag]
        for task in left:
            self._step(task, None, now, self._outages.error(rank))

    def _come_back(self, rank: int, now: float) -> None:
        if rank not in self._lost:
            self._notice(rank, now)
        self._outages.come_back(rank)
        self.nics.reset(rank, now)
        self._tell(Membership(rank, True, now), now)
        if self.on_return is not None:
            self.on_return(rank, now)
        assert self._rejoin is not None
        main = self._mains[rank] = self._start(rank, self._rejoin, now)
        if self.trace is not None:
            self.trace.add(main)

    def _tell(self, change: Membership, now: float) -> None:
        for rank, tag in self._watchers:
            self._events.push(now, TAIL, (rank, rank, tag, Framed(change), 0))
