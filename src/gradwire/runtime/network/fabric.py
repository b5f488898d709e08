"""The links of a network and the routes between its nodes."""

from dataclasses import dataclass
from typing import NamedTuple

Route = tuple[int, ...]  # numbers of links


class Link(NamedTuple):
    """One direction of a cable, or of a leased line."""

    name: str
    bandwidth: float  # bytes per second
    latency_s: float


class Background(NamedTuple):
    """Traffic of others: a flow that wants so many bytes per second for ever."""

    src: int
    dst: int
    bandwidth: float


@dataclass(frozen=True)
class Fabric:
    """All links of a network, NICs included, and the routes between nodes."""

    links: tuple[Link, ...]
    routes: tuple[tuple[Route, ...], ...]  # [src][dst]
    background: tuple[Background, ...] = ()

    def latency_s(self, src: int, dst: int) -> float:
        return sum(self.links[number].latency_s for number in self.routes[src][dst])
