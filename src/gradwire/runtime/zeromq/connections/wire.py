"""All open sockets of a node: polls, reads and writes them."""

from collections.abc import Callable
from math import ceil
from typing import Any

import zmq

from gradwire.runtime.zeromq.connections.connection_limits import (
    CHECK_S,
    ConnectionLimits,
    OnChange,
    OnCut,
)
from gradwire.runtime.zeromq.connections.sockets import CONNECTED, DISCONNECTED, Connection, Sockets
from gradwire.runtime.zeromq.connections.splitting import join, split
from gradwire.runtime.zeromq.messages import NOBODY, Part

SENT, FULL, GONE = range(3)
_MAX_AT_ONCE = 32  # messages from one socket before the others have their turn
_MORE = zmq.NOBLOCK | zmq.SNDMORE

# The sender of a message (its identity, if it came to our binding socket; or the peer that we
# connected to), and its parts.
Take = Callable[[bytes | None, int, list[Any]], None]
# What happened to the connection to a peer.
Changed = Callable[[int, int], None]


class Wire:
    def __init__(self, sockets: Sockets) -> None:
        self.num_bytes_sent = 0
        self.connected: set[int] = set()  # peers
        self._sockets = sockets
        self._poller = zmq.Poller()
        self._readers: dict[Any, Callable[[], None]] = {}
        self._connections: dict[int, Connection] = {}
        self._heartbeats: dict[int, Connection] = {}  # for nothing else
        self._connected_for_heartbeats: set[int] = set()
        self._router: Any = None
        self._limits: ConnectionLimits | None = None

    def bind(
        self,
        address: str,
        *,
        max_others: int,
        is_known: Callable[[bytes], bool],
        on_change: OnChange,
        on_cut: OnCut,
    ) -> str:
        """Returns the address. Nothing is read before `serve`. See `ConnectionLimits`."""
        self._router, monitor, bound = self._sockets.bind(address)
        self._limits = limits = ConnectionLimits(
            monitor,
            int(bound.rpartition(":")[2]),
            max_others=max_others,
            has_keys=self._sockets.splits,
            is_known=is_known,
            on_change=on_change,
            on_cut=on_cut,
        )
        self.listen(monitor, limits.read_events)
        return bound

    def serve(self, take: Take) -> None:
        """Begins to read from nodes that connect to us."""
        if self._router is not None:
            self.listen(self._router, lambda: self._read(self._router, NOBODY, take))

    def connect(self, peer: int, address: str, take: Take, changed: Changed) -> None:
        """Makes a connection to this peer, in place of an earlier one."""
        self.disconnect(peer)
        connection = self._connections[peer] = self._sockets.connect(address)

        self._attend(connection, peer, self.connected, take, lambda change: changed(peer, change))

    def connect_for_heartbeats(self, peer: int, address: str, take: Take) -> None:
        """Makes a second connection, where heartbeats do not wait behind a large message."""
        connection = self._sockets.connect(address, is_for_heartbeats=True)
        self._heartbeats[peer] = connection
        self._attend(connection, peer, self._connected_for_heartbeats, take, lambda change: None)

    def disconnect(self, peer: int) -> None:
        self.connected.discard(peer)
        self._connected_for_heartbeats.discard(peer)
        for connections in (self._connections, self._heartbeats):
            connection = connections.pop(peer, None)
            if connection is not None:
                for source in (connection.socket, connection.monitor):
                    self._poller.unregister(source)
                    del self._readers[source]
                self._sockets.drop(connection)

    def listen(self, source: Any, reader: Callable[[], None]) -> None:
        self._readers[source] = reader
        self._poller.register(source, zmq.POLLIN)

    def poll(self, timeout_s: float) -> None:
        """Waits for something to read, and has it read."""
        if self._limits is not None:
            self._limits.check()
            if self._limits.has_to_check:
                timeout_s = min(timeout_s, CHECK_S)
        for source, _ in self._poller.poll(ceil(max(0.0, timeout_s) * 1000)):
            reader = self._readers.get(source)
            if reader is not None:  # it may have been closed in between
                reader()

    def put(
        self,
        identity: bytes | None,
        peer: int,
        head: bytes,
        body: Part = b"",
        payload: Part | None = None,
    ) -> int:
        """Gives a message to a socket, by identity or peer as in `Take`. It never blocks, and
        nothing waits for a connection that is not there."""
        if identity is not None:
            return self._send(self._router, identity, head, body, payload)
        if peer not in self.connected:
            return GONE
        return self._send(self._connections[peer].socket, None, head, body, payload)

    def send_heartbeat(self, peer: int, head: bytes, *, is_answered: bool = True) -> None:
        """Over the connection for heartbeats; over the other one, too, while that is not there or
        heartbeats are not answered, as it may be open and carry nothing."""
        is_there = peer in self._connected_for_heartbeats
        is_sent = is_there and self._send(self._heartbeats[peer].socket, None, head) == SENT
        if not is_sent or not is_answered:
            self.put(None, peer, head)

    def is_member(self, identity: bytes, part: Any) -> None:
        """The node that sent this part is a member."""
        if self._limits is not None:
            self._limits.is_member(identity, part)

    def close(self, linger_ms: int) -> None:
        self._sockets.close(linger_ms)

    def _attend(
        self,
        connection: Connection,
        peer: int,
        connected: set[int],
        take: Take,
        happened: Callable[[int], None],
    ) -> None:
        def watch() -> None:
            for change in connection.happened():
                if change == CONNECTED:
                    connected.add(peer)
                elif change == DISCONNECTED:
                    connected.discard(peer)
                happened(change)

        self.listen(connection.socket, lambda: self._read(connection.socket, peer, take))
        self.listen(connection.monitor, watch)

    def _send(
        self,
        socket: Any,
        identity: bytes | None,
        head: bytes,
        body: Part = b"",
        payload: Part | None = None,
    ) -> int:
        nbytes = len(head) + len(body)
        try:
            if identity is not None:
                socket.send(identity, _MORE)
                nbytes += len(identity)
            socket.send(head, _MORE)
            self._send_part(socket, body, is_last=payload is None)
            if payload is not None:
                self._send_part(socket, payload, is_last=True, copy=False)
                nbytes += len(payload)
        except zmq.Again:
            return FULL
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                return GONE
            raise
        self.num_bytes_sent += nbytes
        return SENT

    def _send_part(self, socket: Any, part: Part, *, is_last: bool, copy: bool = True) -> None:
        last = zmq.NOBLOCK if is_last else _MORE
        if not self._sockets.splits:
            socket.send(part, last, copy=copy)
            return
        frames = list(split(part))
        for frame in frames[:-1]:
            socket.send(frame, _MORE, copy=copy)
        socket.send(frames[-1], last, copy=copy)

    def _read(self, socket: Any, peer: int, take: Take) -> None:
        for _ in range(_MAX_AT_ONCE):
            try:
                parts = socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            identity = parts.pop(0).bytes if peer == NOBODY else None
            if identity is not None and self._limits is not None:
                self._limits.delivered(identity, parts)
            if self._sockets.splits:
                parts = join(parts, self._sockets.max_part_nbytes)
            take(identity, peer, parts)
            if socket.closed or not socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:
                return
