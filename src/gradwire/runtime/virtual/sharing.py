"""The simulator where all nodes share the cores of one machine: see `host.py` for the model."""

from collections.abc import Callable, Coroutine, Sequence
from typing import Any, cast

from gradwire.core.node import Begin, Call, Computation, Compute, Open, Reach, Send, Tag
from gradwire.runtime.interpreter.calls import Calls
from gradwire.runtime.interpreter.checks import check_send
from gradwire.runtime.interpreter.interpreter import WAITING, Program, R, Task
from gradwire.runtime.network.network import Network
from gradwire.runtime.virtual.cores import SharedCores, Thread
from gradwire.runtime.virtual.engine import VirtualEngine
from gradwire.runtime.virtual.gradients import PendingGradient
from gradwire.runtime.virtual.host import Cores, Host
from gradwire.runtime.virtual.spans import VirtualSpans


class _InFlight:
    """A message whose bytes threads move while the network carries them."""

    __slots__ = ("_is_here", "_num_moving", "_then", "data", "nbytes")

    def __init__(self, data: Any, nbytes: int) -> None:
        self.data = data
        self.nbytes = nbytes
        self._num_moving = 2  # threads that are not done with it: the sender's, the receiver's
        self._is_here = False  # whether the network is done with it
        self._then: Callable[[], None] = _nothing

    def moved(self) -> None:
        """A thread has moved its bytes."""
        self._num_moving -= 1
        if self._is_here and not self._num_moving:
            self._then()

    def arrive(self, then: Callable[[], None]) -> None:
        """The network has carried its last bit. `then` happens when threads are done, too."""
        self._is_here, self._then = True, then
        if not self._num_moving:
            then()


class _SharedComputation(Computation):
    """A gradient under way on the thread of a node, in slices that are not interrupted."""

    __slots__ = ("gradient", "next_forward", "opened", "reached", "seconds", "waiting")

    def __init__(self, seconds: float, num_layers: int) -> None:
        self.seconds = seconds
        self.gradient: PendingGradient | None = None
        self.opened: set[int] = set()
        self.next_forward = 0  # the layer whose forward pass comes next
        self.reached = num_layers  # the first layer whose gradient is there
        self.waiting: list[tuple[Task, int]] = []


class _TimedProgram:
    """A program, and the seconds it has run."""

    __slots__ = ("_clock", "_program", "close", "seconds")

    def __init__(self, program: Coroutine[Any, Any, Any], clock: Callable[[], float]) -> None:
        self._program, self._clock = program, clock
        self.close = program.close
        self.seconds = 0.0

    def send(self, value: Any) -> Any:
        return self._timed(self._program.send, value)

    def throw(self, error: BaseException) -> Any:
        return self._timed(self._program.throw, error)

    def _timed(self, resume: Callable[[Any], Any], value: Any) -> Any:
        began = self._clock()
        try:
            return resume(value)
        finally:
            self.seconds += self._clock() - began


class SharedEngine(VirtualEngine):
    """Runs programs on virtual nodes that share cores. Without faults, traces and spans."""

    _calls_type = Calls  # how long a call takes depends on what else the cores do
    _knows_exchanges = False  # cores send and receive each message

    def __init__(self, host: Cores, network: Network, *args: Any, **options: Any) -> None:
        if options.get("faults") or options.get("record"):
            raise ValueError(
                f"{host!r} goes with neither faults nor what_if: leave them out, or take lanes"
            )
        super().__init__(network, *args, **options)
        self._host = host
        self._cores = SharedCores(host.count, self._events)
        self._threads = [Thread() for _ in range(self.size)]
        self._movers = [Thread() for _ in range(self.size)]
        self._handlers[Send] = self._send
        coding = options.get("coding")
        self._program_slowdown = None if coding is None else coding.program_slowdown
        self._clock = None if coding is None else coding.clock

    @property
    def processor_s(self) -> float:
        """Seconds of cores that all nodes have taken."""
        return self._cores.total_s

    def run(
        self,
        programs: Sequence[Program[R]],
        daemons: Sequence[Program[Any]] = (),
        rejoin: Program[R] | None = None,
        spans: VirtualSpans | None = None,
    ) -> list[R | Any]:
        if spans is not None:
            raise ValueError(f"what nodes do on {self._host!r} cannot be recorded: take lanes")
        try:
            return super().run(programs, daemons, rejoin)
        finally:
            self._cores.clear()
            self._threads[:] = [Thread() for _ in self._threads]
            self._movers[:] = [Thread() for _ in self._movers]

    def _start(self, rank: int, program: Coroutine[Any, Any, Any], priority: int = 0) -> Task:
        return self._timed(super()._start(rank, program, priority))

    def _start_at(self, rank: int, program: Program[Any], at: float) -> Task:
        return self._timed(super()._start_at(rank, program, at))

    def _timed(self, task: Task) -> Task:
        if self._program_slowdown is not None:
            assert self._clock is not None
            timed = _TimedProgram(task.program, self._clock)
            task.program = cast(Coroutine[Any, Any, Any], timed)
        return task

    def _own_s(self, task: Task) -> float:
        """Seconds that a program has taken itself since it last waited."""
        program: Any = task.program
        if not isinstance(program, _TimedProgram):
            return 0.0
        assert self._program_slowdown is not None
        seconds, program.seconds = self._program_slowdown * program.seconds, 0.0
        return seconds

    def _step(self, task: Task, value: Any = None, failure: Exception | None = None) -> None:
        super()._step(task, value, failure)
        if own_s := self._own_s(task):  # it waits for something, or has ended
            self._cores.submit(self._threads[task.rank], own_s, _nothing)

    def _send(self, task: Task, effect: Send) -> Any:
        src, dst, nbytes = task.rank, effect.dst, effect.nbytes
        if dst == src:
            self._transport.send(task, effect)
            return None
        check_send(effect, src, self.size)

        fixed_s, per_byte_s = self._host.send
        moved = _InFlight(effect.data, nbytes)

        def leave() -> None:
            move_s, per_byte = self._host.transfer
            mover = self._movers[dst]
            wake_s = 0.0 if mover.is_busy else self._host.wake[1]
            self._cores.submit(self._movers[src], per_byte * nbytes, _nothing)
            self._cores.submit(mover, wake_s + move_s + per_byte * nbytes, moved.moved)
            self._transport.send(task, Send(dst, effect.tag, moved, nbytes, effect.label))
            # The network carries the first bytes while the thread hands over the others.
            self._cores.submit(self._threads[src], per_byte_s * nbytes, sent)

        def sent() -> None:
            moved.moved()
            self._step(task)

        task.waiting_for = effect
        self._cores.submit(self._threads[src], self._own_s(task) + fixed_s, leave)
        return WAITING

    def _deliver(self, src: int, dst: int, tag: Tag, message: Any) -> None:
        """The last bit of a message is there: the node's thread takes it when it can."""
        deliver = super()._deliver
        if not isinstance(message, _InFlight):  # of the node itself
            self._cores.submit(self._threads[dst], 0.0, lambda: deliver(src, dst, tag, message))
            return

        def receive() -> None:
            thread, (fixed_s, per_byte) = self._threads[dst], self._host.receive
            wake_s = 0.0 if thread.is_busy else self._host.wake[0]
            seconds = wake_s + fixed_s + per_byte * message.nbytes
            self._cores.submit(thread, seconds, lambda: deliver(src, dst, tag, message.data))

        message.arrive(receive)

    def _call(self, task: Task, effect: Call[Any]) -> Any:
        value, seconds = self._calls.run(effect)
        seconds += self._own_s(task)
        if seconds <= 0.0:
            return value
        task.waiting_for = effect
        self._cores.submit(self._threads[task.rank], seconds, lambda: self._step(task, value))
        return WAITING

    def _compute(self, task: Task, effect: Compute[Any]) -> Any:
        pending = self._gradients.add(task, effect.request)
        task.waiting_for = effect
        self._cores.submit_last(
            self._threads[task.rank],
            self._seconds(task.rank, effect.request),
            lambda: self._step(task, self._gradients.result(pending)),
        )
        return WAITING

    def _begin(self, task: Task, effect: Begin) -> Any:
        seconds = self._seconds(task.rank, effect.request)
        begun = _SharedComputation(seconds, len(self._layer_times.forward))
        if effect.is_open:
            self._add_gradient(task, begun, effect.request)
            self._pass_back(task.rank, begun, self._layer_times.forward_share)
        return begun

    def _open(self, task: Task, effect: Open) -> None:
        begun = effect.computation
        assert isinstance(begun, _SharedComputation)
        begun.opened.add(effect.layer)
        self._add_gradient(task, begun, effect.request)
        if self._host.forward == "layers":
            if effect.layer == begun.next_forward:
                self._pass_forward(task.rank, begun)
        elif len(begun.opened) == len(self._layer_times.forward):
            self._pass_back(task.rank, begun, self._layer_times.forward_share)

    def _reach(self, task: Task, effect: Reach[Any]) -> Any:
        begun = effect.computation
        assert isinstance(begun, _SharedComputation)
        if effect.layer >= begun.reached:
            return self._result(begun)
        task.waiting_for = effect
        begun.waiting.append((task, effect.layer))
        return WAITING

    def _add_gradient(self, task: Task, begun: _SharedComputation, request: Any) -> None:
        if request is not None:
            begun.gradient = self._gradients.add(task, request)

    def _result(self, begun: _SharedComputation) -> Any:
        return None if begun.gradient is None else self._gradients.result(begun.gradient)

    def _pass_forward(self, rank: int, begun: _SharedComputation) -> None:
        """Computes the forward pass of the next layer, whose parameters are there."""
        forward = self._layer_times.forward

        def passed() -> None:
            begun.next_forward += 1
            if begun.next_forward == len(forward):
                self._pass_back(rank, begun, 0.0)
            elif begun.next_forward in begun.opened:
                self._pass_forward(rank, begun)

        seconds = begun.seconds * forward[begun.next_forward]
        self._cores.submit_last(self._threads[rank], seconds, passed)

    def _pass_back(self, rank: int, begun: _SharedComputation, before: float) -> None:
        """Computes the gradient of the next layer, after a share of the time for what precedes."""
        times, layer = self._layer_times, begun.reached - 1
        ends = times.backward_ends
        begins = ends[layer + 1] if layer + 1 < len(ends) else times.forward_share

        def passed() -> None:
            begun.reached = layer
            ready = [task for task, waited in begun.waiting if waited >= layer]
            begun.waiting = [entry for entry in begun.waiting if entry[1] < layer]
            for task in ready:
                self._step(task, self._result(begun))
            if layer:
                self._pass_back(rank, begun, 0.0)

        seconds = begun.seconds * (before + ends[layer] - begins)
        self._cores.submit_last(self._threads[rank], seconds, passed)


def _nothing() -> None:
    pass


def make_engine(host: Host, network: Network, *args: Any, **options: Any) -> VirtualEngine:
    """The engine for nodes that run on this."""
    if isinstance(host, Cores):
        return SharedEngine(host, network, *args, **options)
    return VirtualEngine(network, *args, **options)
