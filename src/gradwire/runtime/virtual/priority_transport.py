"""NICs that serve by priority: of the messages that wait, those of the highest leave first.

A message that has begun to leave is not interrupted: schedules cut large tensors into partitions,
at whose boundaries the NIC is yielded. Messages of equal priority leave in the order in which they
were sent, as without priorities.
"""

from collections.abc import Mapping
from heapq import heappop, heappush
from typing import Any

from gradwire.core.node import RunningProgram, Send
from gradwire.runtime.interpreter.checks import check_send
from gradwire.runtime.network.links import Links, Parcel
from gradwire.runtime.network.network import Network
from gradwire.runtime.virtual.events import FREE, HEAD, TAIL, Events
from gradwire.runtime.virtual.transport import SimulatedTransport


class PriorityTransport(SimulatedTransport):
    """What is under way, and what waits for a NIC."""

    __slots__ = ("_is_busy", "_waiting")

    def __init__(
        self, network: Network, events: Events, links: Links | None, gone: Mapping[int, Any]
    ) -> None:
        super().__init__(network, events, links, gone)
        # Of each node: messages or parcels with their priorities, highest first.
        self._waiting: list[list[tuple[int, int, Any]]] = [[] for _ in range(network.size)]
        self._is_busy = [False] * network.size

    def send(self, task: RunningProgram[Any], effect: Send) -> None:
        src, dst, nbytes, events = task.rank, effect.dst, effect.nbytes, self._events
        if not 0 <= dst < self._size:
            check_send(effect, src, self._size)
        message = (src, dst, effect.tag, effect.data, nbytes)
        if dst == src:  # never touches the network
            events.push(events.now, TAIL, message)
            return
        item: Any = message
        if self._links is None:
            self.ledger.record(src, dst, nbytes, effect.label)
        else:
            item = self._links.send(message, effect.label)
        heappush(self._waiting[src], (-task.priority, next(events.numbers), item))
        if not self._is_busy[src]:
            self.free(src)

    def free(self, node: int) -> None:
        """A NIC can send the next message."""
        events = self._events
        self._is_busy[node] = bool(self._waiting[node])
        if not self._is_busy[node]:
            return
        item = heappop(self._waiting[node])[2]
        if isinstance(item, Parcel):
            self.attempt(item)
        else:
            head = self.nics.leave(events.now, node, item[4])
            events.push(head, HEAD, item)
        events.push(self.nics.egress_free[node], FREE, node)

    def cut(self, rank: int) -> set[Parcel]:
        self._waiting[rank].clear()
        return super().cut(rank)

    def clear(self) -> None:
        super().clear()
        for waiting in self._waiting:
            waiting.clear()
        self._is_busy = [False] * len(self._is_busy)
