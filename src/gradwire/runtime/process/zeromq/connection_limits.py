"""What connections may cost before their node is a member of the job: their number, and memory.

libzmq accepts whoever connects to a binding socket. With keys nobody gets beyond the handshake
without them, and what a connection can hold until then is one short frame (splitting.py). Without
keys a peer could send a message that never ends. So what has come over a connection and was not
delivered is bounded, as far as the system tells how much that is (Linux does). In both cases there
are only so many connections of nodes that are not members; the oldest gives way.
"""

import os
import socket
import struct
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from gradwire.runtime.process.zeromq import identities

OnChange = Callable[[bytes, bool], None]
CHECK_S = 0.005
MAX_UNDELIVERED_NBYTES = 1 << 16
# tcpi_bytes_received in Linux's struct tcp_info
_RECEIVED_AT, _TCP_INFO_NBYTES = 128, 136
_UNKNOWN = -1  # no file descriptor


@dataclass
class _Connection:
    delivered_nbytes: int = 0
    identity: bytes | None = None  # once a message came over it
    is_member: bool = False
    is_cut: bool = False


class ConnectionLimits:
    """Of one binding socket, whose monitor and port these are. At most `max_others` connections
    are of nodes that are not members.

    `on_change` is called with the identity of a node, and whether it has a new connection or has
    closed all that it had.
    """

    def __init__(
        self,
        monitor: Any,
        port: int,
        *,
        max_others: int,
        bounds_memory: bool,
        on_change: OnChange,
    ) -> None:
        self.num_cut = 0
        self._monitor, self._port = monitor, port
        self._max_others = max_others
        self._bounds_memory = bounds_memory and sys.platform == "linux"
        self._on_change = on_change
        self._open: dict[int, _Connection] = {}  # by file descriptor, in order of arrival
        self._others: dict[int, _Connection] = {}  # those that are not of members
        self._checked_s = 0.0

    @property
    def has_to_check(self) -> bool:
        """Whether `check` has to be called every `CHECK_S`."""
        return self._bounds_memory and bool(self._others)

    def read_events(self) -> None:
        """Who has connected, and whose connection is closed."""
        with suppress(zmq.Again):
            while True:
                event = recv_monitor_message(self._monitor, zmq.NOBLOCK)
                number = int(event["value"])
                if event["event"] == zmq.EVENT_ACCEPTED:
                    self._open[number] = self._others[number] = _Connection()
                elif event["event"] == zmq.EVENT_DISCONNECTED:
                    self._closed(number)
        others = [number for number, one in self._others.items() if not one.is_cut]
        for number in others[: max(0, len(others) - self._max_others)]:
            self._cut(number)

    def delivered(self, identity: bytes, frames: list[Any]) -> None:
        """A message came, with these frames after its identity."""
        number = _connection(frames[0]) if frames else _UNKNOWN
        if number not in self._open:
            self.read_events()
        one = self._open.get(number)
        if one is None:
            return
        if one.identity != identity:
            self._identify(number, one, identity)
        if not one.is_member:
            # As ZMTP frames: flags, and a length of one or eight bytes.
            one.delivered_nbytes += sum(len(f) + (2 if len(f) < 256 else 9) for f in frames)

    def is_member(self, identity: bytes, frame: Any) -> None:
        """The node that sent this message is a member."""
        number = _connection(frame)
        one = self._others.get(number)
        if one is not None and one.identity == identity:
            one.is_member = True
            del self._others[number]

    def check(self) -> None:
        """Cuts connections over which too much has come that is no message."""
        now = time.monotonic()
        if not self.has_to_check or now - self._checked_s < CHECK_S:
            return
        self._checked_s = now
        for number, one in list(self._others.items()):
            received = 0 if one.is_cut else self._received_nbytes(number)
            if received - one.delivered_nbytes > MAX_UNDELIVERED_NBYTES:
                self._cut(number)

    def _closed(self, number: int) -> None:
        one = self._open.pop(number, None)
        self._others.pop(number, None)
        if one is not None and one.identity is not None:
            self._forget(one.identity)

    def _identify(self, number: int, one: _Connection, identity: bytes) -> None:
        """A connection has one identity. If there was another one, that was of a message of an
        earlier connection with the same number, which was read too late."""
        before, one.identity = one.identity, identity
        if before is not None:
            one.is_member = False
            self._others[number] = one
            self._forget(before)
        self._on_change(identities.node_of(identity), True)

    def _forget(self, identity: bytes) -> None:
        """This node may have closed its last connection."""
        node = identities.node_of(identity)
        rest = (one.identity for one in self._open.values() if one.identity is not None)
        if node not in map(identities.node_of, rest):
            self._on_change(node, False)

    def _with_socket(self, number: int, use: Callable[[socket.socket], Any]) -> Any:
        """Of a connection to our port. libzmq may have closed it already, and the number may be
        that of something else."""
        with suppress(OSError), socket.socket(fileno=os.dup(number)) as found:
            if found.getsockname()[1] == self._port and found.getpeername():
                return use(found)
        return None

    def _received_nbytes(self, number: int) -> int:
        def read(found: socket.socket) -> int:
            info = found.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_NBYTES)
            return int.from_bytes(info[_RECEIVED_AT:_TCP_INFO_NBYTES], sys.byteorder)

        return self._with_socket(number, read) or 0

    def _cut(self, number: int) -> None:
        """libzmq notices that the connection has ended, and closes it. What has not been read is
        dropped then, at both ends."""

        def end(found: socket.socket) -> None:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            found.shutdown(socket.SHUT_RDWR)

        self._open[number].is_cut = True
        self.num_cut += 1
        self._with_socket(number, end)


def _connection(frame: Any) -> int:
    """Over which a frame came. libzmq does not know it of peers that speak an old version of ZMTP,
    which no node of a job does."""
    try:
        number: int = frame.get(zmq.SRCFD)
    except zmq.ZMQError:
        return _UNKNOWN
    return number
