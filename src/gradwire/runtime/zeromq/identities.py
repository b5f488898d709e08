"""How a binding socket knows who speaks: the routing ids of the connections of a node.

A node has one of its own, the same at all that it connects to. To the scheduler it has a second
connection, for its beats alone, lest they wait behind a message that takes long. The id of that
one is the node's own but for the first byte, so it is known as long as the node is, and no longer.
Ids tell members apart; it is the keys that keep others out (keys.py).
"""

import os

from gradwire.runtime.zeromq.messages import IDENTITY_NBYTES

# First bytes. A routing id must not begin with a zero.
_NODE, _BEATS = b"\x01", b"\x02"


def make_identity() -> bytes:
    """Of a new process."""
    return _NODE + os.urandom(IDENTITY_NBYTES - 1)


def for_beats(identity: bytes) -> bytes:
    """Of the connection for the beats of a node."""
    return _BEATS + identity[1:]


def whose_beats(identity: bytes) -> bytes | None:
    """The node whose beats come with this one; None: it is not for beats."""
    is_for_beats = identity[:1] == _BEATS and len(identity) == IDENTITY_NBYTES
    return _NODE + identity[1:] if is_for_beats else None


def node_of(identity: bytes) -> bytes:
    """The node whose connection this is, for beats or for all else."""
    node = whose_beats(identity)
    return identity if node is None else node
