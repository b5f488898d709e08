"""Messages between scheduler, servers and workers over ZeroMQ, with members that come and go."""

from gradwire.runtime.process.zeromq.errors import JoinError as JoinError
from gradwire.runtime.process.zeromq.errors import NoMemberError as NoMemberError
from gradwire.runtime.process.zeromq.keys import JobKeys as JobKeys
from gradwire.runtime.process.zeromq.keys import load_keys as load_keys
from gradwire.runtime.process.zeromq.keys import make_keys as make_keys
from gradwire.runtime.process.zeromq.transport import ZmqTransport as ZmqTransport
