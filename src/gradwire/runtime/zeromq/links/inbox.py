"""Arrivals that the caller has not read yet."""

from collections import Counter, defaultdict, deque
from typing import NamedTuple

from gradwire.runtime.process.transport import GOODBYE, JOINED, LOST, Arrival
from gradwire.runtime.zeromq.links.link import Link


class Delivery(NamedTuple):
    """An arrival, and the numbered message that brought it."""

    arrival: Arrival | None  # None: the caller need not know
    link: Link | None = None  # None: no message brought it
    number: int = 0
    nbytes: int = 0
    era: int = 0
    is_direct: bool = True  # not relayed, so the caller may acknowledge its number
    is_successor: bool = False  # another process has taken this rank


class Inbox:
    """Deliveries in order of arrival, and arrivals that were given back for a later job."""

    def __init__(self) -> None:
        self._deliveries: deque[Delivery] = deque()
        self._successors: Counter[int] = Counter()  # by rank: how many are unread
        self._deferred: defaultdict[int, list[Arrival]] = defaultdict(list)
        self._ended: dict[int, Arrival] = {}  # by peer that left or was lost

    def put(self, delivery: Delivery) -> None:
        self._deliveries.append(delivery)
        if delivery.is_successor and delivery.arrival is not None:
            self._successors[delivery.arrival.src] += 1

    def take(self) -> Delivery | None:
        if not self._deliveries:
            return None
        delivery = self._deliveries.popleft()
        arrival = delivery.arrival
        if arrival is not None:
            if delivery.is_successor:
                self._successors[arrival.src] -= 1
            if arrival.kind in (LOST, GOODBYE):
                self._ended[arrival.src] = arrival
            elif arrival.kind == JOINED:
                self._ended.pop(arrival.src, None)
        return delivery

    def is_succeeded(self, rank: int) -> bool:
        """Whether another process has taken this rank, and the caller has not read that yet."""
        return self._successors[rank] > 0

    def defer(self, arrival: Arrival) -> None:
        self._deferred[arrival.job].append(arrival)

    def deferred(self, job: int) -> list[Arrival]:
        for other in [other for other in self._deferred if other < job]:
            del self._deferred[other]
        return self._deferred.pop(job, []) + list(self._ended.values())
