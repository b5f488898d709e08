"""Traces: what a run did, to ask how long it would have taken on another network.

A program whose messages do not depend on time sends the same ones whatever the network. So one
run tells its virtual time for any bandwidth: its sends, receives and pauses are recorded and
played again by the same engine, without data.
"""

from collections.abc import Coroutine, Sequence
from typing import Any

from gradwire.core.node import Join, Node, Recv, RecvAny, Send, Sleep, Spawn, Task

_SPAWN, _JOIN = "spawn", "join"
Step = Send | Recv | RecvAny[Any] | Sleep | tuple[str, int]


class Trace:
    """The effects of one run, by program."""

    def __init__(self, mains: Sequence[Task[Any] | None]) -> None:
        self.replayable = True
        self._steps: dict[Task[Any], list[Step]] = {}
        self._numbers: dict[Task[Any], int] = {}
        self._programs: list[list[Step]] = []
        self._mains = [None if main is None else self.add(main) for main in mains]

    def add(self, task: Task[Any]) -> int:
        """A program that starts; returns its number."""
        self._numbers[task] = len(self._programs)
        self._steps[task] = []
        self._programs.append(self._steps[task])
        return self._numbers[task]

    def send(self, task: Task[Any], effect: Send) -> None:
        empty = Send(effect.dst, effect.tag, None, effect.nbytes, effect.label)
        self._steps[task].append(empty)

    def recv(self, task: Task[Any], effect: Recv | RecvAny[Any]) -> None:
        self._steps[task].append(effect)

    def pause(self, task: Task[Any], seconds: float) -> None:
        self._steps[task].append(Sleep(seconds))

    def spawn(self, task: Task[Any], child: Task[Any]) -> None:
        self._steps[task].append((_SPAWN, self.add(child)))

    def join(self, task: Task[Any], child: Task[Any]) -> None:
        self._steps[task].append((_JOIN, self._numbers[child]))

    def depends_on_time(self) -> None:
        """What the program does may be different on another network."""
        self.replayable = False

    async def replay(self, node: Node) -> None:
        """The program of one node, played again."""
        children: dict[int, Task[None]] = {}
        main = self._mains[node.rank]
        assert main is not None, "a run that loses workers cannot be replayed"
        await self._play(main, children)

    async def _play(self, number: int, children: dict[int, Task[None]]) -> None:
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
