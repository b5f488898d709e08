"""Messages that no program has read, and the programs that wait for one."""

from collections import deque
from collections.abc import Iterator
from itertools import count
from typing import Any

from gradwire.core.node import RunningProgram, Tag

Key = tuple[int, Tag]  # sender and tag


class Mailbox:
    """The mailbox of one node."""

    def __init__(self) -> None:
        self.inbox: dict[Key, deque[tuple[int, Any]]] = {}  # with the order of arrival
        self.waiting: dict[Key, RunningProgram[Any]] = {}
        self.waiting_any: dict[Tag, RunningProgram[Any]] = {}
        self._numbers = count()

    def put(self, src: int, tag: Tag, message: Any) -> None:
        self.inbox.setdefault((src, tag), deque()).append((next(self._numbers), message))

    def take(self, src: int, tag: Tag) -> tuple[int, Any] | None:
        """The oldest message of this sender and tag, if there is one, and its sender."""
        key = (src, tag)
        box = self.inbox.get(key)
        if box is None:
            return None
        message = box.popleft()[1]
        if not box:
            del self.inbox[key]
        return src, message

    def take_any(self, tag: Tag) -> tuple[int, Any] | None:
        """The oldest message with this tag, if there is one, and its sender."""
        boxes = self.inbox.items()
        oldest = min(((box[0][0], key) for key, box in boxes if key[1] == tag), default=None)
        return None if oldest is None else self.take(*oldest[1])

    def unread(self) -> Iterator[tuple[int, Tag, Any]]:
        """All messages in order of arrival: sender, tag, message."""
        found = [
            (number, src, tag, message)
            for (src, tag), box in self.inbox.items()
            for number, message in box
        ]
        for _, src, tag, message in sorted(found, key=lambda one: one[0]):
            yield src, tag, message

    def clear(self) -> None:
        """The node crashed: what it had not read is lost."""
        self.inbox.clear()
        self.stop_waiting()

    def stop_waiting(self) -> None:
        """No program waits any more; messages stay for the next run."""
        self.waiting.clear()
        self.waiting_any.clear()
