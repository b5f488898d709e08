"""Which rank has which role: workers first, then servers, then the scheduler.

This is the one place that says so. Engines, servers and launchers ask it.
"""

from collections.abc import Sized
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NodeLayout:
    """The nodes of a job. A job with servers has a scheduler (`num_schedulers` is 1)."""

    num_workers: int
    num_servers: int = 0
    num_schedulers: int = 0

    @classmethod
    def of(cls, size: int, num_workers: int | None = None) -> "NodeLayout":
        """So many nodes, of which the first are workers; None: all."""
        num_workers = size if num_workers is None else num_workers
        assert 1 <= num_workers <= size, f"{num_workers} workers on {size} nodes"
        return cls(num_workers, size - num_workers)

    @property
    def size(self) -> int:
        """The number of all nodes."""
        return self.num_workers + self.num_servers + self.num_schedulers

    @property
    def workers(self) -> range:
        return range(self.num_workers)

    @property
    def servers(self) -> range:
        return range(self.num_workers, self.num_workers + self.num_servers)

    @property
    def others(self) -> range:
        """The nodes that are not workers."""
        return range(self.num_workers, self.size)

    def is_worker(self, rank: int) -> bool:
        return 0 <= rank < self.num_workers

    def is_server(self, rank: int) -> bool:
        return rank in self.servers

    def check_programs(self, programs: Sized, daemons: Sized) -> None:
        """One program per worker and one daemon per other node."""
        assert len(programs) == self.num_workers, (
            f"{len(programs)} programs for {self.num_workers} workers"
        )
        num_others = len(self.others)
        assert len(daemons) == num_others, f"{len(daemons)} daemons for {num_others} other nodes"
