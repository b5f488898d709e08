"""What has come and nobody has read yet."""

from collections import Counter, defaultdict, deque
from typing import NamedTuple

from gradwire.runtime.process.transport import GOODBYE, JOINED, LOST, Arrival
from gradwire.runtime.zeromq.link import Link


class Letter(NamedTuple):
    """An arrival, and the numbered message that brought it."""

    arrival: Arrival | None  # None: there is nothing to tell the caller
    link: Link | None = None  # None: no message brought it
    number: int = 0
    nbytes: int = 0
    era: int = 0
    is_direct: bool = True  # not relayed: its number means something to the caller
    is_successor: bool = False  # it tells that somebody is there in the place of another one


class Inbox:
    """In order of arrival; and what was given back for a job to come."""

    def __init__(self) -> None:
        self._letters: deque[Letter] = deque()
        self._successors: Counter[int] = Counter()  # by rank: of how many nobody has read yet
        self._kept: defaultdict[int, list[Arrival]] = defaultdict(list)
        self._ended: dict[int, Arrival] = {}  # of peers that left or were lost

    def put(self, letter: Letter) -> None:
        self._letters.append(letter)
        if letter.is_successor and letter.arrival is not None:
            self._successors[letter.arrival.src] += 1

    def take(self) -> Letter | None:
        if not self._letters:
            return None
        letter = self._letters.popleft()
        arrival = letter.arrival
        if arrival is not None:
            if letter.is_successor:
                self._successors[arrival.src] -= 1
            if arrival.kind in (LOST, GOODBYE):
                self._ended[arrival.src] = arrival
            elif arrival.kind == JOINED:
                self._ended.pop(arrival.src, None)
        return letter

    def is_succeeded(self, rank: int) -> bool:
        """Whether another one is there than the caller, who has not read of it yet, believes."""
        return self._successors[rank] > 0

    def keep(self, arrival: Arrival) -> None:
        self._kept[arrival.job].append(arrival)

    def kept(self, job: int) -> list[Arrival]:
        for other in [other for other in self._kept if other < job]:
            del self._kept[other]
        return self._kept.pop(job, []) + list(self._ended.values())
