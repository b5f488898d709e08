"""Messages under way in a network with faults: lost and sent again, kept in order, cut off.

A message whose attempt is lost is sent again `timeout` after the last bit of that attempt left the
NIC. Each attempt occupies the sender's NIC and counts in the ledger; a lost one does not reach the
receiver's NIC. As over TCP, messages of one link are delivered in the order in which they were
sent: later ones that are there already wait for the one that is not.

When a worker crashes, its messages whose last bit had left its NIC by then arrive, as long as they
need not wait for one that does not. The one that was cut off frees its receiver's NIC when its last
bit is there, but messages that queue there already are not brought forward. Messages to the worker
are lost, and are not sent again.
"""

import math
from collections import defaultdict, deque
from typing import Any

import torch

from gradwire.core.key import Key
from gradwire.core.node import Tag
from gradwire.runtime.network.faults import Loss

Message = tuple[int, int, Tag, Any, int]  # from, to, tag, data, bytes
_BLOCK = 256  # draws made at once


class Parcel:
    """A message that has not been delivered."""

    __slots__ = ("arrived", "label", "left_s", "message", "num_lost", "priority", "received_s")

    def __init__(self, message: Message, label: str, num_lost: int, priority: int = 0) -> None:
        self.priority = priority
        self.message = message
        self.label = label
        self.num_lost = num_lost  # attempts that will still be lost
        self.left_s = math.inf  # when the last bit of the attempt that arrives leaves the NIC
        self.received_s = 0.0  # until when it occupies the receiver's NIC, once it is there
        self.arrived = False


class Links:
    """What is under way between any two nodes."""

    def __init__(self, num_nodes: int, loss: Loss | None, key: Key) -> None:
        self.timeout_s = 0.0 if loss is None else loss.timeout
        self._probability = 0.0 if loss is None else loss.probability
        self._key = key.child("loss")
        self._queues: defaultdict[tuple[int, int], deque[Parcel]] = defaultdict(deque)
        self._num_sent = [[0] * num_nodes for _ in range(num_nodes)]  # [src][dst]
        self._draws: dict[tuple[int, int], tuple[int, list[int]]] = {}  # the block, its draws

    def send(self, message: Message, label: str, priority: int = 0) -> Parcel:
        src, dst = message[:2]
        num_lost = self._num_lost(src, dst) if self._probability else 0
        parcel = Parcel(message, label, num_lost, priority)
        self._queues[src, dst].append(parcel)
        return parcel

    def arrive(self, parcel: Parcel) -> list[Message]:
        """A message is there. Returns those that can be delivered now."""
        parcel.arrived = True
        queue = self._queues[parcel.message[:2]]
        ready = []
        while queue and queue[0].arrived:
            ready.append(queue.popleft().message)
        return ready

    def drop(self, parcel: Parcel) -> None:
        """A message to a node that is not there."""
        self._queues[parcel.message[:2]].remove(parcel)

    def under_way(self, src: int, dst: int, tag: Tag) -> bool:
        return any(parcel.message[2] == tag for parcel in self._queues.get((src, dst), ()))

    def cut(self, rank: int, now: float) -> set[Parcel]:
        """A node crashed: forgets and returns the messages that will not arrive."""
        dropped: set[Parcel] = set()
        for (src, dst), queue in self._queues.items():
            if dst == rank:
                dropped.update(queue)
                queue.clear()
            elif src == rank:
                kept = 0
                while kept < len(queue) and queue[kept].left_s <= now:
                    kept += 1
                while len(queue) > kept:
                    dropped.add(queue.pop())
        return dropped

    def _num_lost(self, src: int, dst: int) -> int:
        """How many attempts of this link's next message are lost: k or more with p^k."""
        number = self._num_sent[src][dst]
        self._num_sent[src][dst] += 1
        block, place = divmod(number, _BLOCK)
        known = self._draws.get((src, dst))
        if known is None or known[0] != block:
            key = self._key.child(dst).private(src).at(block)
            uniform = key.uniform64(_BLOCK)
            counts = (torch.log1p(-uniform) / math.log(self._probability)).to(torch.int64)
            known = self._draws[src, dst] = block, counts.tolist()
        return known[1][place]

    def snapshot(self) -> list[list[int]]:
        """The numbers of the messages so far: between runs nothing is under way."""
        return [list(row) for row in self._num_sent]

    def restore(self, saved: list[list[int]]) -> None:
        self._num_sent = [list(row) for row in saved]

    def clear(self) -> None:
        """Forgets what is under way, as after an error."""
        self._queues.clear()
