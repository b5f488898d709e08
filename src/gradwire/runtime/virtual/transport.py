"""The way of a message from one node to another: NICs, ledger and, where there are faults, links.

Without faults a message is two events: its first bit reaches the receiver (HEAD), its last one does
(TAIL). With faults it is a parcel, which may have to be sent again and to wait for its turn.
"""

from collections.abc import Mapping
from heapq import heappush
from typing import Any

from gradwire.core.node import RunningProgram, Send, Tag
from gradwire.runtime.interpreter.checks import check_send
from gradwire.runtime.ledger import Ledger
from gradwire.runtime.network.buckets import BucketNics
from gradwire.runtime.network.links import Links, Parcel
from gradwire.runtime.network.network import Network, Nics
from gradwire.runtime.virtual.events import HEAD, PARCEL_HEAD, PARCEL_TAIL, SEND, TAIL, Events


class SimulatedTransport:
    """What is under way. `gone` has the nodes that receive nothing."""

    __slots__ = ("_events", "_gone", "_links", "_size", "ledger", "nics")

    def __init__(
        self, network: Network, events: Events, links: Links | None, gone: Mapping[int, Any]
    ) -> None:
        self.nics = BucketNics(network) if network.burst else Nics(network)
        self.ledger = Ledger(network.size)
        self._size = network.size
        self._events = events
        self._links = links  # None: without faults
        self._gone = gone

    def send(self, task: RunningProgram[Any], effect: Send) -> None:
        src, dst, nbytes, events = task.rank, effect.dst, effect.nbytes, self._events
        if not 0 <= dst < self._size:
            check_send(effect, src, self._size)
        message = (src, dst, effect.tag, effect.data, nbytes)
        if dst == src:  # never touches the network
            events.push(events.now, TAIL, message)
            return
        if self._links is not None:
            self.attempt(self._links.send(message, effect.label))
            return
        self.ledger.record(src, dst, nbytes, effect.label)
        head = self.nics.leave(events.now, src, nbytes)
        heappush(events.heap, (head, next(events.numbers), HEAD, message))  # `push` without a call

    def attempt(self, parcel: Parcel) -> None:
        """Sends a parcel, perhaps not for the first time."""
        assert self._links is not None
        src, dst, _, _, nbytes = parcel.message
        self.ledger.record(src, dst, nbytes, parcel.label)
        head = self.nics.leave(self._events.now, src, nbytes)
        left = self.nics.egress_free[src]
        if dst in self._gone:
            self._links.drop(parcel)
        elif parcel.num_lost:
            parcel.num_lost -= 1
            self._events.push(left + self._links.timeout_s, SEND, parcel)
        else:
            parcel.left_s = left
            self._events.push(head, PARCEL_HEAD, parcel)

    def progress(self, version: int) -> None:
        """The last bit of a message has left, in a network with a topology."""
        raise AssertionError("a switch has no flows")

    def free(self, node: int) -> None:
        """A NIC that serves by priority can send the next message."""
        raise AssertionError("messages leave in order")

    def receive_head(self, parcel: Parcel) -> None:
        """A parcel's first bit is there."""
        src, dst, _, _, nbytes = parcel.message
        tail = self.nics.arrive(self._events.now, src, dst, nbytes)
        self._events.push(tail, PARCEL_TAIL, parcel)
        parcel.received_s = self.nics.ingress_free[dst]

    def receive_tail(self, parcel: Parcel) -> list[tuple[int, int, Tag, Any, int]]:
        """A parcel is there. Returns the messages that can be delivered now."""
        assert self._links is not None
        return self._links.arrive(parcel)

    def is_under_way(self, src: int, dst: int, tag: Tag) -> bool:
        assert self._links is not None
        return self._links.under_way(src, dst, tag)

    def cut(self, rank: int) -> set[Parcel]:
        """A node crashed. Returns the parcels that will not arrive."""
        assert self._links is not None
        now = self._events.now
        dropped = self._links.cut(rank, now)
        for parcel in dropped:
            src, dst = parcel.message[:2]
            if src == rank and parcel.received_s:
                self.nics.cut_off(now, src, dst, parcel.received_s)
        return dropped

    def clear(self) -> None:
        """The run is over: forgets what is under way."""
        if self._links is not None:
            self._links.clear()

    def snapshot(self) -> dict[str, Any]:
        links = None if self._links is None else self._links.snapshot()
        return {"nics": self.nics.snapshot(), "links": links}

    def restore(self, saved: dict[str, Any]) -> None:
        self.nics.restore(saved["nics"])
        if self._links is not None:
            self._links.restore(saved["links"])
