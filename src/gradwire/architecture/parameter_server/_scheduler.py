"""The scheduler: it keeps the membership of the workers, and notifies the servers of changes."""

from collections.abc import Sequence

from gradwire.core.node import Framed, Membership, Node
from gradwire.core.wire import HEADER_NBYTES, REQUEST

_CHANGES = "changes"


async def schedule(node: Node, servers: Sequence[int]) -> None:
    """The program of the scheduler; it never ends."""
    await node.watch(_CHANGES)
    while True:
        _, message = await node.recv_each(_CHANGES)
        assert isinstance(message, Framed)
        assert isinstance(message.header, Membership)
        for server in servers:
            await node.send_framed(server, REQUEST, message, HEADER_NBYTES, "membership")
