"""The byte ledger: what went over each link, and for which tensor."""

from array import array
from collections import defaultdict
from typing import Any


class Ledger:
    """Bytes and messages, counted when a message is handed to the network."""

    def __init__(self, num_nodes: int) -> None:
        self.num_nodes = num_nodes
        # By sender and receiver; arrays, to which exchanges add in C.
        self.bytes_to = [array("q", bytes(8 * num_nodes)) for _ in range(num_nodes)]
        self.messages_to = [array("q", bytes(8 * num_nodes)) for _ in range(num_nodes)]
        self.tensor_bytes: defaultdict[str, int] = defaultdict(int)

    def record(self, src: int, dst: int, nbytes: int, label: str) -> None:
        self.bytes_to[src][dst] += nbytes
        self.messages_to[src][dst] += 1
        self.tensor_bytes[label] += nbytes

    @property
    def link_bytes(self) -> list[list[int]]:
        """[src][dst]"""
        return [row.tolist() for row in self.bytes_to]

    @property
    def link_messages(self) -> list[list[int]]:
        return [row.tolist() for row in self.messages_to]

    @property
    def total_bytes(self) -> int:
        return sum(map(sum, self.bytes_to))

    @property
    def total_messages(self) -> int:
        return sum(map(sum, self.messages_to))

    def sent_by(self, rank: int) -> int:
        return sum(self.bytes_to[rank])

    def received_by(self, rank: int) -> int:
        return sum(row[rank] for row in self.bytes_to)

    @property
    def busiest_node_bytes(self) -> int:
        """Sent and received by the node that has most of it."""
        return max(self.sent_by(rank) + self.received_by(rank) for rank in range(self.num_nodes))

    def snapshot(self) -> dict[str, Any]:
        return {
            "link_bytes": self.link_bytes,
            "link_messages": self.link_messages,
            "tensor_bytes": dict(self.tensor_bytes),
        }

    def add(self, saved: dict[str, Any]) -> None:
        """What another ledger of the same nodes counted, as its snapshot has it."""
        for mine, theirs in (
            (self.bytes_to, saved["link_bytes"]),
            (self.messages_to, saved["link_messages"]),
        ):
            for row, more in zip(mine, theirs, strict=True):
                row[:] = array("q", [a + b for a, b in zip(row, more, strict=True)])
        for label, nbytes in saved["tensor_bytes"].items():
            self.tensor_bytes[label] += nbytes

    def restore(self, saved: dict[str, Any]) -> None:
        for mine, theirs in (
            (self.bytes_to, saved["link_bytes"]),
            (self.messages_to, saved["link_messages"]),
        ):
            for row, saved_row in zip(mine, theirs, strict=True):
                row[:] = array("q", saved_row)
        self.tensor_bytes = defaultdict(int, saved["tensor_bytes"])
