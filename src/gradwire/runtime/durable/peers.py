"""What a durable server knows of its peers: who came back, who left or is lost, who is done.

Two moments count. That a peer comes is written down first; what is sent to it from then on is not
for who it was before. Later the program is told.
"""

from collections import Counter
from collections.abc import Iterable, KeysView, Mapping
from typing import Any

from gradwire.runtime.process.transport import DONE, GOODBYE, JOINED, LOST, Arrival


class Peers:
    """`lives` and `endings` as a state has them."""

    def __init__(self, lives: Mapping[int, float], endings: Iterable[tuple[Any, ...]]) -> None:
        self.lives = dict(lives)  # of those that came (back); of others 0
        self._joining: Counter[int] = Counter()  # how often each comes in what is not told yet
        # Of each that has left or is lost, and that is done.
        self._ended: dict[int, Arrival] = {}
        self._done: dict[int, Arrival] = {}
        for fields in endings:
            self.told(Arrival(*fields))

    @property
    def endings(self) -> list[Arrival]:
        """Who is done, has left or is lost: told to every new engine."""
        return [*self._done.values(), *self._ended.values()]

    @property
    def ended(self) -> KeysView[int]:
        """Who has left or is lost."""
        return self._ended.keys()

    def comes(self, arrival: Arrival) -> None:
        """It is written down; the program will be told."""
        self._joining[arrival.src] += 1
        if arrival.time_s is not None:
            self.lives[arrival.src] = arrival.time_s

    def told(self, arrival: Arrival) -> None:
        """The program hears of it."""
        kind, src = arrival.kind, arrival.src
        if kind == JOINED:
            self._joining[src] -= 1
            self._ended.pop(src, None)
            self._done.pop(src, None)
        elif kind in (LOST, GOODBYE):
            self._ended[src] = arrival
        elif kind == DONE:
            self._done[src] = arrival

    def is_known(self, arrival: Arrival) -> bool:
        """Whether it is written down already that this peer comes."""
        is_joined = arrival.kind == JOINED and arrival.time_s is not None
        return is_joined and self.lives.get(arrival.src) == arrival.time_s

    def is_meant(self, dst: int, life: float | None) -> bool:
        """Whether the program, when it sends to `dst`, means who is there; None: nobody is."""
        return not self._joining[dst] and (life is None or life == self.lives.get(dst, 0.0))
