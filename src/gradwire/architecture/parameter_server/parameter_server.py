"""The parameter server (Li et al. 2014): workers exchange messages with servers only.

Nodes have three roles. Workers compute. Each of `servers` holds an equal share of the flat
parameter vector, or adds up that share of what workers send. One scheduler keeps the membership and
notifies the servers when a worker is lost or joins.

The synchronization determines which nodes hold the model. Those that need a mean (bsp, localsgd,
...) get it: workers send shards, servers average them and answer with the mean, and every worker
steps its own optimizer. Those in which workers push and pull on their own (asp, ssp, ...) leave
model and optimizer to the servers. `optimizer="server"` makes bsp do so too.

All bytes of n workers pass m servers, whose network cards are the bottleneck: with latency a and
bandwidth B the mean of a vector of s bytes takes 2(a + n s / (m B)) from when all workers have it,
where m divides n (and s counts a header of 32 bytes for each shard).

Compressed gradients are decoded by the servers, which answer with dense vectors unless configured
answers="compressed". Then a mean is encoded again with an error feedback of the server's own (as in
DoubleSqueeze, Tang et al. 2019), and a model as its change relative to what the worker knows, so
that what one answer loses is in the next.

Use it where workers differ in speed or join and leave during the run: no other architecture
supports that with one common model. Where all are equally fast, an all-reduce spreads the same
bytes over all nodes.
"""

from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from gradwire.architecture.parameter_server._collective import (
    ServerGroup,
    forget_members,
    serve_collectives,
)
from gradwire.architecture.parameter_server._scheduler import schedule
from gradwire.core.group import Group
from gradwire.core.limits import Limits
from gradwire.core.node import Node
from gradwire.core.protocols import Ability, Architecture
from gradwire.core.routes import ONE_WAY

MAX_SERVERS = 1024


@dataclass(frozen=True, repr=False)
class ParameterServer(Architecture):
    """Workers send to servers, which average or hold the model."""

    servers: int = 1
    optimizer: Literal["auto", "worker", "server"] = "auto"
    answers: Literal["dense", "compressed"] = "dense"

    examples = (
        "parameter_server",
        "parameter_server(2)",
        'parameter_server(2, optimizer="server")',
        'parameter_server(answers="compressed")',
    )
    short_examples = ("parameter_server", "parameter_server(2)")
    known_as = ("ps", "server", "servers")
    paper = "Li et al. 2014, Scaling distributed machine learning with the parameter server"

    def __post_init__(self) -> None:
        if self.servers < 1:
            raise ValueError(f"parameter_server: servers must be at least 1, got {self.servers}")
        if self.servers > MAX_SERVERS:
            raise ValueError(
                f"parameter_server: servers must be at most {MAX_SERVERS}, got {self.servers}"
            )

    @property
    def offers(self) -> tuple[Ability, ...]:
        if self.optimizer == "worker":
            return ("mean",)
        if self.optimizer == "server":
            return ("push_pull",)
        return ("mean", "push_pull")

    @property
    def num_servers(self) -> int:
        return self.servers

    @property
    def num_others(self) -> int:
        return self.servers + 1  # the scheduler is the last

    @property
    def compresses_answers(self) -> bool:
        return self.answers == "compressed"

    def group(self, node: Node, label: str, members: Sequence[int] | None = None) -> Group:
        route = "scatter" if self.compresses_answers else ONE_WAY
        return ServerGroup(node, label, route, members, self.servers)

    def daemon(
        self, node: Node, keep: dict[Any, Any], limits: Limits | None = None
    ) -> Coroutine[Any, Any, None]:
        layout = self.layout(node.size)
        if node.rank == layout.scheduler:
            return schedule(node, layout.servers)
        return serve_collectives(node, self.servers, keep, limits)

    def forget_members(self, keep: dict[Any, Any]) -> None:
        forget_members(keep)
