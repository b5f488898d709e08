"""Writes down what arrives at a durable server after its last state, then acknowledges it.

With `is_durable` a message is acknowledged when it is in the journal and synced. Otherwise that
holds for small ones only, and without the sync. Of a large one the journal holds that it came; its
sender keeps it until a state has it, and with it everything that it sends later, since an
acknowledgement covers all numbers up to one.
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
AcknowledgedNumbers = dict[
    int, tuple[float, int]
]  # rank -> its incarnation, number up to which all is acknowledged
_SMALL_NBYTES = 256  # the journal holds such messages in any case
_IDLE_S = 0.5  # without arrivals, after which a state is saved


class WriteAhead:
    """Writes to the journal of `store`, and calls `acknowledge(src, number)`.

    `acknowledged` is as of state and journal. A state is due every `every_s` seconds, and
    when the journal, or what is not acknowledged, has more than `max_nbytes`.
    """

    def __init__(
        self,
        store: Store,
        acknowledge: Callable[[int, int], None],
        acknowledged: AcknowledgedNumbers,
        *,
        rank: int,
        headers: Headers,
        is_durable: bool,
        every_s: float,
        max_nbytes: int,
    ) -> None:
        self._store = store
        self._acknowledge = acknowledge
        self._acknowledged = acknowledged
        self._rank, self._headers = rank, headers
        self._is_durable = is_durable
        self._every_s, self._max_nbytes = every_s, max_nbytes
        self._saved_s = self._came_s = time.monotonic()
        self._save_s = 0.0  # how long it took
        # Messages that only their sender has: the last number of each rank, and all bytes.
        self._owed: dict[int, int] = {}
        self._owed_nbytes = 0
        self._is_urgent = False  # a state is due as soon as possible

    # Arrivals.

    def write(self, group: list[Arrival], incarnations: Mapping[int, float]) -> None:
        """Once it returns they may be handed over. `incarnations`: of all peers with a link."""
        # Before the first message of a new incarnation.
        fresh = {
            rank: (incarnation, 0)
            for rank, incarnation in incarnations.items()
            if self._acknowledged.get(rank, (None, 0))[0] != incarnation
        }
        if fresh:
            self._acknowledged |= fresh
            self._append(Arrival(LINKS, self._rank, message=fresh))
        for arrival in group:
            is_small = message_nbytes(arrival.message) <= _SMALL_NBYTES
            is_acknowledged = is_small and arrival.src not in self._owed
            is_whole = self._is_durable or is_acknowledged or arrival.kind not in NUMBERED
            self._append(arrival, is_whole)
            if arrival.kind == JOINED and self._owed.pop(arrival.src, None) is not None:
                self._is_urgent = True  # its earlier incarnation will not send again
            if not is_whole:
                self.owe(arrival)
        self.commit()
        for arrival in group:
            is_owed = arrival.src in self._owed
            if arrival.kind in NUMBERED and arrival.number and not is_owed:
                self._acknowledge(arrival.src, arrival.number)
        self._came_s = time.monotonic()

    def owe(self, arrival: Arrival) -> None:
        """This arrival is acknowledged when a state has it."""
        self._owed[arrival.src] = arrival.number
        self._owed_nbytes += message_nbytes(arrival.message)

    def write_timeout(self, num_handed: int) -> None:
        """A wait timed out after so many arrivals. It is on disk after the next commit."""
        self._append(Arrival(TIMED_OUT, self._rank, number=num_handed))

    def commit(self) -> None:
        """Makes what was written survive a crash of the process, or of the machine."""
        if self._is_durable:
            self._store.journal.commit()
        else:
            self._store.journal.write()

    def _append(self, arrival: Arrival, is_whole: bool = True) -> None:
        self._store.journal.append(journal.encode(arrival, self._headers, is_whole))

    # States.

    def last_number(self, src: int, acknowledged: int) -> int:
        """The last message of `src` that a state has, given the last acknowledged one."""
        return self._owed.get(src, acknowledged)

    def note_saved(self, acknowledged: AcknowledgedNumbers, save_s: float) -> None:
        """A state with all this was saved, which took `save_s`; a new journal has begun."""
        self._acknowledged = acknowledged
        self._saved_s, self._save_s = time.monotonic(), save_s
        for src, last in self._owed.items():
            self._acknowledge(src, last)
        self._owed.clear()
        self._owed_nbytes = 0
        self._is_urgent = False

    def is_due(self, ended: Collection[int]) -> bool:
        """Whether a state is due, given the ranks that have left or are lost."""
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
        if self._owed:  # senders may wait for an acknowledgement
            due_s = min(due_s, max(self._came_s + _IDLE_S, self._saved_s + 10 * self._save_s))
        return max(0.0, due_s - time.monotonic())
