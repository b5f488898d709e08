"""Messages between scheduler, servers and workers over ZeroMQ; nodes may join and leave.

Promises: messages between two nodes arrive once and in order; lost nodes are reported to all;
memory is bounded; messages of strangers are refused. A lost scheduler ends the job.
Open first: transport.py (the interface, and how the parts fit), then links/link.py and
membership/membership_list.py (the protocol, without sockets), messages.py (the bytes).
"""

from gradwire.runtime.zeromq.errors import JoinError as JoinError
from gradwire.runtime.zeromq.errors import NoMemberError as NoMemberError
from gradwire.runtime.zeromq.keys import JobKeys as JobKeys
from gradwire.runtime.zeromq.keys import load_keys as load_keys
from gradwire.runtime.zeromq.keys import make_keys as make_keys
from gradwire.runtime.zeromq.transport import ZmqTransport as ZmqTransport
