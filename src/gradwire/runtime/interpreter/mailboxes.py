"""Messages that nobody has read, and programs that wait for one that is not there."""

from collections import deque
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

from gradwire.core.node import Tag, Task


class Mailboxes:
    """Of each node: what it has received, and who waits there. Engines look in directly."""

    __slots__ = ("inbox", "waiting", "waiting_any")

    def __init__(self, num_nodes: int) -> None:
        # Messages with the order of their arrival, by sender and tag.
        self.inbox: list[dict[tuple[int, Tag], deque[tuple[int, Any]]]]
        self.inbox = [{} for _ in range(num_nodes)]
        self.waiting: list[dict[tuple[int, Tag], Task[Any]]] = [{} for _ in range(num_nodes)]
        self.waiting_any: list[dict[Tag, Task[Any]]] = [{} for _ in range(num_nodes)]

    def take_any(self, node: int, tag: Tag) -> tuple[int, Any] | None:
        """The message that has waited longest, if there is one, and its sender."""
        inbox = self.inbox[node]
        found = min(((box[0][0], key) for key, box in inbox.items() if key[1] == tag), default=None)
        if found is None:
            return None
        return self.take(node, *found[1])

    def take(self, node: int, src: int, tag: Tag) -> tuple[int, Any] | None:
        """The oldest message of this sender and tag, if there is one, and its sender."""
        inbox, key = self.inbox[node], (src, tag)
        box = inbox.get(key)
        if box is None:
            return None
        data = box.popleft()[1]
        if not box:
            del inbox[key]
        return src, data

    def waiting_for(self, src: int) -> list[Task[Any]]:
        """The programs that wait for a message from this node."""
        return [
            task
            for waiting in self.waiting
            for (sender, _), task in waiting.items()
            if sender == src
        ]

    def snapshot(self) -> list[tuple[int, int, Tag, Any]]:
        """What has not been read, in order of arrival: to whom, from whom, tag and data."""
        unread = [
            (order, (node, src, tag, data))
            for node, inbox in enumerate(self.inbox)
            for (src, tag), box in inbox.items()
            for order, data in box
        ]
        return [message for _, message in sorted(unread, key=itemgetter(0))]

    def restore(self, saved: Sequence[tuple[int, int, Tag, Any]]) -> None:
        for order, (node, src, tag, data) in enumerate(saved, -len(saved)):  # before all others
            self.inbox[node].setdefault((src, tag), deque()).append((order, data))

    def empty(self, node: int) -> None:
        """A node crashed: what it had not read is lost."""
        self.inbox[node].clear()
        self.waiting[node].clear()
        self.waiting_any[node].clear()

    def dismiss(self) -> None:
        """Nobody waits any more; messages stay for the next run."""
        for waiting in self.waiting:
            waiting.clear()
        for waiting_any in self.waiting_any:
            waiting_any.clear()
