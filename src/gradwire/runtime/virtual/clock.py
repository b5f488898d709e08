"""The effects that take virtual time: sleeps, calls and gradients, whole or layer by layer."""

from array import array
from collections.abc import Callable
from itertools import chain
from operator import attrgetter
from typing import Any

from gradwire.core.node import Begin, Call, Compute, Effect, Open, Reach
from gradwire.runtime.interpreter.interpreter import WAITING, Interpreter, Task
from gradwire.runtime.virtual.computation import LayerTimes, VirtualComputation
from gradwire.runtime.virtual.events import CALLED, COMPUTED, HELD, REACHED, TIMEOUT, WAKE, Events
from gradwire.runtime.virtual.gradients import PendingGradients
from gradwire.runtime.virtual.late_calls import HeldCall, LateCall, LateCalls
from gradwire.runtime.virtual.trace import Trace

_HELD_FOR = 0.999  # of the least time that a call takes
Seconds = Callable[[int, Any], float]  # of a gradient, given the rank and the request


class VirtualClock(Interpreter):
    """Answers such effects by events. The engine makes the attributes, and runs the events."""

    trace: Trace | None
    _events: Events
    _gradients: PendingGradients
    _seconds: Seconds
    _layer_times: LayerTimes
    _coding_free: "array[float]"  # when each node has finished its calls
    _held: dict[int, list[HeldCall]]  # by rank

    _resume = Interpreter._step

    def _resume_any(self, task: Task, found: tuple[int, Any]) -> None:
        # Only now: waiting for a message that never comes does not depend on time.
        if self.trace is not None and not task.waiting_for.is_gathering:
            self.trace.depends_on_time()
        self._step(task, found)

    def _schedule(self, task: Task, value: Any = None) -> None:
        self._events.push(self._events.now, WAKE, (task, value))

    def _resume_after(self, task: Task, seconds: float, value: Any = None) -> None:
        if self.trace is not None:
            self.trace.pause(task, seconds)
        self._events.push(self._events.now + seconds, WAKE, (task, value))

    def _time_out_after(self, task: Task, seconds: float) -> None:
        at = self._events.now + seconds
        self._events.push_last(at, TIMEOUT, (task, task.waiting_for))

    def _call(self, task: Task, effect: Call[Any]) -> Any:
        value, cost = self._calls.run(effect)
        if type(value) is HeldCall:
            return self._hold(task, value)
        if cost <= 0.0:  # then it is not late
            return value
        if self.trace is not None:
            self.trace.occupy(task, cost)
        return self._occupy(task, effect, cost, value)

    def _hold(self, task: Task, call: HeldCall) -> Any:
        """Keeps a call until just before it may be over, for others to be evaluated with it."""
        events = self._events
        call.task, call.at, call.number = task, events.now, next(events.numbers)
        events.push_after(events.now + _HELD_FOR * call.least_s, HELD, call)
        self._held.setdefault(task.rank, []).append(call)
        task.waiting_for = call.effect
        return WAITING

    def _release(self) -> None:
        """Evaluates the calls that are held; their programs go on when they are over."""
        if not self._held:
            return
        held = sorted(chain(*self._held.values()), key=attrgetter("number"))
        self._held.clear()
        assert isinstance(self._calls, LateCalls)
        self._calls.evaluate_held(held)
        for call in held:
            if call.failure is None:
                if self.trace is not None:
                    self.trace.occupy(call.task, call.cost)
                done = self._end_of_call(call.task.rank, call.at, call.cost)
                self._events.push_numbered(done, call.number, WAKE, (call.task, call.result))
        for call in held:
            if call.failure is not None:
                self._step(call.task, None, call.failure)

    def _end_of_call(self, rank: int, at: float, seconds: float) -> float:
        """A node has one lane for its calls, whichever of its programs makes them."""
        free = self._coding_free[rank]
        done = self._coding_free[rank] = (free if free > at else at) + seconds
        return done

    def _occupy(self, task: Task, effect: Effect[Any], seconds: float, value: Any = None) -> Any:
        if task.rank in self._held:  # the lane is taken until those are over
            self._release()
        done = self._end_of_call(task.rank, self._events.now, seconds)
        task.waiting_for = effect
        kind = CALLED if type(value) is LateCall else WAKE
        self._events.push(done, kind, (task, value))
        return WAITING

    def _step_called(self, task: Task, call: LateCall) -> None:
        """Continues a program with the result of a call that is due."""
        try:
            value = call.result()
        except Exception as error:
            self._step(task, None, error)
        else:
            self._step(task, value)

    def _begin(self, task: Task, effect: Begin) -> VirtualComputation:
        seconds = effect.seconds
        if seconds is None:
            seconds = self._seconds(task.rank, effect.request)
        begun = VirtualComputation(self._layer_times, seconds, self._events.now, effect.is_open)
        if effect.is_open and effect.request is not None:
            begun.gradient = self._gradients.add(task, effect.request)
        if self.trace is not None:
            self.trace.begin(task, begun, effect.is_open)
        return begun

    def _open(self, task: Task, effect: Open) -> None:
        begun = effect.computation
        assert isinstance(begun, VirtualComputation)
        begun.open(effect.layer, self._events.now)
        if effect.request is not None:
            begun.gradient = self._gradients.add(task, effect.request)
        if begun.is_forward_done:
            for waiting, layer in begun.waiting:
                self._events.push(begun.reached_s(layer), REACHED, (waiting, begun))
            begun.waiting.clear()

    def _reach(self, task: Task, effect: Reach[Any]) -> Any:
        begun = effect.computation
        assert isinstance(begun, VirtualComputation)
        task.waiting_for = effect
        if begun.is_forward_done:
            due = max(begun.reached_s(effect.layer), self._events.now)
            self._events.push(due, REACHED, (task, begun))
        else:
            begun.waiting.append((task, effect.layer))
        return WAITING

    def _compute(self, task: Task, effect: Compute[Any]) -> Any:
        seconds = self._seconds(task.rank, effect.request)
        if self.trace is not None:
            self.trace.pause(task, seconds)
        due = self._events.now + seconds
        self._events.push(due, COMPUTED, self._gradients.add(task, effect.request))
        task.waiting_for = effect
        return WAITING
