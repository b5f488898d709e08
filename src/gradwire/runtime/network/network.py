"""The network model: one full-duplex NIC per node, joined by a switch that never blocks.

A message of s bytes leaves when its sender's NIC is free, occupies it for s / bandwidth, reaches
the receiver `latency` later and occupies the receiver's NIC likewise. Uncontended it takes
latency + s / bandwidth, the alpha-beta model of Hockney 1994; messages that meet at a NIC queue
up in order of arrival. Sending and receiving do not disturb each other. With a topology
(`runtime/network/topology.py`) messages share links instead (`runtime/network/flows.py`); with a
burst NICs are token buckets (`runtime/network/buckets.py`).
"""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gradwire.core.units import parse_bandwidth, parse_duration
from gradwire.runtime.network.fabric import Fabric


def per_node(text: str, num_nodes: int, what: str) -> list[str]:
    """One value for all nodes, or a comma-separated one for each."""
    values = [value.strip() for value in text.split(",")]
    if len(values) == 1:
        return values * num_nodes
    if len(values) != num_nodes:
        raise ValueError(
            f"{what} {text!r} has {len(values)} values for {num_nodes} nodes: "
            "give one for all, or one for each"
        )
    return values


@dataclass(frozen=True, slots=True)
class Network:
    """Latency and bandwidth of each node's NIC. A message pays its sender's latency."""

    latency_s: tuple[float, ...]
    bandwidth: tuple[float, ...]  # bytes per second, in each direction
    fabric: Fabric | None = None  # what lies between the NICs; None: a switch that never blocks
    burst: int = 0  # bytes that a NIC passes at once after a pause, in each direction

    @property
    def size(self) -> int:
        return len(self.bandwidth)

    def near_bandwidths(self) -> tuple[float, ...]:
        """Of each node: the least bandwidth of its own links, such as its NIC and its uplink.

        Those are the links in the first half of its routes; the others are those of receivers.
        """
        if self.fabric is None:
            return self.bandwidth
        links = self.fabric.links
        near = [
            [number for route in routes for number in route[: (len(route) + 1) // 2]]
            for routes in self.fabric.routes
        ]
        return tuple(
            min((links[number].bandwidth for number in own), default=nic)
            for own, nic in zip(near, self.bandwidth)
        )

    @staticmethod
    def uniform(num_nodes: int, bandwidth: str = "10Gbit", latency: str = "50us") -> "Network":
        return Network.parse(num_nodes, bandwidth, latency)

    @staticmethod
    def parse(num_workers: int, bandwidth: str, latency: str, extra: int = 0) -> "Network":
        """From strings such as `1Gbit` or `1Gbit,1Gbit,100Mbit,1Gbit`.

        `extra` nodes after the workers have other roles (servers, a scheduler). A value is for
        all nodes; a list has one for each, or one for each worker: then the other nodes have the
        highest bandwidth and the lowest latency among the workers, since a server stands where
        the network is good.
        """
        latencies = _parsed(latency, num_workers, extra, "latency", parse_duration, min)
        bandwidths = _parsed(bandwidth, num_workers, extra, "bandwidth", parse_bandwidth, max)
        return Network(latencies, bandwidths)


def _parsed(
    text: str,
    num_workers: int,
    extra: int,
    what: str,
    parse: Callable[[str], float],
    best: Callable[[list[float]], float],
) -> tuple[float, ...]:
    """One value per node."""
    num_values = text.count(",") + 1
    if extra == 0 or num_values in (1, num_workers + extra):
        return tuple(map(parse, per_node(text, num_workers + extra, what)))
    if num_values != num_workers:
        raise ValueError(
            f"{what} {text!r} has {num_values} values for {num_workers} workers and {extra} other "
            "nodes: give one for all, one for each worker, or one for each node"
        )
    values = list(map(parse, per_node(text, num_workers, what)))
    return (*values, *[best(values)] * extra)


class Nics:
    """When each NIC is free again. The state of a network between two messages."""

    __slots__ = ("_size", "bandwidth", "delivered", "egress_free", "ingress_free", "latency_s")

    def __init__(self, network: Network) -> None:
        self.latency_s = network.latency_s
        self.bandwidth = network.bandwidth
        self._size = size = network.size
        # Arrays, whose places never change: exchanges use them in C.
        self.egress_free = array("d", bytes(8 * size))
        self.ingress_free = array("d", bytes(8 * size))
        self.delivered = array("d", bytes(8 * size * size))  # [dst, src]

    def leave(self, now: float, src: int, nbytes: int) -> float:
        """Queues a message for sending; returns when its first bit reaches the receiver."""
        free = self.egress_free[src]
        start = now if now > free else free
        self.egress_free[src] = start + nbytes / self.bandwidth[src]
        return start + self.latency_s[src]

    def arrive(self, now: float, src: int, dst: int, nbytes: int) -> float:
        """The first bit is here: returns when the last one will be."""
        free = self.ingress_free[dst]
        start = now if now > free else free
        done = start + nbytes / self.bandwidth[dst]
        self.ingress_free[dst] = done
        # The last bit cannot arrive before the sender has sent it.
        sent = now + nbytes / self.bandwidth[src]
        # Nor before the message sent before it: rounding must not let it overtake.
        pair = dst * self._size + src
        arrival = self.delivered[pair] = max(done, sent, self.delivered[pair])
        return arrival

    def cut_off(self, now: float, src: int, dst: int, received_s: float) -> None:
        """The rest of a message will not come that would have been received until then."""
        last_bit = now + self.latency_s[src]
        if self.ingress_free[dst] == received_s > last_bit:  # nothing is queued behind it
            self.ingress_free[dst] = last_bit
        pair = dst * self._size + src
        self.delivered[pair] = min(self.delivered[pair], last_bit)

    def reset(self, node: int, now: float) -> None:
        """The NIC of a node that comes (back): nothing waits there."""
        self.egress_free[node] = self.ingress_free[node] = now

    def snapshot(self) -> dict[str, list[float]]:
        return {"egress_free": list(self.egress_free), "ingress_free": list(self.ingress_free)}

    def restore(self, saved: dict[str, Sequence[float]]) -> None:
        self.egress_free[:] = array("d", saved["egress_free"])
        self.ingress_free[:] = array("d", saved["ingress_free"])
