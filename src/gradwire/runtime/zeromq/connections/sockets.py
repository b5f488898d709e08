"""The sockets of a node: how they are made, watched and closed, and which addresses are allowed."""

import ipaddress
import logging
import socket
from contextlib import suppress
from typing import Any

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import recv_monitor_message

from gradwire.runtime.zeromq import identities
from gradwire.runtime.zeromq.connections.splitting import FRAME_NBYTES
from gradwire.runtime.zeromq.keys import JobKeys

_log = logging.getLogger(__name__)

# Messages in the queues of one connection. Those of our own are few: see Link and Grants.
_MAX_QUEUED = 64
_CURVE_NBYTES = 256  # encryption makes a part a little longer
# Handshakes may take as long as silence, within limits; with keys a thread must have its turn.
_MIN_HANDSHAKE_S, _MIN_CURVE_HANDSHAKE_S, _MAX_HANDSHAKE_S = 1.0, 5.0, 30.0
_WATCHED = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
_ACCEPTING = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED
CONNECTED, DISCONNECTED, TURNED_AWAY = range(3)
_DOMAIN = "gradwire"


def host_of(address: str) -> str:
    scheme, _, rest = address.partition("://")
    if scheme != "tcp" or ":" not in rest:
        raise ValueError(f"{address!r} is no address; expected tcp://HOST:PORT")
    return rest.rpartition(":")[0].strip("[]")


def is_loopback(address: str) -> bool:
    host = host_of(address)
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_target(address: str) -> None:
    """Refuses an address to which no other node can connect."""
    host, port = host_of(address), address.rpartition(":")[2]
    if not host or host == "*" or not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise ValueError(f"nobody can connect to {address!r}; expected tcp://HOST:PORT")


def check_allowed(address: str, keys: JobKeys | None, insecure: bool) -> None:
    if keys is None and not insecure and not is_loopback(address):
        raise ValueError(
            f"{address} can be reached from other machines, and anybody there could read and "
            "change the model. Make keys with `gradwire ps keys FILE` and give the file to all "
            "nodes of the job, or do without them (--insecure)."
        )


def reachable(endpoint: str, scheduler: str) -> str:
    """The address that a server reports to others: not the wildcard."""
    host, port = host_of(endpoint), endpoint.rpartition(":")[2]
    if host not in ("0.0.0.0", "::", "*"):
        return endpoint
    target = host_of(scheduler)
    family = socket.getaddrinfo(target, 1, type=socket.SOCK_DGRAM)[0][0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((target, 1))  # sends nothing
        own = probe.getsockname()[0]
    return f"tcp://[{own}]:{port}" if ":" in own else f"tcp://{own}:{port}"


class Connection:
    """A socket that connects to one peer, and what happens to its connection."""

    def __init__(self, made: zmq.Socket[bytes]) -> None:
        self.socket = made
        self.monitor = made.get_monitor_socket(_WATCHED)

    def happened(self) -> list[int]:
        """Since the last call."""
        changes = []
        with suppress(zmq.Again):
            while True:
                event = recv_monitor_message(self.monitor, zmq.NOBLOCK)["event"]
                if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    changes.append(CONNECTED)
                elif event == zmq.EVENT_DISCONNECTED:
                    changes.append(DISCONNECTED)
                elif event != zmq.EVENT_MONITOR_STOPPED:
                    changes.append(TURNED_AWAY)
        return changes

    def close(self, linger_ms: int) -> None:
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close(linger_ms)


class _OnlyMembers:
    """Admits peers that have the secret key of the connecting side."""

    def __init__(self, keys: JobKeys) -> None:
        self._key = keys.connecting_public

    def callback(self, domain: str, key: bytes) -> bool:
        return bool(key == self._key)


class Sockets:
    """Makes them, all with the same limits and keys, and closes them."""

    def __init__(
        self, identity: bytes, keys: JobKeys | None, max_part_nbytes: int, heartbeat_s: float
    ) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._identity = identity
        self._keys = keys
        self.max_part_nbytes = max_part_nbytes
        self._heartbeat_s = heartbeat_s
        self._authenticator: ThreadAuthenticator | None = None
        self._binding: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None
        self._connections: list[Connection] = []

    @property
    def splits(self) -> bool:
        """Whether long parts take several frames: some peers are not authenticated yet."""
        return self._keys is not None

    def bind(self, address: str) -> tuple[zmq.Socket[bytes], Any, str]:
        """A socket for nodes that connect, a monitor of its connections, and its address."""
        made = self._make(zmq.ROUTER, address)
        made.setsockopt(zmq.ROUTER_MANDATORY, 1)
        made.setsockopt(zmq.ROUTER_HANDOVER, 1)
        if self._keys is not None:
            self._authenticator = ThreadAuthenticator(self._context, log=_silent())
            self._authenticator.start()
            self._authenticator.configure_curve_callback(
                domain=_DOMAIN, credentials_provider=_OnlyMembers(self._keys)
            )
            # Without an authenticator nobody gets in, instead of everybody.
            made.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN.encode())
            made.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
            made.setsockopt(zmq.CURVE_SERVER, 1)
            made.setsockopt(zmq.CURVE_PUBLICKEY, self._keys.binding_public)
            made.setsockopt(zmq.CURVE_SECRETKEY, self._keys.binding_secret)
        self._binding = made
        monitor = self._monitor = made.get_monitor_socket(_ACCEPTING)  # nobody connects before
        port = address.rpartition(":")[2]
        try:
            made.bind(f"tcp://{_numeric(host_of(address))}:{'*' if port == '0' else port}")
        except zmq.ZMQError as error:
            raise OSError(error.errno, f"cannot bind {address}: {error.strerror}") from error
        return made, monitor, made.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode()

    def connect(self, address: str, *, is_for_heartbeats: bool = False) -> Connection:
        made = self._make(zmq.DEALER, address)
        own = identities.heartbeat_identity(self._identity) if is_for_heartbeats else self._identity
        made.setsockopt(zmq.ROUTING_ID, own)
        # Not zmq.IMMEDIATE: when a connection breaks while a message is read part by part, libzmq
        # (4.3.5) then ends the process. That nothing waits for a connection is up to Wire.
        made.setsockopt(zmq.RECONNECT_IVL, 20)
        made.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
        if self._keys is not None:
            made.setsockopt(zmq.CURVE_SERVERKEY, self._keys.binding_public)
            made.setsockopt(zmq.CURVE_PUBLICKEY, self._keys.connecting_public)
            made.setsockopt(zmq.CURVE_SECRETKEY, self._keys.connecting_secret)
        connection = Connection(made)
        self._connections.append(connection)
        made.connect(address)
        return connection

    def drop(self, connection: Connection) -> None:
        self._connections.remove(connection)
        connection.close(0)

    def close(self, linger_ms: int) -> None:
        for connection in self._connections:
            connection.close(linger_ms)
        if self._monitor is not None and self._binding is not None:
            self._binding.disable_monitor()
            self._monitor.close(0)
        if self._binding is not None:
            self._binding.close(linger_ms)
        if self._authenticator is not None:
            self._authenticator.stop()
        # With sockets that are known nowhere else: a signal's handler raised while they were made.
        self._context.destroy(0)

    def _make(self, kind: int, address: str) -> Any:
        made = self._context.socket(kind)
        made.setsockopt(zmq.SNDHWM, _MAX_QUEUED)
        made.setsockopt(zmq.RCVHWM, _MAX_QUEUED)
        max_frame_nbytes = FRAME_NBYTES if self.splits else self.max_part_nbytes
        made.setsockopt(zmq.MAXMSGSIZE, max_frame_nbytes + _CURVE_NBYTES)
        made.setsockopt(zmq.LINGER, 0)
        made.setsockopt(zmq.IPV6, ":" in host_of(address))
        # A machine that vanished is noticed although nothing is sent to it.
        made.setsockopt(zmq.TCP_KEEPALIVE, 1)
        made.setsockopt(zmq.TCP_KEEPALIVE_IDLE, max(1, int(self._heartbeat_s)))
        made.setsockopt(zmq.TCP_KEEPALIVE_INTVL, max(1, int(self._heartbeat_s / 4)))
        made.setsockopt(zmq.TCP_KEEPALIVE_CNT, 4)
        # So is one to which something was sent: left to itself, TCP tries that for 15 minutes.
        made.setsockopt(zmq.TCP_MAXRT, max(1000, int(2000 * self._heartbeat_s)))
        # And so is a new connection that carries nothing: left to itself, ZeroMQ waits for 30 s.
        least_s = _MIN_HANDSHAKE_S if self._keys is None else _MIN_CURVE_HANDSHAKE_S
        limit_s = min(max(least_s, self._heartbeat_s), _MAX_HANDSHAKE_S)
        made.setsockopt(zmq.HANDSHAKE_IVL, int(1000 * limit_s))
        return made


def _numeric(host: str) -> str:
    """ZeroMQ binds no names."""
    if host == "*":
        return host
    number = str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    return f"[{number}]" if ":" in number else number


def _silent() -> logging.Logger:
    """Of the authenticator, which logs every connection."""
    log = logging.getLogger(f"{__name__}.authenticator")
    log.setLevel(logging.ERROR)
    return log
