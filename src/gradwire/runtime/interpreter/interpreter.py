"""The loop that steps programs and answers their effects. All engines share it.

A program runs until it awaits an effect that has no answer yet. Every class of effect has a
handler, which returns the answer, raises an error for the program, or returns `WAITING` and leaves
the effect in `waiting_for`. An engine adds the handlers that depend on its clock and its transport,
and resumes the programs that wait.
"""

from collections import defaultdict
from collections.abc import Callable, Container, Coroutine, Mapping
from itertools import count
from typing import Any, TypeVar

from gradwire.core.layout import NodeLayout
from gradwire.core.node import (
    Call,
    Collective,
    Exchange,
    Join,
    Node,
    Pass,
    Recv,
    RecvAny,
    RunningProgram,
    Sleep,
    Spawn,
    Tag,
    Watch,
)
from gradwire.runtime.interpreter import checks
from gradwire.runtime.interpreter.calls import Calls
from gradwire.runtime.interpreter.mailboxes import Mailbox

R = TypeVar("R")
Program = Callable[[Node], Coroutine[Any, Any, R]]
Task = RunningProgram[Any]
Handler = Callable[[Task, Any], Any]

WAITING = object()  # returned by a handler whose effect will be answered later


class Interpreter:
    """Steps the programs of one node or of all nodes.

    `mailboxes` has the mailbox of each node that runs here, by rank. Tags are compared as they are,
    or as `tag_key` returns them. `lost` contains the ranks that are known to be gone. The methods
    without a body are those of the engines.
    """

    def __init__(
        self,
        layout: NodeLayout,
        calls: Calls,
        handlers: Mapping[type, Handler],
        mailboxes: Mapping[int, Mailbox],
        lost: Container[int] = (),
        tag_key: Callable[[Tag], Tag] | None = None,
    ) -> None:
        self.layout = layout
        self.num_effects = 0
        self._calls = calls
        self._mailboxes = mailboxes
        self._lost = lost
        self._tag_key = tag_key
        self._watchers: dict[tuple[int, Tag], None] = {}  # rank and tag, in order
        self._tasks: dict[Task, int] = {}  # programs that have not ended, with numbers
        self._numbers = count()  # of programs
        self._handlers: dict[type, Handler] = {
            Recv: self._recv,
            RecvAny: self._recv_any,
            Sleep: self._sleep,
            Call: lambda task, effect: self._calls.run(effect)[0],
            Spawn: lambda task, effect: self._start(task.rank, effect.program, effect.priority),
            Join: self._join,
            Watch: self._watch,
            Collective: lambda task, effect: None,
            Exchange: lambda task, effect: None,
            Pass: lambda task, effect: None,
            **handlers,
        }

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

    def _resume(self, task: Task, value: Any = None, failure: Exception | None = None) -> None:
        """Continues a program whose message has come."""

    def _schedule(self, task: Task, value: Any = None) -> None:
        """Continues a program after those that are due now."""

    def _resume_after(self, task: Task, seconds: float) -> None:
        """Answers the `Sleep` that a program waits for after this time."""

    def _time_out_after(self, task: Task, seconds: float) -> None:
        """Answers the `RecvAny` that a program waits for with None after this time."""

    def _check_sender(self, task: Task, effect: Recv) -> None:
        """Raises `PeerLost` if the message will not come. Its sender is in `lost`."""

    def _add_note(self, task: Task, error: Exception) -> None:
        """Adds to an error of a program where and when that was."""

    def _start(self, rank: int, program: Coroutine[Any, Any, Any], priority: int = 0) -> Task:
        task = RunningProgram(rank, program, priority)
        self._tasks[task] = next(self._numbers)
        self._schedule(task)
        return task

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
                handler = handlers[type(effect)]
            except KeyError:
                handler = checks.refuse_unknown
            try:
                value = handler(task, effect)
            except Exception as error:
                value, failure = None, error
            if value is WAITING:
                return

    def _finish(self, task: Task) -> None:
        del self._tasks[task]
        for joiner in task.joiners:
            self._schedule(joiner, task.result)

    def _close_programs(self) -> None:
        """Ends all programs, also after an error. Messages stay for the next run."""
        for task in self._tasks:
            task.program.close()
        self._tasks.clear()
        self._watchers.clear()
        self._calls.forget()
        for mailbox in self._mailboxes.values():
            mailbox.stop_waiting()

    # Handlers.

    def _recv(self, task: Task, effect: Recv) -> Any:
        src, tag = effect.src, effect.tag
        if self._tag_key is not None:
            tag = self._tag_key(tag)
        mailbox = self._mailboxes[task.rank]
        if mailbox.inbox:
            found = mailbox.take(src, tag)
            if found is not None:
                return found[1]
        if src in self._lost:
            self._check_sender(task, effect)
        if mailbox.waiting.setdefault((src, tag), task) is not task:
            raise checks.already_waits(effect, task.rank)
        task.waiting_for = effect
        return WAITING

    def _recv_any(self, task: Task, effect: RecvAny[Any]) -> Any:
        checks.check_wait(effect, task.rank)
        timeout_s, tag = effect.timeout_s, effect.tag
        if self._tag_key is not None:
            tag = self._tag_key(tag)
        mailbox = self._mailboxes[task.rank]
        found = mailbox.take_any(tag)
        if found is not None or timeout_s == 0:
            return found
        if mailbox.waiting_any.setdefault(tag, task) is not task:
            raise checks.already_waits(effect, task.rank)
        task.waiting_for = effect
        if timeout_s is not None:
            # A new object, so that a timer knows this wait from a later one.
            task.waiting_for = RecvAny(effect.tag, timeout_s)
            self._time_out_after(task, timeout_s)
        return WAITING

    def _sleep(self, task: Task, effect: Sleep) -> Any:
        checks.check_sleep(effect, task.rank)
        task.waiting_for = effect
        self._resume_after(task, effect.seconds)
        return WAITING

    def _join(self, task: Task, effect: Join[Any]) -> Any:
        if effect.task.done:
            return effect.task.result
        effect.task.joiners.append(task)
        task.waiting_for = effect
        return WAITING

    def _watch(self, task: Task, effect: Watch) -> None:
        self._watchers[task.rank, effect.tag] = None

    # Messages.

    def _deliver(self, src: int, dst: int, tag: Tag, message: Any) -> None:
        """Hands a message to the program that waits for it, or puts it into the mailbox."""
        mailbox = self._mailboxes[dst]
        task = mailbox.waiting.pop((src, tag), None)
        if task is not None:
            self._resume(task, message)
            return
        task = mailbox.waiting_any.pop(tag, None)
        if task is not None:
            self._resume_any(task, (src, message))
            return
        mailbox.put(src, tag, message)

    def _resume_any(self, task: Task, found: tuple[int, Any]) -> None:
        """Continues a program that takes messages of any sender."""
        self._resume(task, found)
