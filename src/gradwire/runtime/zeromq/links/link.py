"""One link: the numbers of messages to and from one peer, and the resend queue.

Messages in each direction have numbers from 1. A receiver takes only the next number; a lower one
is a duplicate, a higher one shows that something is missing. A sender keeps what is not
acknowledged. After every new connection both sides report how far they are, and send again what is
above. A link starts anew with the incarnation of its worker. A server that is started again
continues with the numbers that it has on disk, or, without any, from one.

There are no sockets here: a link decides, `Traffic` moves the bytes.
"""

from collections import deque
from typing import NamedTuple

from gradwire.runtime.zeromq.messages import Part

_OVERHEAD_NBYTES = 256


class OutgoingMessage(NamedTuple):
    """A message to send."""

    kind: int
    src: int
    dst: int
    body: Part
    payload: Part | None
    priority: float

    @property
    def nbytes(self) -> int:
        """What it counts for in limits; a small message counts, too."""
        return (
            _OVERHEAD_NBYTES + len(self.body) + (0 if self.payload is None else len(self.payload))
        )


NEXT, DUPLICATE, GAP = range(3)


class Link:
    """To one peer. `incarnation` is that of the worker on the link, or of the peer if none is."""

    def __init__(
        self,
        peer: int,
        identity: bytes | None,
        incarnation: float,
        before: tuple[int, int] | None = None,
    ) -> None:
        """`before`: the numbers received and sent when this process was started again."""
        self.peer = peer
        self.identity = identity  # by which a binding socket finds it; None: we connect
        self.incarnation = incarnation
        self.is_fresh = before is None
        self.is_up = False  # both sides know what the other has
        self.resume_s = 0.0  # when to ask again
        self.has_left = False  # it said goodbye
        self.era = 0  # changes when numbers begin again
        self.peer_incarnation: float | None = None  # of the process that last resumed
        received, sent = (0, 0) if before is None else before
        # Sending. Numbers 1 .. num_released are acknowledged, then come those of the queue.
        self.num_released = sent
        self.resend_queue: deque[OutgoingMessage] = deque()
        self.num_sent = sent  # up to this number on the connection as it is now
        self.num_taken_there = sent
        self._num_acknowledged = sent  # by the peer, perhaps before it was sent again
        self._num_room = sent  # up to this number messages do not count as posted
        self.bytes_posted = 0
        self.announced = 0  # the number of the large message that waits for a grant
        self.granted = 0
        # Receiving.
        self.num_taken = received
        self.num_handed = received  # up to this number the caller has them
        self.num_cleared = received  # up to this number they are acknowledged
        self.unread_bytes = 0
        self._unacknowledged: deque[int] = (
            deque()
        )  # handed over, and the caller has not acknowledged them
        self.misses = False  # the peer knows that something is missing
        self.was_full = False  # the peer must be sent RESEND once there is room
        self.reported_counts = (0, 0, 0)  # the last counts that the peer was sent

    # Sending.

    @property
    def num_posted(self) -> int:
        """The number of the last message."""
        return self.num_released + len(self.resend_queue)

    def post(self, out: OutgoingMessage) -> int:
        self.resend_queue.append(out)
        number = self.num_posted
        if number > self._num_room:
            self.bytes_posted += out.nbytes
        self._release()
        self.num_sent = max(self.num_sent, min(self.num_taken_there, number))
        return number

    @property
    def to_send(self) -> tuple[int, OutgoingMessage] | None:
        """The next message for the connection, with its number."""
        if self.num_sent >= self.num_posted:
            return None
        number = self.num_sent + 1
        return number, self.resend_queue[number - self.num_released - 1]

    def take_counts(self, acknowledged: int, room: int, taken: int) -> bool:
        """The peer reports how far it is; False if that cannot be true."""
        if not acknowledged <= room <= taken <= max(self.num_posted, self.num_taken_there):
            return False
        self.num_taken_there = max(self.num_taken_there, taken)
        if room > self._num_room:
            first = self.num_released
            for number in range(self._num_room + 1, min(room, self.num_posted) + 1):
                self.bytes_posted -= self.resend_queue[number - first - 1].nbytes
            self._num_room = room
        if acknowledged > self._num_acknowledged:
            self._num_acknowledged = acknowledged
            self._release()
        return True

    def _release(self) -> None:
        """Drops acknowledged messages. Their bytes have been subtracted already (`room`)."""
        while self.resend_queue and self.num_released < self._num_acknowledged:
            self.resend_queue.popleft()
            self.num_released += 1
        self.num_sent = max(self.num_sent, self.num_released)

    def resumed(
        self,
        taken: int,
        first: int,
        incarnation: float,
        is_fresh: bool,
        knows_us: bool = True,
        *,
        acknowledged: int = 0,
        room: int = 0,
    ) -> str | None:
        """A connection was made. The peer has taken this many and can send from `first` on.

        `acknowledged` and `room` may be new, as the last report on the old connection may be lost.

        Returns a text if the two sides do not fit together any more. A peer that is another process
        than before and is fresh starts with number 1; so does this side, with what the peer has not
        acknowledged. If the peer does not know this process (not `knows_us`), it does the same.
        """
        if not knows_us:
            first = min(first, self.num_taken + 1)
            taken = 0 if self.is_fresh else taken
        is_other = self.peer_incarnation is not None and incarnation != self.peer_incarnation
        if is_other and is_fresh:
            self.era += 1
            self.num_taken = self.num_handed = self.num_cleared = self.unread_bytes = 0
            self._unacknowledged.clear()
            self.reported_counts = (0, 0, 0)
        if first > self.num_taken + 1:
            return f"it cannot send messages {self.num_taken + 1} to {first - 1} any more"
        if taken < self.num_released:
            if not is_other:
                return f"messages {taken + 1} to {self.num_released} cannot be sent to it any more"
            self.num_released = self._num_acknowledged = taken  # the numbers begin again there
        elif taken > self.num_posted and self.is_fresh:
            return f"it has message {taken}, but {self.num_posted} were sent"
        self.peer_incarnation = incarnation
        self.misses = self.was_full = False
        self.announced = self.granted = 0
        room = min(room, taken)  # messages that are sent again do not count
        self._num_acknowledged = max(min(self._num_acknowledged, taken), min(acknowledged, room))
        self._num_room = max(self._num_acknowledged, room)
        self._release()
        self.bytes_posted = sum(
            out.nbytes
            for number, out in enumerate(self.resend_queue, self.num_released + 1)
            if number > self._num_room
        )
        self.num_taken_there = taken
        self.num_sent = max(min(taken, self.num_posted), self.num_released)
        self.is_up = True
        return None

    def again(self, taken: int) -> None:
        """The peer misses what is above this number."""
        self.num_sent = max(self.num_released, min(taken, self.num_posted))
        self.announced = self.granted = 0

    def down(self) -> None:
        self.is_up = False
        self.announced = self.granted = 0

    def clear(self) -> None:
        """Nothing more is sent to this peer."""
        self.num_released = self.num_sent = self.num_posted
        self.num_taken_there = max(self.num_taken_there, self.num_posted)
        self.resend_queue.clear()
        self.bytes_posted = 0
        self.down()

    # Receiving.

    def judge(self, number: int) -> int:
        if number == self.num_taken + 1:
            return NEXT
        return DUPLICATE if number <= self.num_taken else GAP

    def take(self, nbytes: int) -> int:
        """Takes the next message, and returns its number."""
        self.num_taken += 1
        self.unread_bytes += nbytes
        self.misses = False
        return self.num_taken

    def hand(self, number: int, nbytes: int, era: int, caller_acknowledges: bool) -> None:
        """The caller has this message. With `caller_acknowledges` it is not acknowledged yet."""
        if era != self.era:
            return
        self.unread_bytes -= nbytes
        self.num_handed = number
        if caller_acknowledges:
            self._unacknowledged.append(number)
        self._clear()

    def acknowledge(self, number: int) -> None:
        while self._unacknowledged and self._unacknowledged[0] <= number:
            self._unacknowledged.popleft()
        self._clear()

    def _clear(self) -> None:
        self.num_cleared = self._unacknowledged[0] - 1 if self._unacknowledged else self.num_handed

    def counts(self, has_room: bool) -> tuple[int, int, int]:
        """What headers report: acknowledged, room, taken."""
        room = self.num_taken if has_room else self.num_cleared
        return self.num_cleared, room, self.num_taken
