"""The requests of workers to servers, in every exchange that has servers."""

from gradwire.core.errors import PeerLost
from gradwire.core.node import Node

REQUEST, ANSWER = "request", "answer"  # tags

# Magic and version, kind, tensor, part, worker, since when it is there (in milliseconds), step and
# length of the payload, in 4 bytes each.
HEADER_NBYTES = 32

_NOTHING = "nothing"  # a tag that nobody sends


async def why_lost(node: Node, rank: int) -> PeerLost:
    """What to raise where nobody can go on without a worker of which it was said that it left."""
    if rank not in await node.members():
        try:
            await node.recv(rank, _NOTHING)
        except PeerLost as error:
            return error
    now = await node.now()  # it is back already: too late
    return PeerLost(rank, now, now)
