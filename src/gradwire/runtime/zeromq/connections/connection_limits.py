"""Limits for connections whose node is not a member of the job yet: their number, and memory.

libzmq accepts every connection to a binding socket. With keys nobody gets beyond the handshake
without them, and until then a connection can hold one short frame (splitting.py). Without keys a
peer could send a message that never ends. So a connection is cut when more than 64 KiB have come
over it that were not delivered, where the system reports how much has come (Linux does).

In both cases there are at most `max_others` connections of strangers; the oldest is cut first. With
keys a connection is a stranger's until its first message, which proves that the handshake has
succeeded (libzmq's event for that does not name the connection). Without keys it is a stranger's
unless its node is a member, or has sent a valid join request and waits. Cut connections are counted
as refused, and logged once per reason and host.

The bound of memory without keys holds only while `check` is called every `CHECK_S`. libzmq's thread
continues to read while the transport does not get its turn, because the process is suspended or
other threads hold the interpreter. Until the next call each connection can then send as much as one
message may have. A smaller receive buffer of the system would not change that.

Messages name their connection by its file descriptor. The system may have given that number to a
new connection before the last message of the old one is read. Such a message can make the new
connection pass for its sender's, until the sender sends over its own new connection, or is not a
member any more.
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

from gradwire.runtime.zeromq import identities

OnChange = Callable[[bytes, bool], None]
OnCut = Callable[[str, str, str], None]
CHECK_S = 0.005
MAX_UNDELIVERED_NBYTES = 1 << 16
# tcpi_bytes_received in Linux's struct tcp_info
_RECEIVED_AT, _TCP_INFO_NBYTES = 128, 136
_UNKNOWN = -1  # no file descriptor


@dataclass
class _Connection:
    peer: tuple[Any, ...] | None  # host and port; None: it was closed at once
    delivered_nbytes: int = 0
    identity: bytes | None = None  # once a message came over it
    is_member: bool = False
    is_cut: bool = False


class ConnectionLimits:
    """Of one binding socket, whose monitor and port these are. At most `max_others` connections
    are of strangers; with keys those are the ones that have sent no message yet.

    `is_known` says whether the node with this identity is a member or waits to join. `on_change` is
    called with the identity of a node, and whether it has a new connection or has closed all that
    it had; `on_cut` with a reason (one of few), the host of the peer, and an explanation.
    """

    def __init__(
        self,
        monitor: Any,
        port: int,
        *,
        max_others: int,
        has_keys: bool,
        is_known: Callable[[bytes], bool],
        on_change: OnChange,
        on_cut: OnCut,
    ) -> None:
        self._monitor, self._port = monitor, port
        self._max_others = max_others
        self._has_keys = has_keys
        self._bounds_memory = not has_keys and sys.platform == "linux"
        self._is_known, self._on_change, self._on_cut = is_known, on_change, on_cut
        self._open: dict[int, _Connection] = {}  # by file descriptor, in order of arrival
        # With keys those that have sent no message, without keys those that are not of members.
        self._others: dict[int, _Connection] = {}
        self._checked_s = 0.0

    @property
    def has_to_check(self) -> bool:
        """Whether `check` has to be called every `CHECK_S`."""
        return self._bounds_memory and bool(self._others)

    def read_events(self) -> None:
        """Reads which connections were made and closed."""
        with suppress(zmq.Again):
            while True:
                event = recv_monitor_message(self._monitor, zmq.NOBLOCK)
                number = int(event["value"])
                if event["event"] == zmq.EVENT_ACCEPTED:
                    one = _Connection(self._with_socket(number, socket.socket.getpeername))
                    self._open[number] = self._others[number] = one
                elif event["event"] == zmq.EVENT_DISCONNECTED:
                    self._closed(number)
        for number, one in self._open.items():
            if one.is_member and not self._is_of_known(one):
                self._is_no_member(number, one)

    def delivered(self, identity: bytes, frames: list[Any]) -> None:
        """A message was delivered, with these frames after its identity."""
        number = _connection(frames[0]) if frames else _UNKNOWN
        if number not in self._open:
            self.read_events()
        one = self._open.get(number)
        if one is None:
            return
        if one.identity != identity:
            self._identify(number, one, identity)
        if self._has_keys:
            self._others.pop(number, None)
        elif not one.is_member:
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
        """Cuts the oldest connections of strangers if there are too many, and those over which too
        much has come that is no message. Call it when the messages that came have been read."""
        if len(self._others) > self._max_others:
            self._check_number()
        now = time.monotonic()
        if not self.has_to_check or now - self._checked_s < CHECK_S:
            return
        self._checked_s = now
        for number, one in list(self._others.items()):
            received = 0 if one.is_cut else self._received_nbytes(number, one)
            if received - one.delivered_nbytes > MAX_UNDELIVERED_NBYTES:
                text = f"more than {MAX_UNDELIVERED_NBYTES} bytes came that are no whole message"
                self._cut(number, one, "endless message", text)

    def _check_number(self) -> None:
        strangers = [
            (number, one)
            for number, one in self._others.items()
            if not one.is_cut and not self._is_of_known(one)
        ]
        for number, one in strangers[: max(0, len(strangers) - self._max_others)]:
            text = f"more than {self._max_others} connections are not of nodes of this job"
            self._cut(number, one, "too many connections", text)

    def _is_of_known(self, one: _Connection) -> bool:
        return one.identity is not None and self._is_known(identities.node_of(one.identity))

    def _closed(self, number: int) -> None:
        one = self._open.pop(number, None)
        self._others.pop(number, None)
        if one is not None and one.identity is not None:
            self._forget(one.identity)

    def _identify(self, number: int, one: _Connection, identity: bytes) -> None:
        """A connection has one identity. An earlier one was that of an old connection with the same
        number, whose last message was read late. An identity has one connection: an earlier one is
        closed, or its number is a stranger's now."""
        before, one.identity = one.identity, identity
        if before is not None:
            self._is_no_member(number, one)
            self._forget(before)
        for other, another in self._open.items():
            if another is not one and another.identity == identity:
                another.identity = None
                self._is_no_member(other, another)
        self._on_change(identities.node_of(identity), True)

    def _is_no_member(self, number: int, one: _Connection) -> None:
        """Counts a connection as a stranger's. Bytes that it has received so far do not count."""
        if one.is_member:
            one.is_member = False
            one.delivered_nbytes = self._received_nbytes(number, one)
        self._others[number] = one

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

    def _received_nbytes(self, number: int, one: _Connection) -> int:
        def read(found: socket.socket) -> int:
            if found.getpeername() != one.peer:
                return 0
            info = found.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_NBYTES)
            return int.from_bytes(info[_RECEIVED_AT:_TCP_INFO_NBYTES], sys.byteorder)

        return self._with_socket(number, read) or 0

    def _cut(self, number: int, one: _Connection, reason: str, text: str) -> None:
        """libzmq notices that the connection has ended, and closes it. What has not been read is
        dropped then, at both ends."""

        def end(found: socket.socket) -> bool:
            if found.getpeername() != one.peer:  # the number is that of a newer connection
                return False
            found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            found.shutdown(socket.SHUT_RDWR)
            return True

        one.is_cut = True
        if self._with_socket(number, end) and one.peer is not None:
            self._on_cut(reason, str(one.peer[0]), text)


def _connection(frame: Any) -> int:
    """The connection over which a frame came. libzmq does not know it of peers with an old version
    of ZMTP, which no node of a job has."""
    try:
        number: int = frame.get(zmq.SRCFD)
    except zmq.ZMQError:
        return _UNKNOWN
    return number
