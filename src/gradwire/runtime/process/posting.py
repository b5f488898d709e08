"""An engine that runs programs which other threads post, until it is closed.

`serve` runs on a thread of its own, beside a training loop that somebody else wrote: a hook posts
the exchange of a bucket and continues; the future has its result. Posted programs run side by side.
While none is under way the engine waits without limit.

All ranks post the same programs in the same order. A program may form one mean by the transport's
own all-reduce (`num_collectives=1`), or as many as it likes, of which each then waits until the
programs before it have ended (`native_means.py`).

What a program exchanges may be memory of the user's, such as a bucket of DDP, which is written
again as soon as the result is there. Messages in such memory, which the post names as `borrowed`,
are copied, since they may leave later.

An exchange that fails on one rank can never end on the others. So the first failure ends the
engine: all futures have its exception, and so does every later `post`. The other ranks hear of it
and fail with `PeerLost`, which names this rank.
"""

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd import profiler

from gradwire import kernels
from gradwire.core.errors import PeerLost
from gradwire.core.node import Call, Collective, Framed, Node, Recv, Send, Tag
from gradwire.core.wire import ANSWER, REQUEST
from gradwire.runtime.interpreter.calls import Calls
from gradwire.runtime.interpreter.interpreter import WAITING, Program, R, Task
from gradwire.runtime.process.engine import ProcessEngine, StuckError
from gradwire.runtime.process.frames import frame_nbytes
from gradwire.runtime.process.transport import tensor_of


@dataclass
class Traffic:
    """Bytes."""

    sent: int = 0
    received: int = 0


class _Posted(NamedTuple):
    program: Program[Any]
    future: "Future[Any]"
    num_collectives: int | None
    borrowed: Tensor | None


class _Borrowed:
    """Memory of the user's that programs under way exchange, and the copies of messages in it."""

    def __init__(self) -> None:
        self._places: dict[Task, int] = {}
        self._copies: dict[int, list[tuple[Any, Any]]] = {}  # by place: messages and their copies

    def add(self, task: Task, x: Tensor) -> None:
        place = self._places[task] = x.untyped_storage().data_ptr()
        self._copies[place] = []

    def discard(self, task: Task) -> None:
        place = self._places.pop(task, None)
        if place is not None and place not in self._places.values():
            del self._copies[place]

    def clear(self) -> None:
        self._places.clear()
        self._copies.clear()

    def own(self, message: Any) -> Any:
        """The message, or a copy of it, the same for all receivers, if it lies in such memory."""
        if not self._copies:
            return message
        data = tensor_of(message)
        place = None if data is None else data.untyped_storage().data_ptr()
        if data is None or place not in self._copies:
            return message
        copies = self._copies[place]
        for given, copy in copies:
            if given is message:
                return copy
        own: Any = kernels.empty(data.numel(), data.dtype, data.device).view(data.shape)
        own.copy_(data)
        own = Framed(message.header, own) if isinstance(message, Framed) else own
        copies.append((message, own))
        return own


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
        # Bytes sent and received, with frames, by what tags begin with up to a slash.
        self.traffic: defaultdict[str, Traffic] = defaultdict(Traffic)
        self._posted: deque[_Posted] = deque()
        self._futures: dict[Task, Future[Any]] = {}
        self._borrowed = _Borrowed()
        self._lock = threading.Lock()  # of the end: no post comes after it unseen
        self._is_closing = False
        self._is_aborted = False
        self.failure: BaseException | None = None
        # What the user gets in the place of an exception.
        self.explain: Callable[[BaseException], BaseException] = lambda error: error

    def post(
        self,
        program: Program[R],
        *,
        num_collectives: int | None = None,
        borrowed: Tensor | None = None,
    ) -> "Future[R]":
        """Starts a program, and returns at once. Any thread may call it."""
        future: Future[R] = Future()
        with self._lock:
            if self.failure is not None:
                future.set_exception(self.failure)
                return future
            if self._is_closing:
                raise RuntimeError("the engine is closed: nothing can be exchanged any more")
            self._posted.append(_Posted(program, future, num_collectives, borrowed))
        self._transport.wake()  # type: ignore[attr-defined]
        return future

    def close(self) -> None:
        """Ends `serve` when what was posted has ended. Any thread may call it."""
        with self._lock:
            self._is_closing = True
        self._transport.wake()  # type: ignore[attr-defined]

    def abort(self) -> None:
        """Ends `serve` without waiting for what was posted. Any thread may call it."""
        self._is_aborted = True
        self._transport.wake()  # type: ignore[attr-defined]

    def serve(self) -> None:
        """Runs posted programs until `close`, or until one fails."""
        native = self._natives.are_offered
        node = Node(self.rank, self.num_workers, native=native, is_alone=True)
        self._natives.begin_posting()
        try:
            while not self._is_aborted:
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
            self._borrowed.clear()

    def _start_posted(self, node: Node) -> None:
        while self._posted:
            program, future, num_collectives, borrowed = self._posted.popleft()
            task = self._start(self.rank, program(node))
            self._futures[task] = future
            if borrowed is not None:
                self._borrowed.add(task, borrowed)
            self._natives.post(task, num_collectives)

    # Counting. Messages are counted as received when a program reads them, since only that knows
    # their tag.

    def _send(self, task: Task, effect: Send) -> None:
        if effect.dst != self.rank and effect.dst not in self._peers.gone:
            self.traffic[_owner(effect.tag, effect.label)].sent += self._nbytes(effect.data)
            effect.data = self._borrowed.own(effect.data)
        super()._send(task, effect)

    def _recv(self, task: Task, effect: Recv) -> Any:
        value = super()._recv(task, effect)
        if value is not WAITING:
            self._count_received(effect, value)
        return value

    def _deliver(self, src: int, dst: int, tag: Tag, message: Any) -> None:
        task = self.unread.waiting.get((src, tag))
        if task is not None and isinstance(task.waiting_for, Recv):
            self._count_received(task.waiting_for, message)
        super()._deliver(src, dst, tag, message)

    def _count_received(self, effect: Recv, message: Any) -> None:
        if effect.src != self.rank:
            self.traffic[_owner(effect.tag)].received += self._nbytes(message)

    def _collective(self, task: Task, effect: Collective) -> Any:
        before = self.native_nbytes
        value = super()._collective(task, effect)
        counted = self.traffic[_owner(effect.label)]
        counted.sent += self.native_nbytes - before
        counted.received += self.native_nbytes - before
        return value

    def _nbytes(self, message: Any) -> int:
        return frame_nbytes(message, self._transport.headers)  # type: ignore[attr-defined]

    def _finish(self, task: Task) -> None:
        super()._finish(task)
        self._borrowed.discard(task)
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
        lost = error.rank if isinstance(error, PeerLost) else self.rank
        error = self.explain(error)
        with self._lock:
            self.failure = error
            waiting = [*self._futures.values(), *(posted.future for posted in self._posted)]
            self._futures.clear()
            self._posted.clear()
        self._transport.close(lost)  # type: ignore[attr-defined]
        for future in waiting:
            future.set_exception(error)


def _owner(tag: Tag, label: str = "") -> str:
    """What the first text in a tag begins with, up to a slash. Tags of messages to and from servers
    begin with what they are; requests all have the same, so that their label says it."""
    while isinstance(tag, tuple):
        tag = tag[1] if tag[0] in (REQUEST, ANSWER) else tag[0]
    return str(label if tag == REQUEST else tag).partition("/")[0]
