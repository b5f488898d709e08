"""Back-pressure for large messages: few at a time, in order of (priority, size, arrival).

Many senders to one receiver would collide on its link. So each asks for a grant first, with the
number of the message. The next grant is given when an earlier message has arrived, or when that
takes longer than `patience_s`, so that one silent sender does not hold up all others.
"""

from collections.abc import Callable
from itertools import count
from math import inf
from time import monotonic
from typing import NamedTuple


class _GrantRequest(NamedTuple):
    priority: float
    nbytes: int
    order: int
    peer: int
    number: int


class Grants:
    """The grants of one node for all its peers; each peer asks for one message at a time."""

    def __init__(self, max_large: int, patience_s: float = inf) -> None:
        self._max_large, self._patience_s = max_large, patience_s
        self._order = count()
        self._requests: dict[int, _GrantRequest] = {}
        self._granted: dict[int, tuple[int, float]] = {}  # peer -> number, and when

    def ask(self, peer: int, number: int, nbytes: int, priority: float) -> None:
        """Asking again for the same message changes nothing."""
        request = self._requests.get(peer)
        if request is None or request.number != number:
            self._requests[peer] = _GrantRequest(priority, nbytes, next(self._order), peer, number)

    def holds(self, peer: int, number: int) -> bool:
        """Whether this message was granted and has not arrived."""
        return peer in self._granted and self._granted[peer][0] == number

    def grant(self, may: Callable[[int], bool] = lambda peer: True) -> tuple[int, int] | None:
        """The next (peer, number) that gets a grant, if any; only peers that `may` allows.

        A peer has one grant at a time.
        """
        if not self._requests:
            return None
        now = monotonic()
        num_under_way = sum(now - since < self._patience_s for _, since in self._granted.values())
        if num_under_way >= self._max_large:
            return None
        able = [
            request
            for request in self._requests.values()
            if request.peer not in self._granted and may(request.peer)
        ]
        if not able:
            return None
        request = min(able)
        del self._requests[request.peer]
        self._granted[request.peer] = request.number, now
        return request.peer, request.number

    def arrived(self, peer: int, number: int) -> bool:
        """Messages up to this number have arrived; whether that frees a grant."""
        if peer in self._granted and self._granted[peer][0] <= number:
            del self._granted[peer]
            return True
        return False

    def forget(self, peer: int) -> None:
        """The peer is lost, or starts again."""
        self._requests.pop(peer, None)
        self._granted.pop(peer, None)
