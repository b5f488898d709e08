"""The simulator without a clock: it repeats a real run in the event order that was recorded.

The order of a node (`runtime/replay/order.py`) says which of its programs continued, by what event,
and with what answer. Here the programs of all nodes run in one process. Each continues only when
the order of its node says so, messages go directly from one to the other, and gradients are
computed one by one, as the real ranks did. So the parameters are the same to the last bit if a
gradient is. A gradient that came layer by layer is computed as a whole when a program has its first
part.

A node waits only for a message that its order names and that has not been sent. Among the nodes
that can continue, the one with the earliest known time is next, so that an observer sees about the
same as in the real run. An entry that does not fit is an `OrderError`, which names the entry and
the node.
"""

from collections.abc import Coroutine, Sequence
from heapq import heappop, heappush
from itertools import count
from typing import Any, NoReturn

from gradwire.core.errors import PeerLost
from gradwire.core.layout import NodeLayout
from gradwire.core.node import (
    Begin,
    Computation,
    Compute,
    CurrentMembers,
    Framed,
    Join,
    Membership,
    Node,
    Now,
    Open,
    Reach,
    Recv,
    RecvAny,
    RunningProgram,
    Send,
    Sleep,
    Watch,
)
from gradwire.runtime.interpreter import checks
from gradwire.runtime.interpreter.calls import Calls, Evaluator, no_evaluator
from gradwire.runtime.interpreter.deadlock import described
from gradwire.runtime.interpreter.interpreter import WAITING, Interpreter, Program, R, Task
from gradwire.runtime.interpreter.mailboxes import Mailbox
from gradwire.runtime.ledger import Ledger
from gradwire.runtime.process.frames import tag_hash
from gradwire.runtime.replay import order
from gradwire.runtime.replay.order import EventOrder, OrderEntry, OrderError, RunOrder, short_hash

# Which effects a program can have awaited that gets an answer of this kind.
_ASKED: dict[str, tuple[type, ...]] = {
    order.RECEIVED: (Recv,),
    order.RECEIVED_ANY: (RecvAny,),
    order.NOTHING: (RecvAny,),
    order.CHANGE: (Recv, RecvAny),
    order.LOST: (Recv,),
    order.COMPUTED: (Compute,),
    order.REACHED: (Reach,),
    order.SLEPT: (Sleep,),
    order.JOINED: (Join,),
    order.NOW: (Now,),
    order.MEMBERS: (CurrentMembers,),
}
_DECIDED = frozenset(kind for kinds in _ASKED.values() for kind in kinds)
_END_OF_RUN, _KILLED = "the end of the run", "where it was killed"


class _ReplayedGradient(Computation):
    """A gradient that came layer by layer."""

    __slots__ = ("failure", "request", "result")

    def __init__(self, request: Any) -> None:
        self.request = request  # None: its parameters are not there yet, or it is computed
        self.result: Any = None
        self.failure: Exception | None = None

    def compute(self, evaluate: Evaluator) -> None:
        """Computes it, unless that has been done."""
        if self.request is None:
            return
        request, self.request = self.request, None
        try:
            (self.result,) = evaluate([request])
        except Exception as error:
            self.failure = error


class _ReplayedNode:
    """One node: its position in its order, and its programs."""

    def __init__(self, one: EventOrder) -> None:
        self.order = one
        self.rank = one.rank
        self.run: RunOrder | None = None
        self.position = 0  # the entry that is next
        self.tasks: dict[int, Task] = {}  # by number, those that have not ended
        self.numbers = count()
        self.now = 0.0  # the time it knew last

    @property
    def entry(self) -> OrderEntry | None:
        """What is next; None: nothing in this run."""
        assert self.run is not None
        entries = self.run.entries
        return entries[self.position] if self.position < len(entries) else None

    def begin(self, number: int, program: Coroutine[Any, Any, Any]) -> Task:
        runs = self.order.runs
        if number >= len(runs):
            program.close()
            raise OrderError(
                f"the order of rank {self.rank} has {len(runs)} runs; this is number {number + 1}"
            )
        self.run, self.position, self.numbers = runs[number], 0, count()
        return self.spawn(program)

    def spawn(self, program: Coroutine[Any, Any, Any]) -> Task:
        task = RunningProgram(self.rank, program)
        self.tasks[next(self.numbers)] = task
        return task

    def where(self) -> str:
        assert self.run is not None
        source = self.order.source
        line = f" ({source}, line {self.run.first_line + self.position})" if source else ""
        return f"rank {self.rank}, entry {self.position}{line}"

    def describe_next(self) -> str:
        """A description of the next entry."""
        entry = self.entry
        if entry is None:
            assert self.run is not None
            return _END_OF_RUN if self.run.end_s is not None else _KILLED
        return " ".join([f"task {entry.task}: {entry.kind}", *map(repr, entry.values)])


class ReplayEngine(Interpreter):
    """Runs the programs of all nodes as they ran. `orders` are those of the ranks 0, 1, ..."""

    def __init__(self, orders: Sequence[EventOrder], *, evaluate: Evaluator = no_evaluator) -> None:
        if not orders:
            raise OrderError("no orders to replay")
        first = orders[0]
        for rank, one in enumerate(orders):
            found = (one.rank, one.num_nodes, one.num_workers, one.about)
            if found != (rank, len(orders), first.num_workers, first.about):
                name = one.source or f"order number {rank}"
                raise OrderError(
                    f"{name} is that of rank {one.rank} of {one.num_nodes}, with {one.num_workers} "
                    f"workers; expected rank {rank} of {len(orders)}, with {first.num_workers}, "
                    "of the same run"
                )
            steps, others = [run.steps for run in one.runs], [run.steps for run in first.runs]
            if steps != others:
                raise OrderError(
                    f"the order of rank {rank} has runs of the steps {steps}, that of rank 0 has "
                    f"{others}"
                )
        size, num_workers = len(orders), first.num_workers
        super().__init__(
            NodeLayout.of(size, num_workers),
            Calls(num_workers),
            {
                Send: self._send,
                Begin: lambda task, effect: _ReplayedGradient(
                    effect.request if effect.is_open else None
                ),
                Open: self._open,
                Watch: lambda task, effect: None,  # the order has the changes of the membership
                **dict.fromkeys(_DECIDED, self._wait_for_order),
            },
            {rank: Mailbox() for rank in range(size)},  # by sender and hash of the tag
        )
        self.steps = [run.steps for run in first.runs]  # of the runs
        self.ledger = Ledger(size)
        self._evaluate = evaluate
        self._nodes = [_ReplayedNode(one) for one in orders]
        self._blocked: dict[int, tuple[int, int]] = {}  # rank -> the sender and tag it waits for
        self._able: list[tuple[float, int]] = []  # a heap of (time, rank): those that can continue
        self._run_number = 0

    @property
    def now(self) -> float:
        """The time at which the last worker was done, on its own clock."""
        return max(node.now for node in self._nodes[: self.num_workers])

    @property
    def alive(self) -> frozenset[int]:
        """The workers that were not killed, in the run that is replayed or was last."""
        return frozenset(
            node.rank
            for node in self._nodes[: self.num_workers]
            if node.run is None or node.run.end_s is not None
        )

    def run(
        self, programs: Sequence[Program[R]], daemons: Sequence[Program[Any]] = ()
    ) -> list[R | Any]:
        """The next run of the recorded ones: one program per worker, one daemon per other node.

        Returns the workers' results; None of one that was killed.
        """
        self.layout.check_programs(programs, daemons)
        number, self._run_number = self._run_number, self._run_number + 1
        try:
            mains = [
                node.begin(number, program(Node(node.rank, self.num_workers)))
                for node, program in zip(self._nodes, [*programs, *daemons])
            ]
            self._able = [(node.now, node.rank) for node in self._nodes]
            while self._able:
                _, rank = heappop(self._able)
                self._advance(self._nodes[rank])
            if self._blocked:
                raise OrderError(self._missing())
            for node, main in zip(self._nodes[: self.num_workers], mains):
                if not main.done and node.rank in self.alive:
                    self._refuse(node, f"the program waits for {described(main.waiting_for)}")
            return [main.result for main in mains[: self.num_workers]]
        finally:
            for node in self._nodes:
                for task in node.tasks.values():
                    task.program.close()
                node.tasks.clear()
            self._blocked.clear()
            self._able.clear()
            self._calls.forget()

    def _advance(self, node: _ReplayedNode) -> None:
        """Continues a node until it waits, or until another node's time is earlier."""
        while (entry := node.entry) is not None:
            task = self._asking(node, entry)
            message = None
            if entry.kind in (order.RECEIVED, order.RECEIVED_ANY):
                key = (entry.values[0], tag_hash(task.waiting_for.tag))
                message = self._mailboxes[node.rank].take(*key)
                if message is None:
                    self._blocked[node.rank] = key
                    return
            value, failure = self._answer(node, task, entry, message)
            self._step(task, value, failure)
            if task.done:
                del node.tasks[entry.task]
            node.position += 1
            if entry.kind == order.NOW and self._able and self._able[0] < (node.now, node.rank):
                heappush(self._able, (node.now, node.rank))
                return
        assert node.run is not None
        if node.run.end_s is not None:
            node.now = node.run.end_s

    def _asking(self, node: _ReplayedNode, entry: OrderEntry) -> Task:
        """The program that continues; refuses one that awaits something else than the answer."""
        task = node.tasks.get(entry.task)
        if task is None:
            self._refuse(node, f"there is no such task; there are {list(node.tasks)}")
        effect = task.waiting_for
        if entry.kind == order.START:
            if effect is not None:
                self._refuse(node, f"it runs already, and waits for {described(effect)}")
            return task
        if effect is None:
            self._refuse(node, "it has not started")
        if type(effect) not in _ASKED[entry.kind]:
            self._refuse(node, f"the program waits for {described(effect)}")
        if isinstance(effect, Recv | RecvAny):
            src, tag = _named(entry)
            if tag != short_hash(effect.tag) or (
                isinstance(effect, Recv) and src not in (None, effect.src)
            ):
                self._refuse(node, f"the program waits for {described(effect)}")
        if isinstance(effect, Join) and not effect.task.done:
            self._refuse(node, "what it waits for has not ended")
        if isinstance(effect, Reach):
            gradient = effect.computation
            assert isinstance(gradient, _ReplayedGradient)
            gradient.compute(self._evaluate)
            if gradient.result is None and gradient.failure is None:
                self._refuse(node, "the parameters of that gradient are not there yet")
        return task

    def _answer(
        self,
        node: _ReplayedNode,
        task: Task,
        entry: OrderEntry,
        message: tuple[int, Any] | None,
    ) -> tuple[Any, Exception | None]:
        kind, effect, values = entry.kind, task.waiting_for, entry.values
        if kind == order.RECEIVED:
            assert message is not None
            return message[1], None
        if kind == order.RECEIVED_ANY:
            return message, None
        if kind == order.COMPUTED:
            try:
                (result,) = self._evaluate([effect.request])
            except Exception as error:
                return None, error
            return result, None
        if kind == order.REACHED:
            return effect.computation.result, effect.computation.failure
        if kind == order.NOW:
            node.now = float(values[0])
            return values[0], None
        if kind == order.MEMBERS:
            return frozenset(values), None
        if kind == order.JOINED:
            return effect.task.result, None
        if kind == order.CHANGE:
            _, rank, there, time_s = values
            change = Framed(Membership(rank, bool(there), time_s))
            return (change if isinstance(effect, Recv) else (node.rank, change)), None
        if kind == order.LOST:
            return None, PeerLost(*values[2:])
        return None, None

    def _start(self, rank: int, program: Coroutine[Any, Any, Any], priority: int = 0) -> Task:
        return self._nodes[rank].spawn(program)

    def _finish(self, task: Task) -> None:
        """The order decides when the programs that wait for its end continue."""

    def _add_note(self, task: Task, error: Exception) -> None:
        where = self._nodes[task.rank].where()
        error.add_note(f"in the program of rank {task.rank}, replayed: {where}")

    def _wait_for_order(self, task: Task, effect: Any) -> Any:
        """The order decides when this is answered, and how."""
        if isinstance(effect, Sleep):
            checks.check_sleep(effect, task.rank)
        elif isinstance(effect, RecvAny):
            checks.check_wait(effect, task.rank)
        task.waiting_for = effect
        return WAITING

    def _open(self, task: Task, effect: Open) -> None:
        if effect.request is not None:  # all parameters are there
            assert isinstance(effect.computation, _ReplayedGradient)
            effect.computation.request = effect.request

    def _send(self, task: Task, effect: Send) -> None:
        checks.check_send(effect, task.rank, self.size)
        src, dst, tag = task.rank, effect.dst, tag_hash(effect.tag)
        if dst != src:
            self.ledger.record(src, dst, effect.nbytes, effect.label)
        self._mailboxes[dst].put(src, tag, effect.data)
        if self._blocked.get(dst) == (src, tag):
            del self._blocked[dst]
            heappush(self._able, (self._nodes[dst].now, dst))

    # Errors.

    def _refuse(self, node: _ReplayedNode, why: str) -> NoReturn:
        raise OrderError(
            f"{node.where()}: the order says {node.describe_next()!r}, but {why}. It is that of "
            "another configuration or program, or damaged."
        )

    def _missing(self) -> str:
        lines = ["orders name messages that are never sent:"]
        for rank, (src, _) in sorted(self._blocked.items()):
            node, sender = self._nodes[rank], self._nodes[src]
            lines.append(
                f"  {node.where()}: {node.describe_next()!r}; rank {src} is at entry "
                f"{sender.position}, {sender.describe_next()!r}"
            )
        lines.append("They are not those of one run of these programs, or damaged.")
        return "\n".join(lines)


def _named(entry: OrderEntry) -> tuple[int | None, int]:
    """The sender and the hash in an entry about a message."""
    if entry.kind in (order.NOTHING, order.CHANGE):
        return None, entry.values[0]
    src, tag, *_ = entry.values
    return src, tag
