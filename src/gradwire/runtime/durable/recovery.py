"""Recovery: a durable server that is started again gets the arrivals of its journal, in order.

Some are whole in the journal. Of others it holds only that they came, since their senders keep them
and send them again; these are awaited. An arrival that comes before its turn is kept as early. What
the journal does not mention is new, and handed over after the replay. A message whose sender is
gone is lost with it.

The journal also holds after how many arrivals a wait of the program timed out. At that point the
replay stops until the program waits, and its wait times out again.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from itertools import count
from typing import NamedTuple

import torch

from gradwire.runtime.durable import journal
from gradwire.runtime.durable.journal import LINKS, NOT_STORED, TIMED_OUT
from gradwire.runtime.durable.write_ahead import NUMBERED
from gradwire.runtime.process.frames import Headers
from gradwire.runtime.process.transport import GOODBYE, JOINED, LOST, Arrival

_log = logging.getLogger(__name__)


class ReplayedArrival(NamedTuple):
    arrival: Arrival
    is_sent_again: bool  # not in the journal; its sender keeps it until a state has it


class JournalReplay:
    """Of the records `bodies`. `receive(timeout_s)` returns what arrives now.

    `num_handed` counts the arrivals that the program has got, at first those before the journal.
    One that is lost with its sender counts, too, as it did when the program had got it.
    """

    def __init__(
        self,
        bodies: Sequence[memoryview],
        receive: Callable[[float | None], Arrival | None],
        *,
        rank: int,
        num_handed: int,
        headers: Headers,
        device: torch.device | None = None,
        gone: Collection[int] = (),
    ) -> None:
        self.num_handed = num_handed
        self._receive = receive
        self._rank, self._headers, self._device = rank, headers, device
        self._script: deque[memoryview] = deque()
        self._timeouts: deque[int] = deque()  # after how many arrivals a wait timed out
        # By rank that joined: how many arrivals came before its last join.
        self._last_joined: dict[int, int] = {}
        self._early: dict[tuple[int, int], Arrival] = {}  # by sender and number
        self._count = count()  # keys for those that have no number
        self._gone = set(gone)  # ranks that will not send again
        for body in bodies:
            arrival = journal.peek(body)
            if arrival.kind == TIMED_OUT:
                self._timeouts.append(arrival.number)
            elif arrival.kind != LINKS:
                if arrival.kind == JOINED:
                    self._last_joined[arrival.src] = num_handed + len(self._script)
                self._script.append(body)
        if bodies:
            _log.info("rank %d: %d arrivals are replayed from the journal", rank, len(self._script))

    @property
    def is_over(self) -> bool:
        """Whether the program has got all that the process before this one had got."""
        return not (self._script or self._timeouts)

    @property
    def has_early(self) -> bool:
        return bool(self._early)

    def take_early(self) -> Arrival | None:
        """After the replay: what came meanwhile, in its order."""
        return self._early.pop(next(iter(self._early))) if self._early else None

    def next(self, timeout_s: float | None) -> ReplayedArrival | None:
        """The next arrival; None also where a wait timed out at this point, or at the end."""
        limit = None if timeout_s is None else time.monotonic() + timeout_s
        while self._script and not self._times_out:
            body = self._script[0]
            arrival = journal.peek(body)
            if arrival.message is not NOT_STORED:
                whole = journal.decode(body, self._headers, self._device)
                self._advance()
                return ReplayedArrival(whole, is_sent_again=False)
            # It is of an earlier incarnation of its sender.
            is_before = self.num_handed < self._last_joined.get(arrival.src, -1)
            key = (arrival.src, arrival.number)
            if not is_before and key in self._early:
                self._advance()
                return ReplayedArrival(self._early.pop(key), is_sent_again=True)
            if is_before or arrival.src in self._gone:
                _log.warning(
                    "rank %d: message %d of rank %d is lost with it", self._rank, *key[::-1]
                )
                self._advance()
                continue
            left = None if limit is None else max(0.0, limit - time.monotonic())
            came = self._receive(left)
            if came is None:
                return None
            self._put_early(came)
        return None

    def times_out(self) -> bool:
        """Whether the wait that the program is in timed out at this point; True once."""
        if not self._times_out:
            return False
        self._timeouts.popleft()
        return True

    @property
    def _times_out(self) -> bool:
        """Whether the program has got all that it had got before a wait timed out."""
        return bool(self._timeouts) and self._timeouts[0] <= self.num_handed

    def _advance(self) -> None:
        self._script.popleft()
        self.num_handed += 1

    def _put_early(self, came: Arrival) -> None:
        if came.kind in NUMBERED and came.number:
            self._early[came.src, came.number] = came
            return
        self._early[-1, next(self._count)] = came
        if came.kind in (LOST, GOODBYE, JOINED):
            self._gone.add(came.src)
