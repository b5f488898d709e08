"""Which rank has which role: workers first, then servers, then the scheduler.

This is the one place that says so. Engines, servers, transports and launchers ask it.
"""

from collections.abc import Sized
from dataclasses import dataclass
from typing import Literal

RoleName = Literal["worker", "server", "scheduler"]


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

    @property
    def scheduler(self) -> int:
        """The rank of the scheduler, which is the last one."""
        return self.size - 1

    @property
    def coordinator(self) -> int:
        """The rank that keeps the record of a run: the scheduler, or rank 0 if there is none."""
        return self.scheduler if self.others else 0

    def is_worker(self, rank: int) -> bool:
        return 0 <= rank < self.num_workers

    def is_server(self, rank: int) -> bool:
        return rank in self.servers

    def role_of(self, rank: int) -> RoleName:
        if self.is_worker(rank):
            return "worker"
        return "server" if self.is_server(rank) else "scheduler"

    def ranks_of(self, role: RoleName) -> range:
        if role == "worker":
            return self.workers
        return self.servers if role == "server" else range(self.servers.stop, self.size)

    def number_of(self, rank: int) -> int:
        """The number of a rank among the nodes of its role, from 0."""
        return rank - self.ranks_of(self.role_of(rank)).start

    def name_of(self, rank: int) -> str:
        """What messages call a node."""
        if not self.others:
            return f"rank {rank}"
        role = self.role_of(rank)
        return "the scheduler" if role == "scheduler" else f"{role} {self.number_of(rank)}"

    def check_programs(self, programs: Sized, daemons: Sized) -> None:
        """One program per worker and one daemon per other node."""
        assert len(programs) == self.num_workers, (
            f"{len(programs)} programs for {self.num_workers} workers"
        )
        num_others = len(self.others)
        assert len(daemons) == num_others, f"{len(daemons)} daemons for {num_others} other nodes"
