"""Messages that have come to one rank and that no program has read yet, counted in bytes."""

import warnings
from collections import Counter, deque
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

from gradwire.core.errors import GradwireWarning
from gradwire.core.node import Tag
from gradwire.runtime.interpreter.mailboxes import Mailboxes
from gradwire.runtime.process.frames import tag_hash
from gradwire.runtime.process.transport import message_nbytes


class Unread:
    """Of one rank, by sender and hash of the tag. `is_full` beyond `max_nbytes`."""

    def __init__(self, rank: int, num_workers: int, mailboxes: Mailboxes, max_nbytes: int) -> None:
        self.nbytes = 0
        self.dropped: Counter[int] = Counter()  # messages that nobody would have read, by sender
        self._rank, self._num_workers, self._max_nbytes = rank, num_workers, max_nbytes
        self._mailboxes = mailboxes
        self.inbox = mailboxes.inbox[0]
        self._order = count()
        self._tags: frozenset[int] | None = None  # what workers may send; None: anything

    @property
    def is_full(self) -> bool:
        return self.nbytes > self._max_nbytes

    def put(self, src: int, tag: int, message: Any) -> None:
        self.inbox.setdefault((src, tag), deque()).append((next(self._order), message))
        self.nbytes += message_nbytes(message)

    def take(self, src: int, tag: int) -> tuple[int, Any] | None:
        """The oldest message of this sender and tag, if there is one, and its sender."""
        return self._taken(self._mailboxes.take(0, src, tag))

    def take_any(self, tag: int) -> tuple[int, Any] | None:
        return self._taken(self._mailboxes.take_any(0, tag))

    def _taken(self, found: tuple[int, Any] | None) -> tuple[int, Any] | None:
        if found is not None:
            self.nbytes -= message_nbytes(found[1])
        return found

    @contextmanager
    def only(self, tags: Collection[Tag] | None) -> Iterator[None]:
        """For a while workers may send messages with these tags only. Others, which no program ever
        asks for, are dropped: they would fill the memory, and the rank would never be at rest."""
        self._tags = None if tags is None else frozenset(map(tag_hash, tags))
        for src, tag in [key for key in self.inbox if self._is_unwanted(*key)]:
            while self.take(src, tag) is not None:  # type: ignore[arg-type]
                self._drop(src)
        try:
            yield
        finally:
            self._tags = None

    def drops(self, src: int, tag: int) -> bool:
        """Whether a message is dropped that comes now."""
        if not self._is_unwanted(src, tag):
            return False
        self._drop(src)
        return True

    def _is_unwanted(self, src: int, tag: Tag) -> bool:
        is_other = self._tags is not None and tag not in self._tags
        return is_other and src < self._num_workers and src != self._rank

    def _drop(self, src: int) -> None:
        self.dropped[src] += 1
        if self.dropped[src] == 1:
            text = f"rank {src} sent rank {self._rank} a message that nobody reads; it was dropped"
            warnings.warn(f"{text}, and so are others", GradwireWarning, stacklevel=2)
