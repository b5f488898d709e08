"""The resend queue of a durable server: what it sent and its receivers may not have.

It is part of a state, and sent again after a restart. Not after each message, but when it has
doubled in messages or bytes, it asks the transport how many are outstanding.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from torch import Tensor

from gradwire.core.node import Framed
from gradwire.runtime.process.frames import Headers

# Job, tag, whether it is framed, header, data. The header is text, as weights_only has no bytes.
PackedMessage = tuple[int, int, bool, str, Tensor | None]
_MIN_SENT = 16  # messages before it asks which were received
_MIN_NBYTES = 1 << 24  # so many bytes in all: a message may be a whole model


class QueuedMessage(NamedTuple):
    dst: int
    job: int
    tag: int
    message: Any


class ResendQueue:
    """By receiver. `outstanding()` returns how many messages each may not have: the last ones."""

    def __init__(self, headers: Headers, outstanding: Callable[[], dict[int, int]]) -> None:
        self._headers = headers
        self._outstanding = outstanding
        self._sent: defaultdict[int, deque[PackedMessage]] = defaultdict(deque)
        self._num_outstanding: Counter[int] = Counter()  # when it last asked
        self._nbytes = self._nbytes_then = 0  # in the queue now, and when it last asked

    def add(self, dst: int, job: int, tag: int, message: Any) -> None:
        is_framed = isinstance(message, Framed)
        data = message.data if is_framed else message
        header = self._headers.encode(message.header) if is_framed else b""
        one: PackedMessage = (job, tag, is_framed, header.decode("latin-1"), data)
        self._sent[dst].append(one)
        self._nbytes += _nbytes(one)
        are_many = len(self._sent[dst]) >= 2 * max(_MIN_SENT, self._num_outstanding[dst])
        if are_many or self._nbytes >= max(_MIN_NBYTES, 2 * self._nbytes_then):
            self.forget_received()

    def drop(self, dst: int) -> None:
        """The receiver is gone."""
        self._nbytes -= sum(map(_nbytes, self._sent.pop(dst, ())))

    def forget_received(self) -> None:
        self._num_outstanding = Counter(self._outstanding())
        for dst, sent in self._sent.items():
            while len(sent) > self._num_outstanding[dst]:
                self._nbytes -= _nbytes(sent.popleft())
        self._nbytes_then = self._nbytes

    def num_to(self, dst: int) -> int:
        return len(self._sent[dst])

    def packed(self, receivers: Iterable[int]) -> list[tuple[int, PackedMessage]]:
        """What these receivers may not have, for a state."""
        return [(dst, one) for dst in receivers for one in self._sent[dst]]

    def unpacked(self, packed: list[tuple[int, PackedMessage]]) -> Iterator[QueuedMessage]:
        """What was packed, to be sent again; it is not in this queue unless it is added."""
        for dst, (job, tag, is_framed, header, data) in packed:
            message: Any = data
            if is_framed:
                message = Framed(self._headers.decode(header.encode("latin-1")), data)
            yield QueuedMessage(dst, job, tag, message)


def _nbytes(sent: PackedMessage) -> int:
    *_, header, data = sent
    return len(header) + (0 if data is None else data.nbytes)
