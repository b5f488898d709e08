"""The byte ledger: what went over each link, and for which tensor."""

from collections import defaultdict
from typing import Any


class Ledger:
    """Bytes and messages, counted when a message is handed to the network."""

    def __init__(self, num_nodes: int) -> None:
        self.num_nodes = num_nodes
        self.link_bytes = [[0] * num_nodes for _ in range(num_nodes)]  # [src][dst]
        self.link_messages = [[0] * num_nodes for _ in range(num_nodes)]
        self.tensor_bytes: defaultdict[str, int] = defaultdict(int)

    def record(self, src: int, dst: int, nbytes: int, label: str) -> None:
        self.link_bytes[src][dst] += nbytes
        self.link_messages[src][dst] += 1
        self.tensor_bytes[label] += nbytes

    @property
    def total_bytes(self) -> int:
        return sum(map(sum, self.link_bytes))

    @property
    def total_messages(self) -> int:
        return sum(map(sum, self.link_messages))

    def sent_by(self, rank: int) -> int:
        return sum(self.link_bytes[rank])

    def received_by(self, rank: int) -> int:
        return sum(row[rank] for row in self.link_bytes)

    @property
    def busiest_node_bytes(self) -> int:
        """Sent and received by the node that has most of it."""
        return max(self.sent_by(rank) + self.received_by(rank) for rank in range(self.num_nodes))

    def snapshot(self) -> dict[str, Any]:
        return {
            "link_bytes": [list(row) for row in self.link_bytes],
            "link_messages": [list(row) for row in self.link_messages],
            "tensor_bytes": dict(self.tensor_bytes),
        }

    def add(self, saved: dict[str, Any]) -> None:
        """What another ledger of the same nodes counted, as its snapshot has it."""
        for mine, theirs in (
            (self.link_bytes, saved["link_bytes"]),
            (self.link_messages, saved["link_messages"]),
        ):
            for row, more in zip(mine, theirs, strict=True):
                row[:] = [a + b for a, b in zip(row, more, strict=True)]
        for label, nbytes in saved["tensor_bytes"].items():
            self.tensor_bytes[label] += nbytes

    def restore(self, saved: dict[str, Any]) -> None:
        self.link_bytes = [list(row) for row in saved["link_bytes"]]
        self.link_messages = [list(row) for row in saved["link_messages"]]
        self.tensor_bytes = defaultdict(int, saved["tensor_bytes"])
