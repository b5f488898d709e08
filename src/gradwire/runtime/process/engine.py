"""The engine for real processes: the program of one rank, and what it spawns.

It interprets the same effects as the simulator (`runtime/virtual/engine.py`), for one node, on the
thread that calls `run`. Programs take turns: each runs until it awaits something that is not there
yet. Gradients are computed when no program can go on, so that what can be sent leaves before. Time
is the seconds since the engine was made.

A rank is lost when its connection breaks without a goodbye. Who waits for a message from it gets
`PeerLost` once everything it sent has been read.

Messages that nobody has read yet are taken from the transport up to a number of bytes. Beyond it
they stay there, and with them their senders, unless no program could go on otherwise: what one
waits for may be behind them.

With `native` a mean that a program asks for as such (`Collective`) is left to the transport, if
that has a collective for it. Those match by their order, which must be the same on all ranks. The
order in which programs go on is not; that of what one program does is. So only the main program
gets one, and only while it has joined all that it spawned: this holds on all ranks or on none.
Messages are received meanwhile, so that a rank that gets lost is noticed.
"""

import time
from collections import defaultdict, deque
from collections.abc import Callable, Coroutine
from heapq import heappop, heappush
from itertools import count
from math import inf
from typing import Any, TypeVar

from gradwire.core.errors import PeerLost, RefusedError
from gradwire.core.node import (
    Call,
    Collective,
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
from gradwire.core.wire import HEADER_NBYTES
from gradwire.runtime.interpreter import checks, deadlock
from gradwire.runtime.interpreter.calls import Calls
from gradwire.runtime.interpreter.mailboxes import Mailboxes
from gradwire.runtime.ledger import Ledger
from gradwire.runtime.process.frames import tag_hash
from gradwire.runtime.process.presence import Presence
from gradwire.runtime.process.transport import (
    ARRIVED,
    DONE,
    FINISHED,
    GOODBYE,
    JOINED,
    LOST,
    Arrival,
    Transport,
    message_nbytes,
)
from gradwire.runtime.process.unread import Unread
from gradwire.runtime.replay.order import Recorder
from gradwire.runtime.virtual.requests import Evaluator, no_evaluator

# How long a native collective that failed waits for the news that a rank is lost, and one that has
# not for its end after such news: the rank may have left after its own part.
_GRACE_S = 2.0
_PATIENCE = 24
_PAUSE_S = 1.0  # between two looks at the clock
_SLEPT_S = 0.5  # so much later than it asked for a process wakes up that was suspended
_GLANCE_S = 0.1  # between two calls of `on_wait`

R = TypeVar("R")
Program = Callable[[Node], Coroutine[Any, Any, R]]


class StuckError(RuntimeError):
    """Nothing has happened for too long."""


class ProcessEngine:
    """Runs this rank's program. All ranks make theirs with the same `job`.

    Ranks 0 .. num_workers - 1 are workers. Messages of another job are not read: those of an
    earlier one are dropped, those of a later one kept for it. `timeout_s` is how long nothing may
    happen while a worker waits. `log` is told in which order programs go on, and by what.
    `native`: means may be formed by the transport's own all-reduce, which adds in another order;
    without it they have the simulator's bits. All ranks must say the same.
    """

    def __init__(
        self,
        transport: Transport,
        num_workers: int | None = None,
        *,
        evaluate: Evaluator = no_evaluator,
        timeout_s: float = 300.0,
        job: int = 0,
        log: Recorder | None = None,
        native: bool = False,
        max_unread_nbytes: int = 64 << 20,
    ) -> None:
        self.rank, self.size = transport.rank, transport.size
        self.num_workers = self.size if num_workers is None else num_workers
        assert 1 <= self.num_workers <= self.size, f"{num_workers} workers on {self.size} nodes"
        self.ledger = Ledger(self.size)  # of what this rank sent
        # What came from workers to another node, as they count it: all that is left of who is lost.
        self.heard = Ledger(self.size)
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
        self._waiting, self._waiting_any = mailboxes.waiting[0], mailboxes.waiting_any[0]
        self._order = count()
        self._ready: deque[tuple[Task[Any], Any, Exception | None]] = deque()
        self._to_compute: deque[tuple[Task[Any], Any]] = deque()
        self._timers: list[tuple[float, int, Task[Any], Any]] = []  # a heap
        self._watchers: dict[Tag, None] = {}
        self._tasks: dict[Task[Any], int] = {}  # those that have not ended, in order; with numbers
        self._numbers = count()  # of tasks in this run
        self.log = log  # of the next run, too
        self._presence = Presence(self.rank)
        self.unread = Unread(self.rank, self.num_workers, mailboxes, max_unread_nbytes)
        # Collectives are of all nodes of the transport, and means of all workers.
        can = getattr(transport, "native_mean", None) if self.num_workers == self.size else None
        self._native_mean = can if native and self.size > 1 else None
        # Who waits for a collective, by its number, and its effect.
        self._natives: dict[int, tuple[Task[Any], Collective]] = {}
        self._native_failure: Exception | None = None
        self._main: Task[Any] | None = None
        self._has_failed = False  # a program, in the middle of something
        self._unjoined: set[Task[Any]] = set()  # by the main program
        self.num_runs = 0  # so far; who comes later sets it to what the others have behind them
        # Told that a rank came (True) or was lost (False), and why.
        self.on_change: Callable[[int, bool, str], None] | None = None
        # Called now and then while every program waits. It may end the run by an exception.
        self.on_wait: Callable[[], None] | None = None
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
        return frozenset(self._presence.lost)

    @property
    def gone(self) -> frozenset[int]:
        """These, and those that said goodbye."""
        return self._presence.gone

    @property
    def is_at_rest(self) -> bool:
        """Whether every program waits for a message, and none is there that has not been read.

        Also after a run, if it was none of the programs that ended it by an exception."""
        if self._has_failed:
            return False
        waits = all(isinstance(task.waiting_for, Recv | RecvAny) for task in self._tasks)
        return waits and not (self._ready or self._to_compute or self.unread.inbox)

    def run(
        self, program: Program[R], *, serves: bool = True, is_patient: bool = False
    ) -> R | None:
        """Runs a worker's program to its end, and returns its result.

        Programs that it spawned and that have not ended go on serving the others until all
        workers are done with this run; then they are closed. The program of another role (a
        server) ends in the same way, and its result is None; unless it does not serve: then it,
        too, runs to its end. What nobody has read stays for the next run.

        Who is done, or serves, is patient: others may have much to do of which it hears nothing.
        So is whoever `is_patient`. That is for as long as the others are there, if the transport
        notices when they are not; else `_PATIENCE` times as long as others wait.
        """
        self.num_runs += 1
        self._numbers = count()
        log = self.log
        if log is not None:
            if self._native_mean is not None:
                raise ValueError(
                    "a run whose order is recorded has no native collectives: the simulator could "
                    "not replay it to the same bits. Make the engine with native=False."
                )
            log.begins()
        node = Node(self.rank, self.num_workers, native=self._native_mean is not None)
        main = self._main = self._spawn(program(node))
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
                if (main.done or (serves and not is_worker)) and self._are_done():
                    break
                self._wait(is_patient or main.done or (serves and not is_worker))
            if log is not None:
                log.ends(self.now)
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
            self._natives.clear()
            self._unjoined.clear()
            self._main = None

    # The loop.

    def _go_on(self) -> None:
        """Everything that can be done without waiting.

        When all programs have ended what arrives is left for the next run: a program hears of what
        happens when it waits, and only then. So it has done the same when it does, if all that
        arrived is told again to another process.
        """
        while True:
            while self._ready:
                self._step(*self._ready.popleft())
            if not self._tasks:
                return
            if (not self.unread.is_full and self._take(0.0)) or self._expire():
                continue
            if not self._to_compute:
                return
            task, request = self._to_compute.popleft()
            self._compute(task, request)

    def _wait(self, is_patient: bool) -> None:
        """Until something happens."""
        began = time.monotonic()
        limit = began + self._timeout_s
        if is_patient:
            can_trust = getattr(self._transport, "notices_silence", False)
            limit = inf if can_trust else began + _PATIENCE * self._timeout_s
        due = self._timers[0][0] if self._timers else inf
        pause = _PAUSE_S if self.on_wait is None else _GLANCE_S
        now = began
        while True:
            if self.on_wait is not None:
                self.on_wait()
            asked_s = max(0.0, min(limit, due, now + pause) - time.monotonic())
            if self._take(asked_s):
                break
            before, now = now, time.monotonic()
            if now - before > pause + _SLEPT_S:
                limit += now - before  # it was we who slept: others may have said much since
            if now >= due:
                break
            if now >= limit:
                raise StuckError(self._stuck())
        self.wait_s += time.monotonic() - began

    def _take(self, timeout_s: float) -> bool:
        """Takes in what has arrived; whether there was something.

        Where too much is unread, only the first: it may be what a program waits for.
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

    def _expire(self) -> bool:
        """Wakes who has slept or waited long enough; whether there was anyone."""
        now, has_woken = time.monotonic(), False
        while self._timers and self._timers[0][0] <= now:
            _, _, task, effect = heappop(self._timers)
            if task.waiting_for is effect:
                failure = None
                if isinstance(effect, RecvAny):
                    del self._waiting_any[tag_hash(effect.tag)]
                elif isinstance(effect, Collective):
                    failure = self._native_failure
                self._wake(task, None, failure)
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
        self._tasks[task] = next(self._numbers)
        self._ready.append((task, None, None))
        return task

    def _step(self, task: Task[Any], value: Any, failure: Exception | None) -> None:
        """Runs a program until it must wait. `failure` is raised where it awaits an effect."""
        send, throw = task.program.send, task.program.throw
        log, number = self.log, self._tasks[task]
        if log is not None:
            log.goes_on(number, value, failure)
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
                self._has_failed = True
                if not isinstance(error, RefusedError):
                    error.add_note(f"in the program of rank {self.rank} at {self.now:.6g} s")
                raise
            self.num_effects += 1
            value = failure = None
            try:
                is_answered, value = self._answer(task, effect)
            except Exception as error:
                is_answered, failure = True, error
            if log is not None:
                log.asks(number, effect)
                if is_answered:
                    log.goes_on(number, value, failure)
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
            checks.check_sleep(effect, self.rank)
            if effect.seconds == 0:  # lets the others run
                self._wake(task)
            else:
                self._alarm(task, effect, effect.seconds)
            return False, None
        if kind is Members:
            return True, frozenset(range(self.num_workers)) - self.lost
        if kind is Watch:
            self._watchers[effect.tag] = None
            return True, None
        if kind is Collective:
            return self._collective(task, effect)
        if kind is Spawn:
            spawned = self._spawn(effect.program)
            if task is self._main:
                self._unjoined.add(spawned)
            return True, spawned
        if kind is Join:
            if task is self._main:
                self._unjoined.discard(effect.task)
            if effect.task.done:
                return True, effect.task.result
            effect.task.joiners.append(task)
            task.waiting_for = effect
            return False, None
        raise checks.unknown(effect, self.rank)

    # Effects.

    def _send(self, effect: Send) -> None:
        dst = effect.dst
        checks.check_send(effect, self.rank, self.size)
        tag = tag_hash(effect.tag)
        if dst != self.rank:
            self.ledger.record(self.rank, dst, effect.nbytes, effect.label)
            if dst not in self._presence:
                return
        self._transport.send(dst, self.job, tag, effect.data)

    def _recv(self, task: Task[Any], effect: Recv) -> tuple[bool, Any]:
        key = (effect.src, tag_hash(effect.tag))
        found = self.unread.take(*key)
        if found is not None:
            return True, found[1]
        if effect.src not in self._presence:
            raise self._peer_lost(effect.src)
        if self._waiting.setdefault(key, task) is not task:
            what = f"{effect.tag!r} from {effect.src}"
            raise RuntimeError(f"rank {self.rank} already waits for {what}")
        task.waiting_for = effect
        return False, None

    def _recv_any(self, task: Task[Any], effect: RecvAny[Any]) -> tuple[bool, Any]:
        timeout_s, tag = effect.timeout_s, tag_hash(effect.tag)
        checks.check_wait(effect, self.rank)
        self._take(0.0)
        found = self.unread.take_any(tag)
        if found is not None or timeout_s == 0:
            return True, found
        if self._waiting_any.setdefault(tag, task) is not task:
            raise RuntimeError(f"rank {self.rank} already waits for {effect.tag!r} from anyone")
        task.waiting_for = effect
        if timeout_s is not None:
            # An effect of its own, by which to know this wait from a later one.
            self._alarm(task, RecvAny(effect.tag, timeout_s), timeout_s)
        return False, None

    def _collective(self, task: Task[Any], effect: Collective) -> tuple[bool, Any]:
        if self._native_mean is None or task is not self._main or self._unjoined:
            return True, None
        if self.gone:
            raise self._peer_lost(min(self.gone))
        number = self._native_mean(effect.data)
        if number is None:
            return True, None
        for dst, nbytes in effect.sends:
            self.ledger.record(self.rank, dst, nbytes, effect.label)
        self._natives[number] = task, effect
        task.waiting_for = effect
        return False, None

    def _finish_collective(self, number: int, outcome: Any) -> None:
        task, effect = self._natives.pop(number, (None, None))
        if task is None or task.waiting_for is not effect:  # nobody waits for it any more
            return
        if not isinstance(outcome, Exception):
            self._wake(task, outcome)
        elif self.gone:
            self._wake(task, None, self._peer_lost(min(self.gone)))
        else:
            # A rank that was lost shows in other connections, too, and by name.
            self._native_failure = outcome
            outcome.add_note("a native all-reduce failed, and no rank is known to be lost")
            self._alarm(task, task.waiting_for, _GRACE_S)

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
                self._presence.done(src, tag)
            elif job == self.job:
                if src < self.num_workers <= self.rank:
                    header = HEADER_NBYTES if isinstance(message, Framed) else 0
                    self.heard.record(src, self.rank, header + message_nbytes(message), "")
                self._deliver(src, tag, message)
            return
        if kind == FINISHED:
            self._finish_collective(tag, message)
            return
        if kind == JOINED:
            self._presence.joins(src)
            self._tell_watchers(Membership(src, True, self.now if time_s is None else time_s))
            if self.on_change is not None:
                self.on_change(src, True, "")
            return
        if kind == GOODBYE and tag - 1 == src:  # it cannot go on: that is as if it were lost
            kind, message = LOST, "it was told to stop, or failed"
        if kind == LOST:
            if src not in self._presence:
                return
            now = self.now
            self._presence.lost[src] = now, message
            if self.on_change is not None:
                self.on_change(src, False, message)
            self._tell_watchers(Membership(src, False, now if time_s is None else time_s))
        else:
            self._presence.left[src] = tag - 1
        # Who waits for it waits no longer: what it sent before has been delivered.
        for key in [key for key in self._waiting if key[0] == src]:
            self._wake(self._waiting.pop(key), None, self._peer_lost(src))
        if self._main is not None and type(self._main.waiting_for) is Collective:
            self._native_failure = self._peer_lost(src)
            self._alarm(self._main, self._main.waiting_for, _GRACE_S)

    def _tell_watchers(self, change: Membership) -> None:
        if change.rank < self.num_workers:
            for watcher in self._watchers:
                self._deliver(self.rank, tag_hash(watcher), Framed(change))

    def _deliver(self, src: int, tag: int, message: Any) -> None:
        if self.unread.drops(src, tag):
            return
        task = self._waiting.pop((src, tag), None)
        if task is not None:
            self._wake(task, message)
            return
        task = self._waiting_any.pop(tag, None)
        if task is not None:
            self._wake(task, (src, message))
            return
        self.unread.put(src, tag, message)

    def _peer_lost(self, rank: int) -> PeerLost:
        return self._presence.why_gone(rank, self.now)

    # The end of a run.

    def _tell_done(self) -> None:
        for peer in range(self.size):
            if peer != self.rank and peer in self._presence:
                self._transport.send_done(peer, self.job, self.num_runs)

    def _are_done(self) -> bool:
        """Whether all other workers are done with this run, or gone."""
        return self._presence.are_done(range(self.num_workers), self.num_runs)

    def _stuck(self) -> str:
        # Of the others' inboxes nothing is known here.
        inboxes = [*({} for _ in range(self.rank)), self.unread.inbox]
        gone = {rank: noticed_s for rank, (noticed_s, _) in self._presence.lost.items()}
        _, *lines = deadlock.report(self._tasks, inboxes, gone).splitlines()
        lines.insert(0, f"rank {self.rank}: nothing has happened for {self._timeout_s:g} s:")
        return "\n".join(lines)
