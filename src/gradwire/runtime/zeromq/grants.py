"""Who may send a large message now: few at a time, in order of (priority, size, arrival).

Many that send to one at once collide on its link and lose what they gain. So each asks first, with
the number of the message, and the next one is let go when an earlier one has arrived; or when that
takes too long, since one that is not heard of must not hold up all others.
"""

from collections.abc import Callable
from itertools import count
from math import inf
from time import monotonic
from typing import NamedTuple


class _Wish(NamedTuple):
    priority: float
    nbytes: int
    order: int
    peer: int
    number: int


class Grants:
    """Of one node for all its peers; each peer asks for one message at a time."""

    def __init__(self, max_large: int, patience_s: float = inf) -> None:
        self._max_large, self._patience_s = max_large, patience_s
        self._order = count()
        self._wishes: dict[int, _Wish] = {}
        self._granted: dict[int, tuple[int, float]] = {}  # peer -> number, and when

    def ask(self, peer: int, number: int, nbytes: int, priority: float) -> None:
        """Asking again for the same message changes nothing."""
        wish = self._wishes.get(peer)
        if wish is None or wish.number != number:
            self._wishes[peer] = _Wish(priority, nbytes, next(self._order), peer, number)

    def holds(self, peer: int, number: int) -> bool:
        """Whether this message was granted and has not arrived."""
        return peer in self._granted and self._granted[peer][0] == number

    def grant(self, may: Callable[[int], bool] = lambda peer: True) -> tuple[int, int] | None:
        """The next (peer, number) that may go, if one may. `may` tells who must wait all the same.

        A peer has one grant at a time.
        """
        if not self._wishes:
            return None
        now = monotonic()
        num_under_way = sum(now - since < self._patience_s for _, since in self._granted.values())
        if num_under_way >= self._max_large:
            return None
        able = [
            wish
            for wish in self._wishes.values()
            if wish.peer not in self._granted and may(wish.peer)
        ]
        if not able:
            return None
        wish = min(able)
        del self._wishes[wish.peer]
        self._granted[wish.peer] = wish.number, now
        return wish.peer, wish.number

    def arrived(self, peer: int, number: int) -> bool:
        """What is up to this number has arrived; whether that makes place for another one."""
        if peer in self._granted and self._granted[peer][0] <= number:
            del self._granted[peer]
            return True
        return False

    def forget(self, peer: int) -> None:
        """It is lost, or begins anew."""
        self._wishes.pop(peer, None)
        self._granted.pop(peer, None)
