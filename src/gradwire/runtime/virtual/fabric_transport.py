"""The way of a message through a network with a topology: links that messages share.

A message is a flow (`runtime/network/flows.py`). When its last bit has left, it arrives after the
latencies of its route. Rates are computed once for all messages that come or end at the same time.
"""

from collections.abc import Mapping
from typing import Any

from gradwire.core.node import RunningProgram, Send
from gradwire.runtime.interpreter.checks import check_send
from gradwire.runtime.network.flows import Flow, Flows
from gradwire.runtime.network.links import Links, Parcel
from gradwire.runtime.network.network import Network
from gradwire.runtime.virtual.events import FLOW, PARCEL_TAIL, SEND, TAIL, Events
from gradwire.runtime.virtual.transport import SimulatedTransport


class FabricTransport(SimulatedTransport):
    """What is under way in a fabric."""

    __slots__ = ("_flows", "_version")

    def __init__(
        self, network: Network, events: Events, links: Links | None, gone: Mapping[int, Any]
    ) -> None:
        super().__init__(network, events, links, gone)
        assert network.fabric is not None
        self._flows = Flows(network.fabric)
        self._version = 0  # of the event at which rates are looked at again

    def send(self, task: RunningProgram[Any], effect: Send) -> None:
        src, dst, nbytes, events = task.rank, effect.dst, effect.nbytes, self._events
        if not 0 <= dst < self._size:
            check_send(effect, src, self._size)
        message = (src, dst, effect.tag, effect.data, nbytes)
        if dst == src:  # never touches the network
            events.push(events.now, TAIL, message)
        elif self._links is not None:
            self.attempt(self._links.send(message, effect.label, task.priority))
        else:
            self.ledger.record(src, dst, nbytes, effect.label)
            self._start(src, dst, nbytes, message, task.priority)

    def attempt(self, parcel: Parcel) -> None:
        assert self._links is not None
        src, dst, _, _, nbytes = parcel.message
        self.ledger.record(src, dst, nbytes, parcel.label)
        if dst in self._gone:
            self._links.drop(parcel)
        self._start(src, dst, nbytes, parcel, parcel.priority)

    def progress(self, version: int) -> None:
        if version != self._version:
            return  # messages have come since
        events = self._events
        now = events.now
        for flow in self._flows.finish(now):
            arrival = now + self._flows.fabric.latency_s(flow.src, flow.dst)
            parcel = flow.what
            if not isinstance(parcel, Parcel):
                events.push(arrival, TAIL, parcel)
            elif flow.dst in self._gone:
                pass  # it was dropped
            elif parcel.num_lost:
                assert self._links is not None
                parcel.num_lost -= 1
                events.push(now + self._links.timeout_s, SEND, parcel)
            else:
                parcel.left_s = now
                events.push(arrival, PARCEL_TAIL, parcel)
        following = self._flows.next_finish()
        if following is not None:
            self._version += 1
            events.push_after(following, FLOW, self._version)

    def cut(self, rank: int) -> set[Parcel]:
        assert self._links is not None
        now = self._events.now
        self._flows.drop(now, {rank})
        self._look_again()
        return self._links.cut(rank, now)

    def _start(self, src: int, dst: int, nbytes: int, what: Any, priority: int = 0) -> None:
        self._flows.start(self._events.now, Flow(src, dst, nbytes, priority, what))
        self._look_again()

    def _look_again(self) -> None:
        """Computes rates again when all messages of this time have come."""
        self._version += 1
        self._events.push_after(self._events.now, FLOW, self._version)
