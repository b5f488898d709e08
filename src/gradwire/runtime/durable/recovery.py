"""What a durable server that begins again is told again: the arrivals of its journal, in order.

Some are whole in the journal. Of others it has only that they came, since their senders keep them
and send them again; these are waited for. What comes meanwhile and is not their turn yet is early.
What the journal has nothing of is new, and left when all is told. A message whose sender is gone
is gone with it.

The journal also has after how many arrivals a wait of the program timed out. There nothing is told
until the program waits, and its wait times out again.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from itertools import count
from typing import NamedTuple

import torch

from gradwire.runtime.durable import journal
from gradwire.runtime.durable.journal import LINKS, NOT_KEPT, TIMED_OUT
from gradwire.runtime.durable.write_ahead import NUMBERED
from gradwire.runtime.process.frames import Headers
from gradwire.runtime.process.transport import GOODBYE, JOINED, LOST, Arrival

_log = logging.getLogger(__name__)


class Told(NamedTuple):
    arrival: Arrival
    is_sent_again: bool  # the journal has it not; its sender keeps it until a state has it


class Retelling:
    """Of the records `bodies`. `receive(timeout_s)` gives what arrives now.

    `num_told` counts the arrivals that the program has behind it, at first those before the
    journal's first. One that is gone with its sender counts too: it did when the program had it.
    """

    def __init__(
        self,
        bodies: Sequence[memoryview],
        receive: Callable[[float | None], Arrival | None],
        *,
        rank: int,
        num_told: int,
        headers: Headers,
        device: torch.device | None = None,
        gone: Collection[int] = (),
    ) -> None:
        self.num_told = num_told
        self._receive = receive
        self._rank, self._headers, self._device = rank, headers, device
        self._script: deque[memoryview] = deque()
        self._timeouts: deque[int] = deque()  # after how many arrivals a wait had timed out
        # Of who comes, how many are told before: for the last time, if it does so often.
        self._last_joined: dict[int, int] = {}
        self._early: dict[tuple[int, int], Arrival] = {}  # by sender and number
        self._count = count()  # of those among them that have no number
        self._gone = set(gone)  # who will not send again
        for body in bodies:
            arrival = journal.glance(body)
            if arrival.kind == TIMED_OUT:
                self._timeouts.append(arrival.number)
            elif arrival.kind != LINKS:
                if arrival.kind == JOINED:
                    self._last_joined[arrival.src] = num_told + len(self._script)
                self._script.append(body)
        if bodies:
            _log.info("rank %d: told again %d arrivals", rank, len(self._script))

    @property
    def is_over(self) -> bool:
        """Whether the program has heard all that it, or one before it, had heard already."""
        return not (self._script or self._timeouts)

    @property
    def has_early(self) -> bool:
        return bool(self._early)

    def take_early(self) -> Arrival | None:
        """When all is told: what came meanwhile, in its order."""
        return self._early.pop(next(iter(self._early))) if self._early else None

    def next(self, timeout_s: float | None) -> Told | None:
        """The next arrival; None also where a wait timed out at this point, or all is told."""
        limit = None if timeout_s is None else time.monotonic() + timeout_s
        while self._script and not self._times_out:
            body = self._script[0]
            arrival = journal.glance(body)
            if arrival.message is not NOT_KEPT:
                whole = journal.decode(body, self._headers, self._device)
                self._turn()
                return Told(whole, is_sent_again=False)
            # Of who it was before it came again.
            is_before = self.num_told < self._last_joined.get(arrival.src, -1)
            key = (arrival.src, arrival.number)
            if not is_before and key in self._early:
                self._turn()
                return Told(self._early.pop(key), is_sent_again=True)
            if is_before or arrival.src in self._gone:
                _log.warning("rank %d: message %d of %d is gone with it", self._rank, *key[::-1])
                self._turn()
                continue
            left = None if limit is None else max(0.0, limit - time.monotonic())
            came = self._receive(left)
            if came is None:
                return None
            self._is_early(came)
        return None

    def times_out(self) -> bool:
        """Whether the wait that the program is in timed out at this point; it does so once."""
        if not self._times_out:
            return False
        self._timeouts.popleft()
        return True

    @property
    def _times_out(self) -> bool:
        """Whether the program has heard all that it had before a wait timed out."""
        return bool(self._timeouts) and self._timeouts[0] <= self.num_told

    def _turn(self) -> None:
        self._script.popleft()
        self.num_told += 1

    def _is_early(self, came: Arrival) -> None:
        if came.kind in NUMBERED and came.number:
            self._early[came.src, came.number] = came
            return
        self._early[-1, next(self._count)] = came
        if came.kind in (LOST, GOODBYE, JOINED):
            self._gone.add(came.src)
