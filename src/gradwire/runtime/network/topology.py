"""Networks with a shape: which links lie between any two nodes.

Every node has a NIC (`runtime/network/network.py`). A topology says what lies between the NICs:
links with a bandwidth and a latency, which the messages that cross them share fairly
(`runtime/network/flows.py`). With `switch`, the default, nothing lies between them, and messages
queue up at the NICs.
"""

import heapq
import tomllib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gradwire.core.notation import Expression
from gradwire.core.registry import Registry
from gradwire.runtime.network.fabric import Background, Fabric, Link, Route
from gradwire.runtime.network.network import Network, parse_bandwidth, parse_duration


class Topology(Expression, ABC):
    """What lies between the NICs."""

    def check(self, num_workers: int, num_nodes: int) -> None:
        """Refuses a number of nodes that it cannot place."""

    def shape(self, network: Network, num_workers: int) -> Network:
        """The network with this topology between its NICs."""
        self.check(num_workers, network.size)
        return replace(network, fabric=self.fabric(network, num_workers))

    @abstractmethod
    def fabric(self, network: Network, num_workers: int) -> Fabric | None:
        """All links and routes. None: a switch that never blocks."""


@dataclass(frozen=True, repr=False)
class Switch(Topology):
    """One switch that never blocks: only NICs limit messages."""

    known_as = ("none",)

    def fabric(self, network: Network, num_workers: int) -> Fabric | None:
        return None


class _Sites(Topology):
    """Nodes in groups. Each group has one uplink, which its members share."""

    _SITE: str  # what a group is called

    @property
    @abstractmethod
    def num_sites(self) -> int: ...

    @property
    @abstractmethod
    def uplinks(self) -> tuple[str, str]:
        """Bandwidth of each uplink (one value or one for each), and its latency."""

    def check(self, num_workers: int, num_nodes: int) -> None:
        if self.num_sites > num_workers:
            raise ValueError(
                f"{self!r} has more {self._SITE}s than there are workers ({num_workers}). "
                f"Take fewer {self._SITE}s."
            )

    def site_of(self, rank: int, num_workers: int) -> int:
        """Workers in blocks of neighbouring ranks; other nodes in turn, from the first site on."""
        if rank < num_workers:
            return rank * self.num_sites // num_workers
        return (rank - num_workers) % self.num_sites

    def fabric(self, network: Network, num_workers: int) -> Fabric:
        bandwidth, latency = self.uplinks
        texts = bandwidth.split(",")
        rates = [parse_bandwidth(text) for text in texts] * (
            self.num_sites if len(texts) == 1 else 1
        )
        seconds = parse_duration(latency)
        links = _nics(network)
        first = len(links)
        for site, rate in enumerate(rates):
            links.append(Link(f"{self._SITE} {site} up", rate, seconds))
            links.append(Link(f"{self._SITE} {site} down", rate, 0.0))

        def route(src: int, dst: int) -> Route:
            if src == dst:
                return ()
            a, b = self.site_of(src, num_workers), self.site_of(dst, num_workers)
            between = () if a == b else (first + 2 * a, first + 2 * b + 1)
            return (2 * src, *between, 2 * dst + 1)

        ranks = range(network.size)
        return Fabric(tuple(links), tuple(tuple(route(a, b) for b in ranks) for a in ranks))

    def _check_uplinks(self) -> None:
        bandwidth, latency = self.uplinks
        texts = bandwidth.split(",")
        if self.num_sites < 1:
            raise ValueError(f"{self!r}: the number of {self._SITE}s must be at least 1")
        if len(texts) not in (1, self.num_sites):
            raise ValueError(
                f"{self!r}: uplink has {len(texts)} values for {self.num_sites} {self._SITE}s: "
                "give one for all, or one for each"
            )
        for text in texts:
            parse_bandwidth(text)
        parse_duration(latency)


@dataclass(frozen=True, repr=False)
class Racks(_Sites):
    """Workers in racks; the members of a rack share its uplink to the other racks."""

    count: int
    uplink: str = "10Gbit"
    latency: str = "10us"  # that an uplink adds

    examples = ("racks(2)", 'racks(4, uplink="10Gbit")')
    _SITE = "rack"

    def __post_init__(self) -> None:
        self._check_uplinks()

    @property
    def num_sites(self) -> int:
        return self.count

    @property
    def uplinks(self) -> tuple[str, str]:
        return self.uplink, self.latency


@dataclass(frozen=True, repr=False)
class Wan(_Sites):
    """Workers at sites that are joined by the internet: slow uplinks, far apart."""

    sites: int
    uplink: str = "100Mbit"
    latency: str = "30ms"  # from one site to another

    examples = ("wan(2)", 'wan(4, uplink="50Mbit", latency="80ms")')
    _SITE = "site"

    def __post_init__(self) -> None:
        self._check_uplinks()

    @property
    def num_sites(self) -> int:
        return self.sites

    @property
    def uplinks(self) -> tuple[str, str]:
        return self.uplink, self.latency


@dataclass(frozen=True, repr=False)
class File(Topology):
    """Links from a TOML file: bandwidth and latency of each, and traffic of others.

        [[link]]
        between = [0, "switch a"]       # a rank, or a name of your choice
        bandwidth = "1Gbit"             # in each direction
        latency = "50us"

        [[background]]
        from = 0
        to = 3
        bandwidth = "200Mbit"

    Messages take the route of the least latency, and of the fewest links among those.
    """

    path: str

    examples = ('file("links.toml")',)

    def fabric(self, network: Network, num_workers: int) -> Fabric:
        try:
            text = Path(self.path).read_text()
            content = tomllib.loads(text)
        except (OSError, ValueError) as error:
            raise ValueError(f"{self!r} cannot be read: {error}") from None
        return _FileReader(self.path, content, network).fabric()


class _FileReader:
    def __init__(self, path: str, content: dict[str, Any], network: Network) -> None:
        self.path = path
        self.network = network
        unknown = set(content) - {"link", "background"}
        if unknown:
            raise self._error(f"has an unknown table {sorted(unknown)[0]!r}", "link, background")
        self.content = content
        self.links: list[Link] = []
        self.edges: dict[Any, list[tuple[Any, int]]] = {}  # where links lead to from each point

    def _error(self, what: str, expected: str) -> ValueError:
        return ValueError(f"topology file {self.path} {what}; expected: {expected}")

    def _rows(self, table: str, keys: Sequence[str]) -> list[dict[str, Any]]:
        rows = self.content.get(table, [])
        if not isinstance(rows, list):
            raise self._error(f"has one [{table}]", f"[[{table}]] with two brackets")
        for row in rows:
            if set(row) - set(keys) or not {*keys} - {"latency"} <= set(row):
                raise self._error(f"has a [[{table}]] with keys {sorted(row)}", ", ".join(keys))
        return rows

    def _node(self, value: Any) -> int:
        if not isinstance(value, int) or not 0 <= value < self.network.size:
            raise self._error(f"names the node {value!r}", f"0 .. {self.network.size - 1}")
        return value

    def fabric(self) -> Fabric:
        for row in self._rows("link", ("between", "bandwidth", "latency")):
            ends = row["between"]
            if not isinstance(ends, list) or len(ends) != 2 or ends[0] == ends[1]:
                raise self._error(f"has a link between {ends!r}", "two different points")
            for end in ends:
                if not isinstance(end, str):
                    self._node(end)
            rate = parse_bandwidth(row["bandwidth"])
            seconds = parse_duration(row.get("latency", "0s"))
            for src, dst in (ends, ends[::-1]):
                self.edges.setdefault(src, []).append((dst, len(self.links)))
                self.links.append(Link(f"{src} - {dst}", rate, seconds))
        ranks = range(self.network.size)
        routes = tuple(self._routes_from(src) for src in ranks)
        background = tuple(
            Background(
                self._node(row["from"]), self._node(row["to"]), parse_bandwidth(row["bandwidth"])
            )
            for row in self._rows("background", ("from", "to", "bandwidth"))
        )
        return Fabric(tuple(self.links), routes, background)

    def _routes_from(self, src: int) -> tuple[Route, ...]:
        """Dijkstra's algorithm. Links of a file include the NICs."""
        best: dict[Any, Route] = {}
        heap: list[tuple[float, int, Route, Any]] = [(0.0, 0, (), src)]
        while heap:
            seconds, hops, route, point = heapq.heappop(heap)
            if point in best:
                continue
            best[point] = route
            if isinstance(point, int) and point != src:
                continue  # nodes do not forward messages of others
            for end, number in self.edges.get(point, ()):
                if end not in best:
                    longer = (*route, number)
                    entry = (seconds + self.links[number].latency_s, hops + 1, longer, end)
                    heapq.heappush(heap, entry)
        missing = [dst for dst in range(self.network.size) if dst not in best]
        if missing:
            raise self._error(
                f"has no way from node {src} to node {missing[0]}",
                f"links that join all {self.network.size} nodes",
            )
        return tuple(best[dst] for dst in range(self.network.size))


def _nics(network: Network) -> list[Link]:
    """The NIC of node i is link 2 i (out) and link 2 i + 1 (in)."""
    links = []
    for rank, (seconds, rate) in enumerate(zip(network.latency_s, network.bandwidth)):
        links += [Link(f"node {rank} out", rate, seconds), Link(f"node {rank} in", rate, 0.0)]
    return links


TOPOLOGY: Registry[Topology] = Registry(
    "topology",
    Topology,  # type: ignore[type-abstract]
    __name__,
    group="gradwire.topology",
)
