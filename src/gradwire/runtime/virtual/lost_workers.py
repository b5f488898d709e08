"""What becomes of the programs of workers that crash, come back or come late."""

from collections.abc import Callable
from typing import Any

from gradwire.core.node import Framed, Membership, Node, RunningProgram
from gradwire.runtime.interpreter.interpreter import Program, Task
from gradwire.runtime.network.network import Nics
from gradwire.runtime.network.outages import CRASH, NOTICE, Outage, Outages
from gradwire.runtime.virtual.clock import VirtualClock
from gradwire.runtime.virtual.events import FAULT, TAIL, WAKE
from gradwire.runtime.virtual.transport import SimulatedTransport

OnChange = Callable[[int, float], None]


class LostWorkers(VirtualClock):
    """Applies faults (`runtime/network/faults.py`). The engine makes the attributes, and calls
    `_apply_fault` when one is due."""

    clocks: list[float]
    nics: Nics
    on_crash: OnChange | None
    on_return: OnChange | None
    _transport: SimulatedTransport
    _outages: Outages
    _mains: list[Task | None]
    _rejoin: Program[Any] | None

    def _start_at(self, rank: int, program: Program[Any], at: float) -> Task:
        task = RunningProgram(rank, program(Node(rank, self.num_workers)))
        self._tasks[task] = next(self._numbers)
        self._events.push(at, WAKE, (task, None))
        return task

    def _is_over(self) -> bool:
        """Whether the workers that are there are done."""
        there = [main.done for main in self._mains if main is not None]
        return all(there) and (bool(there) or not self._outages.returns)

    def _apply_fault(self, event: Outage, now: float) -> None:
        """Applies a fault to a worker, unless it belongs to the next run."""
        _, what, rank = event
        outages, main = self._outages, self._mains[rank]
        if event not in outages.pending or self._is_over():
            return
        if what == CRASH:
            if main is not None and not main.done:
                outages.pending.remove(event)
                self._crash(rank, now)
        elif what == NOTICE:
            self._notice(rank, now)
        elif rank in outages.gone:
            outages.pending.remove(event)
            self._come_back(rank, now)

    def _crash(self, rank: int, now: float) -> None:
        """Drops all programs, requests and events of this node, and the messages to it."""
        for task in [task for task in self._tasks if task.rank == rank]:
            task.program.close()
            del self._tasks[task]
        self._gradients.forget(rank)
        self._mailboxes[rank].clear()
        self._events.forget(rank, self._transport.cut(rank))
        for key in [key for key in self._watchers if key[0] == rank]:
            del self._watchers[key]
        self._mains[rank] = None
        self.clocks[rank] = now
        notice = self._outages.crash(rank, now)
        self._events.push_first(notice[0], FAULT, notice)
        if self.on_crash is not None:
            self.on_crash(rank, now)

    def _notice(self, rank: int, now: float) -> None:
        """Reports a lost worker to the watchers, and to the programs that wait for it."""
        self._outages.notice(rank, now)
        self._report(Membership(rank, False, now))
        is_under_way = self._transport.is_under_way
        left = [
            mailbox.waiting.pop(key)
            for dst, mailbox in self._mailboxes.items()
            for key in list(mailbox.waiting)
            if key[0] == rank and not is_under_way(rank, dst, key[1])
        ]
        for task in left:
            self._step(task, None, self._outages.error(rank))

    def _come_back(self, rank: int, now: float) -> None:
        if rank not in self._lost:
            self._notice(rank, now)
        self._outages.come_back(rank)
        self.nics.reset(rank, now)
        self._report(Membership(rank, True, now))
        if self.on_return is not None:
            self.on_return(rank, now)
        assert self._rejoin is not None
        main = self._mains[rank] = self._start_at(rank, self._rejoin, now)
        if self.trace is not None:
            self.trace.add(main)

    def _report(self, change: Membership) -> None:
        for rank, tag in self._watchers:
            self._events.push(self._events.now, TAIL, (rank, rank, tag, Framed(change), 0))
