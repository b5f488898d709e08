"""Traces: what a run did, to ask how long it would have taken on another network.

A program whose messages do not depend on time sends the same ones on every network. So one run is
enough to find its virtual time for any bandwidth: its sends, receives and pauses are recorded and
played again by the same engine, without data.
"""

from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

from gradwire.core.node import (
    Begin,
    Computation,
    Effect,
    Exchange,
    Join,
    Node,
    Now,
    Open,
    Pass,
    Reach,
    Recv,
    RecvAny,
    RunningProgram,
    Send,
    Sleep,
    Spawn,
)
from gradwire.runtime.interpreter.interpreter import WAITING, Handler, Task


class Sizes:
    """What a member of an exchange or a pass sent, without data."""

    is_added = False  # how long the calls for it take has been recorded
    message = None

    def __init__(self, nbytes: "int | array[int]") -> None:
        self.nbytes = nbytes

    def messages(self, size: int) -> Sequence[Any]:
        return [None] * size

    def received(self, everyone: Sequence[Any], rank: int) -> Sequence[Any]:
        return ()


class Occupy(Effect[None]):
    """Let a node be busy with calls for so long."""

    __slots__ = ("seconds",)

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds


class _Child(NamedTuple):
    """A program that was started or joined."""

    number: int
    is_start: bool
    priority: int = 0


class _Layer(NamedTuple):
    """A layer of a gradient that was opened or reached."""

    number: int  # of the gradient
    layer: int
    is_open: bool


class _Begun(NamedTuple):
    """A gradient that was started."""

    number: int
    seconds: float
    is_open: bool


Step = Exchange | Pass[Any] | Send | Recv | RecvAny[Any] | Sleep | Occupy | _Child | _Layer | _Begun


class Trace:
    """The effects of one run, by program."""

    def __init__(self, mains: Sequence[Task | None]) -> None:
        self.replayable = True
        self._steps: dict[Task, list[Step]] = {}
        self._numbers: dict[Task, int] = {}
        self._programs: list[list[Step]] = []
        self._computations: dict[int, int] = {}  # numbers of gradients, by identity
        self._kept: list[Any] = []
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

        def exchange(task: Task, effect: Exchange) -> Any:
            answer = handlers[Exchange](task, effect)
            if answer is not None:
                empty = Sizes(effect.outgoing.nbytes)
                self._steps[task].append(
                    Exchange(effect.members, effect.rank, effect.tag, empty, effect.label)
                )
            return answer

        def pass_on(task: Task, effect: Pass[Any]) -> Any:
            answer = handlers[Pass](task, effect)
            if answer is not None:
                members, rank, tag, first = effect.members, effect.rank, effect.tag, effect.first
                empty: Any = Sizes(effect.outgoing.nbytes)
                self._steps[task].append(
                    Pass(members, rank, tag, first, empty, effect.label, effect.seconds)
                )
            return answer

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
            self._steps[task].append(_Child(self.add(child), True, effect.priority))
            return child

        def join(task: Task, effect: Join[Any]) -> Any:
            self._steps[task].append(_Child(self._numbers[effect.task], False))
            return handlers[Join](task, effect)

        def open_layer(task: Task, effect: Open) -> Any:
            number = self._computations[id(effect.computation)]
            self._steps[task].append(_Layer(number, effect.layer, True))
            return handlers[Open](task, effect)

        def reach(task: Task, effect: Reach[Any]) -> Any:
            number = self._computations[id(effect.computation)]
            self._steps[task].append(_Layer(number, effect.layer, False))
            return handlers[Reach](task, effect)

        return {
            **handlers,
            Send: send,
            Exchange: exchange,
            Pass: pass_on,
            Recv: recv,
            RecvAny: recv_any,
            Now: now,
            Spawn: spawn,
            Join: join,
            Open: open_layer,
            Reach: reach,
        }

    def pause(self, task: Task, seconds: float) -> None:
        self._steps[task].append(Sleep(seconds))

    def occupy(self, task: Task, seconds: float) -> None:
        self._steps[task].append(Occupy(seconds))

    def begin(self, task: Task, computation: Any, is_open: bool) -> None:
        number = len(self._computations)
        self._computations[id(computation)] = number
        self._kept.append(computation)  # so that its identity stays its own
        self._steps[task].append(_Begun(number, computation.seconds, is_open))

    def depends_on_time(self) -> None:
        """What the program does may be different on another network."""
        self.replayable = False

    async def replay(self, node: Node) -> None:
        """The program of one node, played again."""
        main = self._mains[node.rank]
        assert main is not None, "a run that loses workers cannot be replayed"
        await self._play(node, main, {}, {})

    async def _play(
        self,
        node: Node,
        number: int,
        children: dict[int, RunningProgram[None]],
        computations: dict[int, Computation],
    ) -> None:
        for step in self._programs[number]:
            match step:
                case _Child(child, is_start=True, priority=priority):
                    program = self._play(node, child, children, computations)
                    children[child] = await Spawn(program, priority)
                case _Child(child):
                    await Join(children[child])
                case _Begun(begun, seconds, is_open):
                    computations[begun] = await Begin(None, is_open, seconds)
                case _Layer(begun, layer, is_open=True):
                    await Open(computations[begun], layer)
                case _Layer(begun, layer):
                    await Reach(computations[begun], layer)
                case Exchange():
                    await _exchange(node, step)
                case Pass():
                    await _pass_on(node, step)
                case _:
                    await step


async def _exchange(node: Node, step: Exchange) -> None:
    """On a network whose engine has no exchanges as one effect, the messages one by one."""
    if await step is not None:
        return
    size, rank, nbytes = len(step.members), step.rank, step.outgoing.nbytes
    for shift in range(1, size):
        peer = (rank + shift) % size
        count = nbytes if isinstance(nbytes, int) else nbytes[peer]
        await Send(step.members[peer], step.tag, None, count, step.label)
    for shift in range(1, size):
        await node.recv(step.members[(rank - shift) % size], step.tag)


async def _pass_on(node: Node, step: Pass[Any]) -> None:
    """The same for passes: a message carries its size, and how long its receiver is busy."""
    if await step is not None:
        return
    size, rank = len(step.members), step.rank
    right, left = step.members[(rank + 1) % size], step.members[(rank - 1) % size]
    nbytes, seconds = step.outgoing.nbytes, step.seconds or 0.0
    for _ in range(size - 1):
        await Send(right, step.tag, (nbytes, seconds), nbytes, step.label)
        moving: Any = await node.recv(left, step.tag)
        nbytes, seconds = moving
        if seconds > 0.0:
            await Occupy(seconds)
