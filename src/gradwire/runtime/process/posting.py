"""An engine that runs programs which other threads post, until it is closed.

`serve` runs on a thread of its own, beside a training loop that somebody else wrote: a hook posts
the exchange of a bucket and continues; the future has its result. Posted programs run side by side.
While none is under way the engine waits without limit.

All ranks post the same programs in the same order. A program may form one mean by the transport's
own all-reduce (`num_collectives=1`), or as many as it likes, of which each then waits until the
programs before it have ended (`native_means.py`).

An exchange that fails on one rank can never end on the others. So the first failure ends the
engine: all futures have its exception, and so does every later `post`. The other ranks hear of it
and fail with `PeerLost`, which names this rank.
"""

import threading
import time
from collections import deque
from concurrent.futures import Future
from typing import Any, NamedTuple

from torch.autograd import profiler

from gradwire.core.errors import PeerLost
from gradwire.core.node import Call, Node
from gradwire.runtime.interpreter.calls import Calls
from gradwire.runtime.interpreter.interpreter import Program, R, Task
from gradwire.runtime.process.engine import ProcessEngine, StuckError


class _Posted(NamedTuple):
    program: Program[Any]
    future: "Future[Any]"
    num_collectives: int | None


class _ProfiledCalls(Calls):
    """Calls that are visible to torch.profiler."""

    def _timed(self, effect: Call[Any]) -> tuple[Any, float]:
        if not profiler._is_profiler_enabled:
            return super()._timed(effect)
        function = effect.function
        name = getattr(function, "__qualname__", type(function).__name__)
        with profiler.record_function(f"gradwire: {name}"):
            return super()._timed(effect)


class PostingEngine(ProcessEngine):
    """`serve` runs what `post` gets. The transport must have `wake`."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._calls = _ProfiledCalls(1)
        self._posted: deque[_Posted] = deque()
        self._futures: dict[Task, Future[Any]] = {}
        self._lock = threading.Lock()  # of the end: no post comes after it unseen
        self._is_closing = False
        self.failure: BaseException | None = None

    def post(self, program: Program[R], *, num_collectives: int | None = None) -> "Future[R]":
        """Starts a program, and returns at once. Any thread may call it."""
        future: Future[R] = Future()
        with self._lock:
            if self.failure is not None:
                future.set_exception(self.failure)
                return future
            if self._is_closing:
                raise RuntimeError("the engine is closed: nothing can be exchanged any more")
            self._posted.append(_Posted(program, future, num_collectives))
        self._transport.wake()  # type: ignore[attr-defined]
        return future

    def close(self) -> None:
        """Ends `serve` when what was posted has ended. Any thread may call it."""
        with self._lock:
            self._is_closing = True
        self._transport.wake()  # type: ignore[attr-defined]

    def serve(self) -> None:
        """Runs posted programs until `close`, or until one fails."""
        native = self._natives.are_offered
        node = Node(self.rank, self.num_workers, native=native, is_alone=True)
        self._natives.begin_posting()
        try:
            while True:
                self._start_posted(node)
                self._run_programs()
                if self._posted or self._ready:
                    continue
                if self._is_closing and not self._tasks:
                    return
                self._wait_for_arrival()
        except BaseException as error:
            self._fail(error)
        finally:
            self._close_programs()
            self._natives.clear()

    def _start_posted(self, node: Node) -> None:
        while self._posted:
            program, future, num_collectives = self._posted.popleft()
            task = self._start(self.rank, program(node))
            self._futures[task] = future
            self._natives.post(task, num_collectives)

    def _finish(self, task: Task) -> None:
        super()._finish(task)
        future = self._futures.pop(task, None)
        if future is not None:
            future.set_result(task.result)

    def _wait_for_arrival(self) -> None:
        if not self._tasks:  # only a post can be next, or news of a peer
            self._take(None)
            return
        began = time.monotonic()
        limit = min(self._timers.due_s, began + self._timeout_s)
        came = self._take(max(0.0, limit - began))
        self.wait_s += time.monotonic() - began
        if not came and limit < self._timers.due_s:
            raise StuckError(self._stuck())

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self.failure = error
            waiting = [*self._futures.values(), *(posted.future for posted in self._posted)]
            self._futures.clear()
            self._posted.clear()
        self._transport.close(self.rank if not isinstance(error, PeerLost) else error.rank)  # type: ignore[attr-defined]
        for future in waiting:
            future.set_exception(error)
