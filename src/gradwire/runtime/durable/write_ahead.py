"""What has arrived at a durable server since its last state: written down, then acknowledged.

With `is_durable` a message is acknowledged when it is in the journal and synced. Otherwise that
holds for small ones only, and without the sync. Of a large one the journal has that it came; its
sender keeps it until a state has it, and with it all that it sends later, as what is acknowledged
is a number up to which nothing is needed.
"""

import time
from collections.abc import Callable, Collection, Mapping
from math import inf

from gradwire.runtime.durable import journal
from gradwire.runtime.durable.checkpoint import Store
from gradwire.runtime.durable.journal import LINKS, TIMED_OUT
from gradwire.runtime.process.frames import Headers
from gradwire.runtime.process.transport import ARRIVED, DONE, JOINED, Arrival, message_nbytes

NUMBERED = (ARRIVED, DONE)  # kinds of arrivals that are messages, with numbers
Noted = dict[int, tuple[float, int]]  # rank -> its life, up to which number all is acknowledged
_SMALL_NBYTES = 256  # what the journal holds in any case
_IDLE_S = 0.5  # after which what is not acknowledged is saved


class WriteAhead:
    """Writes to the journal of `store`, and calls `acknowledge(src, number)`.

    `noted` is what state and journal say of the links. A state is due every `every_s` seconds, and
    when the journal, or what is not acknowledged, has more than `max_nbytes`.
    """

    def __init__(
        self,
        store: Store,
        acknowledge: Callable[[int, int], None],
        noted: Noted,
        *,
        rank: int,
        headers: Headers,
        is_durable: bool,
        every_s: float,
        max_nbytes: int,
    ) -> None:
        self._store = store
        self._acknowledge = acknowledge
        self._noted = noted
        self._rank, self._headers = rank, headers
        self._is_durable = is_durable
        self._every_s, self._max_nbytes = every_s, max_nbytes
        self._saved_s = self._came_s = time.monotonic()
        self._save_s = 0.0  # how long it took
        # What is not acknowledged, as only its sender has it: the last number of each, all bytes.
        self._owed: dict[int, int] = {}
        self._owed_nbytes = 0
        self._is_urgent = False  # a state is due at the next good moment

    # Arrivals.

    def write(self, group: list[Arrival], lives: Mapping[int, float]) -> None:
        """Once it returns they may be handed over. `lives` are those of all peers with a link."""
        # Before the first message of a new life, of which nothing has been received.
        fresh = {
            rank: (life, 0)
            for rank, life in lives.items()
            if self._noted.get(rank, (None, 0))[0] != life
        }
        if fresh:
            self._noted |= fresh
            self._append(Arrival(LINKS, self._rank, message=fresh))
        for arrival in group:
            is_small = message_nbytes(arrival.message) <= _SMALL_NBYTES
            is_acknowledged = is_small and arrival.src not in self._owed
            is_whole = self._is_durable or is_acknowledged or arrival.kind not in NUMBERED
            self._append(arrival, is_whole)
            if arrival.kind == JOINED and self._owed.pop(arrival.src, None) is not None:
                self._is_urgent = (
                    True  # who it was before will not send again; its numbers are over
                )
            if not is_whole:
                self.owe(arrival)
        self.commit()
        for arrival in group:
            is_owed = arrival.src in self._owed
            if arrival.kind in NUMBERED and arrival.number and not is_owed:
                self._acknowledge(arrival.src, arrival.number)
        self._came_s = time.monotonic()

    def owe(self, arrival: Arrival) -> None:
        """It is to be acknowledged when a state has it."""
        self._owed[arrival.src] = arrival.number
        self._owed_nbytes += message_nbytes(arrival.message)

    def write_timeout(self, num_handed: int) -> None:
        """A wait timed out after so many arrivals. It is there once something is committed."""
        self._append(Arrival(TIMED_OUT, self._rank, number=num_handed))

    def commit(self) -> None:
        """What is written down is there after a crash of the process, or of the machine."""
        if self._is_durable:
            self._store.journal.commit()
        else:
            self._store.journal.write()

    def _append(self, arrival: Arrival, is_whole: bool = True) -> None:
        self._store.journal.append(journal.encode(arrival, self._headers, is_whole))

    # States.

    def last_number(self, src: int, acknowledged: int) -> int:
        """Of the messages of `src` that a state has, given up to which they are acknowledged."""
        return self._owed.get(src, acknowledged)

    def saved(self, noted: Noted, save_s: float) -> None:
        """A state has it all, `noted` too, and took so long; a new journal has begun."""
        self._noted = noted
        self._saved_s, self._save_s = time.monotonic(), save_s
        for src, last in self._owed.items():
            self._acknowledge(src, last)
        self._owed.clear()
        self._owed_nbytes = 0
        self._is_urgent = False

    def is_due(self, ended: Collection[int]) -> bool:
        """Whether a state is, given who has left or is lost."""
        nbytes = self._store.journal.nbytes
        if not nbytes:
            return False
        if self._is_urgent or not self._owed.keys().isdisjoint(ended):
            return True  # it will not send again
        return self.due_in_s <= 0 or max(self._owed_nbytes, nbytes) > self._max_nbytes

    @property
    def due_in_s(self) -> float:
        if not self._store.journal.nbytes:
            return inf
        due_s = self._saved_s + self._every_s
        if self._owed:  # senders may wait until they may forget something
            due_s = min(due_s, max(self._came_s + _IDLE_S, self._saved_s + 10 * self._save_s))
        return max(0.0, due_s - time.monotonic())
