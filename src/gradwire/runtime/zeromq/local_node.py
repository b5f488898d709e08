"""Role, rank and incarnation of this node."""

from dataclasses import dataclass

from gradwire.core.layout import NodeLayout
from gradwire.runtime.zeromq.messages import (
    NOBODY,
    ROLES,
    SCHEDULER,
    SERVER,
    WORKER,
    Header,
)


@dataclass
class LocalNode:
    """This node in the layout of its job."""

    role: int
    layout: NodeLayout
    identity: bytes  # of this process: the routing id of its connections
    job: bytes  # the hash that all messages carry
    rank: int = NOBODY
    incarnation: float = 0.0  # when it joined, on the clock of the scheduler; 0: at the start
    is_closed: bool = False

    @property
    def size(self) -> int:
        return self.layout.size

    @property
    def scheduler(self) -> int:
        return self.layout.scheduler

    @property
    def role_name(self) -> str:
        return ROLES[self.role]

    @property
    def is_scheduler(self) -> bool:
        return self.role == SCHEDULER

    @property
    def is_server(self) -> bool:
        return self.role == SERVER

    @property
    def is_worker(self) -> bool:
        return self.role == WORKER

    def header(self, kind: int, dst: int = NOBODY, code: int = 0) -> bytes:
        """The header of a message that belongs to no link."""
        return Header(kind, self.job, self.rank, dst, code=code).pack()
