"""Messages between scheduler, servers and workers over ZeroMQ, with members that come and go."""

from gradwire.runtime.zeromq.errors import JoinError as JoinError
from gradwire.runtime.zeromq.errors import NoMemberError as NoMemberError
from gradwire.runtime.zeromq.keys import JobKeys as JobKeys
from gradwire.runtime.zeromq.keys import load_keys as load_keys
from gradwire.runtime.zeromq.keys import make_keys as make_keys
from gradwire.runtime.zeromq.transport import ZmqTransport as ZmqTransport
