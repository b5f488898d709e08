"""What a durable server knows of its peers: which came back, left, are lost or are done.

Two moments count. First the journal holds that a peer has joined; what is sent to it from then on
is not for its earlier incarnation. Later the program gets that arrival.
"""

from collections import Counter
from collections.abc import Iterable, KeysView, Mapping
from typing import Any

from gradwire.runtime.process.transport import DONE, GOODBYE, JOINED, LOST, Arrival


class Peers:
    """`incarnations` and `endings` as a state has them."""

    def __init__(
        self, incarnations: Mapping[int, float], endings: Iterable[tuple[Any, ...]]
    ) -> None:
        self.incarnations = dict(incarnations)  # of those that joined later; of others 0
        self._joining: Counter[int] = Counter()  # joins that the program has not got yet
        # By rank: that it has left or is lost; that it is done.
        self._ended: dict[int, Arrival] = {}
        self._done: dict[int, Arrival] = {}
        for fields in endings:
            self.note_handed(Arrival(*fields))

    @property
    def endings(self) -> list[Arrival]:
        """Peers that are done, have left or are lost: every new engine gets these."""
        return [*self._done.values(), *self._ended.values()]

    @property
    def ended(self) -> KeysView[int]:
        """Peers that have left or are lost."""
        return self._ended.keys()

    def note_join(self, arrival: Arrival) -> None:
        """The journal holds that a peer has joined; the program will get it."""
        self._joining[arrival.src] += 1
        if arrival.time_s is not None:
            self.incarnations[arrival.src] = arrival.time_s

    def note_handed(self, arrival: Arrival) -> None:
        """The program gets this arrival."""
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
        """Whether the journal holds this join already."""
        is_joined = arrival.kind == JOINED and arrival.time_s is not None
        return is_joined and self.incarnations.get(arrival.src) == arrival.time_s

    def is_meant(self, dst: int, incarnation: float | None) -> bool:
        """Whether the program knows the incarnation at `dst` that is there; None: none is."""
        return not self._joining[dst] and (
            incarnation is None or incarnation == self.incarnations.get(dst, 0.0)
        )
