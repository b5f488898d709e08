"""Identities: the routing ids by which binding sockets know the connections of a node.

A node has one identity, the same for all its connections. To the scheduler it has a second
connection for heartbeats alone, so that these do not wait behind a large message. The identity of
that one differs in its first byte only, so it is known exactly as long as the node is. Identities
distinguish members; strangers are kept out by keys (keys.py).
"""

import os

from gradwire.runtime.zeromq.messages import IDENTITY_NBYTES

# First bytes. A routing id must not begin with a zero.
_NODE, _HEARTBEATS = b"\x01", b"\x02"


def make_identity() -> bytes:
    """The identity of a new process."""
    return _NODE + os.urandom(IDENTITY_NBYTES - 1)


def heartbeat_identity(identity: bytes) -> bytes:
    """The identity of the heartbeat connection of a node."""
    return _HEARTBEATS + identity[1:]


def heartbeat_owner(identity: bytes) -> bytes | None:
    """The node whose heartbeat connection this is; None: it is another connection."""
    is_for_heartbeats = identity[:1] == _HEARTBEATS and len(identity) == IDENTITY_NBYTES
    return _NODE + identity[1:] if is_for_heartbeats else None


def node_of(identity: bytes) -> bytes:
    """The node whose connection this is."""
    node = heartbeat_owner(identity)
    return identity if node is None else node
