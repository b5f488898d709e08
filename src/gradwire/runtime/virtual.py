"""The simulator: n programs in one process, in deterministic virtual time.

Events wait in a heap ordered by (time, sequence). A program runs until it awaits something that
is not there yet; what it did until then took no virtual time. Gradient requests are evaluated as
late as possible: when the first of those outstanding is due, all go to the task's evaluator
together, also if they were made at different times.

Results that every rank computes from the same objects (`node.share`) are computed once.
"""

import heapq
import time
from collections import defaultdict, deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from torch import Tensor

from gradwire.core.errors import DeadlockError
from gradwire.core.node import (
    Call,
    Compute,
    Join,
    Node,
    Now,
    Recv,
    RecvAny,
    Send,
    Sleep,
    Spawn,
    Tag,
    Task,
)
from gradwire.runtime.ledger import Ledger
from gradwire.runtime.network import Network, Nics
from gradwire.runtime.trace import Trace

R = TypeVar("R")
Program = Callable[[Node], Coroutine[Any, Any, R]]
Evaluator = Callable[[list[Any]], Sequence[Any]]
Seconds = Callable[[int, Any], float]

_HEAD, _TAIL, _WAKE, _COMPUTED = range(4)
_PENDING = object()  # the result of a request that has not been evaluated
_SHARED_KEPT = 64  # results remembered for ranks that have not asked yet


def _no_evaluator(requests: list[Any]) -> Sequence[Any]:
    raise RuntimeError("this engine was made without an evaluator: programs cannot compute")


class _Request:
    """A gradient asked for and perhaps not evaluated yet."""

    __slots__ = ("request", "result", "task")

    def __init__(self, task: Task[Any], request: Any) -> None:
        self.task = task
        self.request = request
        self.result: Any = _PENDING


class VirtualEngine:
    """Runs programs on virtual nodes. Clocks, NICs and ledger go on from one run to the next."""

    def __init__(
        self,
        network: Network,
        *,
        evaluate: Evaluator = _no_evaluator,
        seconds: Seconds = lambda rank, request: 0.0,
        charge_calls: bool = False,
        record: bool = False,
    ) -> None:
        self.size = network.size
        self.nics = Nics(network)
        self.ledger = Ledger(self.size)
        self.clocks = [0.0] * self.size  # when each node's program last ended
        self.num_effects = 0
        # Wall-clock seconds in `call` and `share` by function: coding, averaging, updating.
        self.call_s: defaultdict[str, float] = defaultdict(float)
        self._evaluate = evaluate
        self._seconds = seconds
        self._charge_calls = charge_calls  # whether those seconds pass in virtual time too
        self._record = record
        self.trace: Trace | None = None  # of the last run, if it was recorded
        self._heap: list[tuple[float, int, int, Any]] = []
        self._sequence = 0
        self._outstanding: list[_Request] = []
        self._shared: dict[Any, list[Any]] = {}  # key -> [result, cost, ranks to come, arguments]
        self._inbox: list[dict[tuple[int, Tag], deque[Any]]] = [{} for _ in range(self.size)]
        self._waiting: list[dict[tuple[int, Tag], Task[Any]]] = [{} for _ in range(self.size)]
        self._waiting_any: list[dict[Tag, Task[Any]]] = [{} for _ in range(self.size)]
        self._tasks: list[Task[Any]] = []

    @property
    def now(self) -> float:
        """The time at which the last node finished."""
        return max(self.clocks)

    def run(self, programs: Sequence[Program[R]]) -> list[R]:
        """Runs one program per node, each from its node's clock on; returns their results."""
        assert len(programs) == self.size, f"{len(programs)} programs for {self.size} nodes"
        mains: list[Task[R]] = []
        try:
            for rank, program in enumerate(programs):
                main = Task(rank, program(Node(rank, self.size)))
                mains.append(main)
                self._tasks.append(main)
                self._push(self.clocks[rank], _WAKE, (main, None))
            if self._record:
                self.trace = Trace(mains)
            self._loop(mains)
            return [main.result for main in mains]
        finally:
            for task in self._tasks:  # after an error the other programs must not linger
                task.program.close()
            self._tasks.clear()
            self._heap.clear()
            self._outstanding.clear()
            self._shared.clear()
            for rank in range(self.size):
                self._waiting[rank].clear()
                self._waiting_any[rank].clear()

    def _loop(self, mains: list[Task[Any]]) -> None:
        heap, nics = self._heap, self.nics
        pop = heapq.heappop
        while heap:
            now, _, kind, what = pop(heap)
            if kind == _HEAD:  # a message's first bit reaches its receiver
                src, dst, _, _, nbytes = what
                self._push(nics.arrive(now, src, dst, nbytes), _TAIL, what)
            elif kind == _TAIL:
                self._deliver(now, what)
            elif kind == _COMPUTED:
                if what.result is _PENDING:
                    self._evaluate_outstanding()
                self._step(what.task, what.result, now)
            else:
                task, value = what
                self._step(task, value, now)
        if not all(main.done for main in mains):
            raise DeadlockError(self._deadlock())

    def _push(self, at: float, kind: int, what: Any) -> None:
        self._sequence += 1
        heapq.heappush(self._heap, (at, self._sequence, kind, what))

    def _step(self, task: Task[Any], value: Any, now: float) -> None:
        """Runs a program until it must wait."""
        send, throw = task.program.send, task.program.throw
        rank = task.rank
        trace = self.trace
        task.waiting_for = None
        failure: Exception | None = None  # of the effect: raised where the program awaits it
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
                    self._send(rank, effect, now)
                except ValueError as error:
                    failure = error
                    continue
                if trace is not None:
                    trace.send(task, effect)
            elif kind is Recv:
                if trace is not None:
                    trace.recv(task, effect)
                key = (effect.src, effect.tag)
                box = self._inbox[rank].get(key)
                if box:
                    value = box.popleft()[1]
                    if not box:
                        del self._inbox[rank][key]
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
                    value, cost = self._call(effect)
                except Exception as error:
                    failure = error
                    continue
                if self._charge_calls:
                    if trace is not None:
                        trace.pause(task, cost)
                    task.waiting_for = effect
                    self._push(now + cost, _WAKE, (task, value))
                    return
            elif kind is Compute:
                seconds = self._seconds(rank, effect.request)
                if trace is not None:
                    trace.pause(task, seconds)
                request = _Request(task, effect.request)
                self._outstanding.append(request)
                self._push(now + seconds, _COMPUTED, request)
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
                self._push(now + effect.seconds, _WAKE, (task, None))
                return
            elif kind is RecvAny:
                if trace is not None:
                    trace.depends_on_time()
                value = self._take_any(rank, effect.tag)
                if value is None:
                    other = self._waiting_any[rank].setdefault(effect.tag, task)
                    if other is not task:
                        what = f"{effect.tag!r} from anyone"
                        failure = RuntimeError(f"rank {rank} already waits for {what}")
                        continue
                    task.waiting_for = effect
                    return
            elif kind is Spawn:
                value = Task(rank, effect.program)
                self._tasks.append(value)
                self._push(now, _WAKE, (value, None))
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
            self._push(now, _WAKE, (joiner, result))

    def _send(self, rank: int, effect: Send, now: float) -> None:
        dst = effect.dst
        if not 0 <= dst < self.size:
            raise ValueError(f"rank {rank} sends to {dst}; there are ranks 0 .. {self.size - 1}")
        message = (rank, dst, effect.tag, effect.data, effect.nbytes)
        if dst == rank:  # never touches the network
            self._push(now, _TAIL, message)
            return
        self.ledger.record(rank, dst, effect.nbytes, effect.label)
        self._push(self.nics.leave(now, rank, effect.nbytes), _HEAD, message)

    def _deliver(self, now: float, message: tuple[int, int, Tag, Tensor, int]) -> None:
        src, dst, tag, data, _ = message
        task = self._waiting[dst].pop((src, tag), None)
        if task is not None:
            self._step(task, data, now)
            return
        task = self._waiting_any[dst].pop(tag, None)
        if task is not None:
            self._step(task, (src, data), now)
            return
        self._sequence += 1  # the order of arrival
        self._inbox[dst].setdefault((src, tag), deque()).append((self._sequence, data))

    def _take_any(self, rank: int, tag: Tag) -> tuple[int, Tensor] | None:
        """The message that has waited longest, if there is one."""
        inbox = self._inbox[rank]
        found = min(((box[0][0], key) for key, box in inbox.items() if key[1] == tag), default=None)
        if found is None:
            return None
        key = found[1]
        box = inbox[key]
        data = box.popleft()[1]
        if not box:
            del inbox[key]
        return key[0], data

    def _evaluate_outstanding(self) -> None:
        requests = self._outstanding
        results = self._evaluate([request.request for request in requests])
        assert len(results) == len(requests), "an evaluator answers every request"
        for request, result in zip(requests, results):
            request.result = result
        self._outstanding = []

    def _call(self, effect: Call[Any]) -> tuple[Any, float]:
        """The result, and the seconds it takes a rank to compute it."""
        if not effect.shared or self.size == 1:
            return self._timed(effect)
        key = (effect.function, *map(_identity, effect.args))
        entry = self._shared.get(key)
        if entry is None:
            result, cost = self._timed(effect)
            if len(self._shared) >= _SHARED_KEPT:  # forget the oldest: only speed is lost
                del self._shared[next(iter(self._shared))]
            # Keeping the arguments alive keeps their identities from being used again.
            self._shared[key] = [result, cost, self.size - 1, effect.args]
            return result, cost
        entry[2] -= 1
        if entry[2] == 0:
            del self._shared[key]
        return entry[0], entry[1]

    def _timed(self, effect: Call[Any]) -> tuple[Any, float]:
        start = time.perf_counter()
        result = effect.function(*effect.args)
        cost = time.perf_counter() - start
        function = effect.function
        self.call_s[getattr(function, "__qualname__", type(function).__name__)] += cost
        return result, cost

    def _deadlock(self) -> str:
        lines = ["every program waits and no message is under way:"]
        lines += [
            f"  rank {task.rank} waits for {_described(task.waiting_for)}"
            for task in self._tasks
            if not task.done
        ]
        lines += [
            f"  rank {rank} has an unread message from rank {src}, tag {tag!r}"
            for rank, inbox in enumerate(self._inbox)
            for src, tag in inbox
        ]
        return "\n".join(lines)


def _identity(value: Any) -> Any:
    """Tensors are the same if they are the same object; everything else if it is equal."""
    if isinstance(value, Tensor):
        return id(value)
    if isinstance(value, tuple | list):
        return tuple(map(_identity, value))
    if isinstance(value, dict):
        return tuple((key, _identity(item)) for key, item in value.items())
    return value


def _described(effect: Any) -> str:
    if isinstance(effect, Recv):
        return f"a message from rank {effect.src}, tag {effect.tag!r}"
    if isinstance(effect, RecvAny):
        return f"a message from any rank, tag {effect.tag!r}"
    if isinstance(effect, Join):
        return f"the end of a program it spawned on rank {effect.task.rank}"
    return type(effect).__name__
