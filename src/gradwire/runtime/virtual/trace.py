"""Traces: what a run did, to ask how long it would have taken on another network.

A program whose messages do not depend on time sends the same ones on every network. So one run is
enough to find its virtual time for any bandwidth: its sends, receives and pauses are recorded and
played again by the same engine, without data.
"""

from collections.abc import Coroutine, Sequence
from typing import Any

from gradwire.core.node import Join, Node, Now, Recv, RecvAny, RunningProgram, Send, Sleep, Spawn
from gradwire.runtime.interpreter.interpreter import WAITING, Handler, Task

_SPAWN, _JOIN = "spawn", "join"
Step = Send | Recv | RecvAny[Any] | Sleep | tuple[str, int]


class Trace:
    """The effects of one run, by program."""

    def __init__(self, mains: Sequence[Task | None]) -> None:
        self.replayable = True
        self._steps: dict[Task, list[Step]] = {}
        self._numbers: dict[Task, int] = {}
        self._programs: list[list[Step]] = []
        self._mains = [None if main is None else self.add(main) for main in mains]

    def add(self, task: Task) -> int:
        """A program that starts; returns its number."""
        self._numbers[task] = len(self._programs)
        self._steps[task] = []
        self._programs.append(self._steps[task])
        return self._numbers[task]

    def record(self, handlers: dict[type, Handler]) -> dict[type, Handler]:
        """Handlers that answer as these do, and write down what was asked."""

        def send(task: Task, effect: Send) -> None:
            handlers[Send](task, effect)
            empty = Send(effect.dst, effect.tag, None, effect.nbytes, effect.label)
            self._steps[task].append(empty)

        def recv(task: Task, effect: Recv) -> Any:
            self._steps[task].append(effect)
            return handlers[Recv](task, effect)

        def recv_any(task: Task, effect: RecvAny[Any]) -> Any:
            if effect.is_gathering:
                self._steps[task].append(effect)
            answer = handlers[RecvAny](task, effect)
            if not effect.is_gathering and not (answer is WAITING and effect.timeout_s is None):
                self.depends_on_time()
            return answer

        def now(task: Task, effect: Now) -> Any:
            self.depends_on_time()
            return handlers[Now](task, effect)

        def spawn(task: Task, effect: Spawn[Any]) -> Task:
            child: Task = handlers[Spawn](task, effect)
            self._steps[task].append((_SPAWN, self.add(child)))
            return child

        def join(task: Task, effect: Join[Any]) -> Any:
            self._steps[task].append((_JOIN, self._numbers[effect.task]))
            return handlers[Join](task, effect)

        return {
            **handlers,
            Send: send,
            Recv: recv,
            RecvAny: recv_any,
            Now: now,
            Spawn: spawn,
            Join: join,
        }

    def pause(self, task: Task, seconds: float) -> None:
        self._steps[task].append(Sleep(seconds))

    def depends_on_time(self) -> None:
        """What the program does may be different on another network."""
        self.replayable = False

    async def replay(self, node: Node) -> None:
        """The program of one node, played again."""
        children: dict[int, RunningProgram[None]] = {}
        main = self._mains[node.rank]
        assert main is not None, "a run that loses workers cannot be replayed"
        await self._play(main, children)

    async def _play(self, number: int, children: dict[int, RunningProgram[None]]) -> None:
        for step in self._programs[number]:
            if isinstance(step, tuple):
                action, child = step
                if action == _SPAWN:
                    program: Coroutine[Any, Any, None] = self._play(child, children)
                    children[child] = await Spawn(program)
                else:
                    await Join(children[child])
            else:
                await step
