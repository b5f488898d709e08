"""The engine for real processes: it runs the program of one rank, and what that spawns.

It interprets the same effects as the simulator (`runtime/virtual/engine.py`), for one node, on the
thread that calls `run`. Programs take turns: each runs until it awaits something that is not there
yet. Gradients are computed when no program can continue, so that messages leave before. Time is the
seconds since the engine was made.

Messages that no program has read are taken from the transport up to a number of bytes. Beyond it
they stay there, and their senders wait, unless no program could continue otherwise: the message
that one waits for may be behind them.

With `native` a mean that a program asks for as such (`Collective`) is left to the transport, if
that has a collective for it (`native_means.py`). Messages are received meanwhile, so that the loss
of a rank is noticed.
"""

import time
from collections.abc import Callable
from itertools import count
from math import inf
from typing import Any

from gradwire.core.node import Node
from gradwire.runtime.interpreter import deadlock
from gradwire.runtime.interpreter.calls import Evaluator, no_evaluator
from gradwire.runtime.interpreter.interpreter import Program, R, Task
from gradwire.runtime.process.computation import LAST_LAYER, LayerEvaluator, ProcessComputation
from gradwire.runtime.process.rank import RankInterpreter
from gradwire.runtime.process.transport import Transport
from gradwire.runtime.replay.order import Recorder

_PATIENCE = 24  # factor on the timeout for programs that serve others
_CLOCK_CHECK_S = 1.0  # between two looks at the clock
_SUSPENDED_S = 0.5  # a wake-up that is later by this was that of a suspended process
_ON_WAIT_S = 0.1  # between two calls of `on_wait`


class StuckError(RuntimeError):
    """Nothing has happened for too long."""


class ProcessEngine(RankInterpreter):
    """Runs this rank's program. All ranks make theirs with the same `job`.

    Ranks 0 .. num_workers - 1 are workers. Messages of another job are not read: those of an
    earlier one are dropped, those of a later one kept for it. `timeout_s` is how long nothing may
    happen while a worker waits. `log` records the event order.
    `native`: means may be formed by the transport's own all-reduce, which adds in another order;
    without it they have the simulator's bits. All ranks must say the same.
    """

    def __init__(
        self,
        transport: Transport,
        num_workers: int | None = None,
        *,
        evaluate: Evaluator = no_evaluator,
        evaluate_layers: LayerEvaluator | None = None,
        timeout_s: float = 300.0,
        job: int = 0,
        log: Recorder | None = None,
        native: bool = False,
        max_unread_nbytes: int = 64 << 20,
    ) -> None:
        super().__init__(transport, num_workers, job, native, max_unread_nbytes)
        self.compute_s = 0.0  # seconds in gradients
        self.wait_s = 0.0  # seconds in which every program waited
        self.log = log  # of the next run, too
        self.num_runs = 0  # so far; a late joiner sets it to the number of the others
        # Called now and then while every program waits. It may end the run by an exception.
        self.on_wait: Callable[[], None] | None = None
        self._evaluate = evaluate
        self._evaluate_layers = evaluate_layers
        self._timeout_s = timeout_s
        for arrival in transport.deferred(job):
            self._arrive(arrival)

    def run(
        self, program: Program[R], *, serves: bool = True, is_patient: bool = False
    ) -> R | None:
        """Runs a worker's program to its end, and returns its result.

        Programs that it spawned and that have not ended continue to serve the others until all
        workers are done with this run; then they are closed. The program of another role (a
        server) ends in the same way, and its result is None; unless it does not serve: then it,
        too, runs to its end. Unread messages stay for the next run.

        A rank that is done, that serves or that `is_patient` waits longer than `timeout_s`, since
        the others may be busy without sending anything: as long as the others are there, if the
        transport notices when they are not, else `_PATIENCE` times as long.
        """
        self.num_runs += 1
        self._numbers = count()
        log, handlers = self.log, self._handlers
        if log is not None:
            if self._natives.are_offered:
                raise ValueError(
                    "a run whose order is recorded has no native collectives: the simulator could "
                    "not replay it to the same bits. Make the engine with native=False."
                )
            log.begin()
            self._handlers = log.record(handlers, self._tasks)
        if self.spans is not None:
            self._handlers = self.spans.record(self._handlers)
        native = self._natives.are_offered
        node = Node(self.rank, self.num_workers, native=native, is_alone=True)
        main = self._start(self.rank, program(node))
        self._natives.begin(main)
        is_worker = self.layout.is_worker(self.rank)
        serves_others = serves and not is_worker
        has_reported = not is_worker  # whether the others know that this one is done
        try:
            while True:
                self._run_ready()
                if main.done and not has_reported:
                    has_reported = True
                    self._report_done()
                if main.done and not self._tasks:
                    break
                if (main.done or serves_others) and self._are_done():
                    break
                self._wait(is_patient or main.done or serves_others)
            if log is not None:
                log.end(self.now)
            return main.result
        finally:
            self._close_programs()
            self._handlers = handlers
            self._ready.clear()
            self._to_compute.clear()
            self._timers.clear()
            self._natives.clear()

    def _run_ready(self) -> None:
        """Does everything that can be done without waiting.

        When all programs have ended, messages stay in the transport for the next run: a program
        learns of events only while it waits. So a replay of the same messages in the same order
        makes another process do the same.
        """
        while True:
            self._run_programs()
            if not self._tasks or not self._to_compute:
                return
            following = self._to_compute.popleft()
            if isinstance(following, ProcessComputation):
                self._compute_layers(following)
            else:
                self._compute(*following)

    def _run_programs(self) -> None:
        """Runs programs and takes messages, until programs wait for gradients or for messages."""
        while True:
            while self._ready:
                task, value, failure = self._ready.popleft()
                if self.log is not None:
                    self.log.resume(self._tasks[task], value, failure)
                self._step(task, value, failure)
            if not self._tasks:
                return
            if not ((not self.unread.is_full and self._take(0.0)) or self._expire()):
                return

    def _wait(self, is_patient: bool) -> None:
        """Waits until something happens."""
        began = time.monotonic()
        limit = began + self._timeout_s
        if is_patient:
            can_trust = getattr(self._transport, "notices_silence", False)
            limit = inf if can_trust else began + _PATIENCE * self._timeout_s
        due = self._timers.due_s
        pause = _CLOCK_CHECK_S if self.on_wait is None else _ON_WAIT_S
        now = began
        while True:
            if self.on_wait is not None:
                self.on_wait()
            asked_s = max(0.0, min(limit, due, now + pause) - time.monotonic())
            if self._take(asked_s):
                break
            before, now = now, time.monotonic()
            if now - before > pause + _SUSPENDED_S:
                limit += now - before  # this process was suspended, not the others silent
            if now >= due:
                break
            if now >= limit:
                raise StuckError(self._stuck())
        self.wait_s += time.monotonic() - began

    def _compute(self, task: Task, request: Any) -> None:
        clock_s, began = time.monotonic(), time.perf_counter()
        try:
            (result,) = self._evaluate([request])
        except Exception as error:
            self._resume(task, None, error)
        else:
            self._resume(task, result)
        self.compute_s += time.perf_counter() - began
        if self.spans is not None:
            self.spans.compute(clock_s)

    def _compute_layers(self, begun: ProcessComputation) -> None:
        """Computes a gradient; programs run whenever the gradient of a layer is there.

        Where parameters are still arriving, they also run before each layer of the forward pass.
        """
        clock_s, began = time.monotonic(), time.perf_counter()
        errors: list[BaseException] = []  # of programs, which end the run

        def pause(work: Callable[[], None]) -> None:
            """Does something else than to compute."""
            nonlocal began, clock_s
            self.compute_s += time.perf_counter() - began
            try:
                work()
            except BaseException as error:
                errors.append(error)
                raise
            clock_s, began = time.monotonic(), time.perf_counter()

        def on_layer(layer: int, result: Any) -> None:
            if self.spans is not None:
                self.spans.compute_layer(layer, clock_s)
            for task in begun.advance(layer, result):
                self._resume(task, result)
            pause(self._run_programs)

        def before_layer(layer: int) -> None:
            if self.spans is not None:
                self.spans.compute(clock_s)
            pause(lambda: self._wait_for_params(begun, layer))

        try:
            if self._evaluate_layers is None:
                if not begun.has_all_params:
                    before_layer(LAST_LAYER)
                (result,) = self._evaluate([begun.request])
                on_layer(0, result)
            else:
                arriving = None if begun.has_all_params else before_layer
                self._evaluate_layers(begun.request, on_layer, arriving)
        except Exception as error:
            if errors:
                raise errors[0] from None
            for task in begun.fail(error):
                self._resume(task, None, error)
        self.compute_s += time.perf_counter() - began

    def _wait_for_params(self, begun: ProcessComputation, layer: int) -> None:
        while True:
            self._run_programs()
            if begun.is_open(layer):
                return
            self._wait(is_patient=False)

    def _report_done(self) -> None:
        for peer in range(self.size):
            if peer != self.rank and peer not in self._peers.gone:
                self._transport.send_done(peer, self.job, self.num_runs)

    def _are_done(self) -> bool:
        """Whether all other workers are done with this run, or gone."""
        return self._peers.are_done(self.layout.workers, self.num_runs)

    def _stuck(self) -> str:
        # Of the others' inboxes nothing is known here.
        inboxes = [*({} for _ in range(self.rank)), self.unread.inbox]
        gone = {rank: noticed_s for rank, (noticed_s, _) in self._peers.lost.items()}
        _, *lines = deadlock.report(self._tasks, inboxes, gone).splitlines()
        lines.insert(0, f"rank {self.rank}: nothing has happened for {self._timeout_s:g} s:")
        return "\n".join(lines)
