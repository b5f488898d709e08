"""The mailbox of one real process: it counts bytes, and drops messages that no program reads."""

import warnings
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from gradwire.core.errors import GradwireWarning
from gradwire.core.layout import NodeLayout
from gradwire.core.node import Tag
from gradwire.runtime.interpreter.mailboxes import Mailbox
from gradwire.runtime.process.frames import tag_hash
from gradwire.runtime.process.transport import message_nbytes


class UnreadMessages(Mailbox):
    """The messages of one rank, by sender and hash of the tag. `is_full` beyond `max_nbytes`."""

    def __init__(self, rank: int, layout: NodeLayout, max_nbytes: int) -> None:
        super().__init__()
        self.nbytes = 0
        self.dropped: Counter[int] = Counter()  # messages that were dropped, by sender
        self._rank, self._layout, self._max_nbytes = rank, layout, max_nbytes
        self._tags: frozenset[int] | None = None  # what workers may send; None: anything

    @property
    def is_full(self) -> bool:
        return self.nbytes > self._max_nbytes

    def put(self, src: int, tag: Tag, message: Any) -> None:
        super().put(src, tag, message)
        self.nbytes += message_nbytes(message)

    def take(self, src: int, tag: Tag) -> tuple[int, Any] | None:
        found = super().take(src, tag)
        if found is not None:
            self.nbytes -= message_nbytes(found[1])
        return found

    @contextmanager
    def only(self, tags: Collection[Tag] | None) -> Iterator[None]:
        """For a while, accepts messages of workers with these tags only.

        Others are dropped: no program ever asks for them, they would fill the memory, and the rank
        would never be at rest.
        """
        self._tags = None if tags is None else frozenset(map(tag_hash, tags))
        for src, tag in [key for key in self.inbox if self._is_unwanted(*key)]:
            while self.take(src, tag) is not None:
                self._drop(src)
        try:
            yield
        finally:
            self._tags = None

    def drops(self, src: int, tag: int) -> bool:
        """Whether a message that comes now is dropped."""
        if not self._is_unwanted(src, tag):
            return False
        self._drop(src)
        return True

    def _is_unwanted(self, src: int, tag: Tag) -> bool:
        is_other = self._tags is not None and tag not in self._tags
        return is_other and self._layout.is_worker(src) and src != self._rank

    def _drop(self, src: int) -> None:
        self.dropped[src] += 1
        if self.dropped[src] == 1:
            text = (
                f"rank {src} sent rank {self._rank} a message that no program reads; it was dropped"
            )
            warnings.warn(f"{text}, and so are others", GradwireWarning, stacklevel=2)
