"""The loop that steps programs and answers their effects. All engines share it.

A program runs until it awaits an effect that has no answer yet. Every class of effect has a
handler, which returns the answer, raises an error for the program, or returns `WAITING` and leaves
the effect in `waiting_for`. An engine adds the handlers that depend on its clock and its transport,
and resumes the programs that wait.
"""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

from gradwire.core.layout import NodeLayout
from gradwire.core.node import Call, Collective, Join, Node, RunningProgram, Spawn
from gradwire.runtime.interpreter import checks
from gradwire.runtime.interpreter.calls import Calls

R = TypeVar("R")
Program = Callable[[Node], Coroutine[Any, Any, R]]
Task = RunningProgram[Any]
Handler = Callable[[Task, Any], Any]

WAITING = object()  # returned by a handler whose effect will be answered later


class Handlers(dict[type, Handler]):
    """Handlers by class of effect; all other classes have one that refuses."""

    def __missing__(self, kind: type) -> Handler:
        return checks.refuse_unknown


class Interpreter(ABC):
    """Steps the programs of one node or of all nodes."""

    def __init__(self, layout: NodeLayout, calls: Calls, handlers: Mapping[type, Handler]) -> None:
        self.layout = layout
        self.num_effects = 0
        self._calls = calls
        shared: dict[type, Handler] = {
            Call: lambda task, effect: self._calls.run(effect)[0],
            Spawn: lambda task, effect: self._start(task.rank, effect.program),
            Join: self._join,
            Collective: lambda task, effect: None,
        }
        self._handlers = Handlers({**shared, **handlers})

    @property
    def size(self) -> int:
        """The number of all nodes."""
        return self.layout.size

    @property
    def num_workers(self) -> int:
        return self.layout.num_workers

    @property
    def call_s(self) -> defaultdict[str, float]:
        """Wall-clock seconds in `call` and `share` by function: coding, averaging, updating."""
        return self._calls.seconds

    @abstractmethod
    def _start(self, rank: int, program: Coroutine[Any, Any, Any]) -> Task:
        """Adds a program, whose turn comes later."""

    @abstractmethod
    def _finish(self, task: Task) -> None:
        """Removes a program that has ended, and continues those that wait for its end."""

    @abstractmethod
    def _add_note(self, task: Task, error: Exception) -> None:
        """Adds to an error of a program where and when that was."""

    def _step(self, task: Task, value: Any = None, failure: Exception | None = None) -> None:
        """Runs a program until it waits. `failure` is raised where it awaits an effect."""
        send, throw = task.program.send, task.program.throw
        handlers = self._handlers
        task.waiting_for = None
        while True:
            try:
                effect = send(value) if failure is None else throw(failure)
            except StopIteration as end:
                task.done, task.result = True, end.value
                self._finish(task)
                return
            except Exception as error:
                self._add_note(task, error)
                raise
            self.num_effects += 1
            failure = None
            try:
                value = handlers[type(effect)](task, effect)
            except Exception as error:
                value, failure = None, error
            if value is WAITING:
                return

    def _join(self, task: Task, effect: Join[Any]) -> Any:
        if effect.task.done:
            return effect.task.result
        effect.task.joiners.append(task)
        task.waiting_for = effect
        return WAITING
