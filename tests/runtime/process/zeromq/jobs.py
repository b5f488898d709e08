"""Jobs over ZeroMQ for tests: all nodes in one process, and a proxy that can be cut."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from time import monotonic, sleep
from typing import Any

from gradwire.runtime.process.transport import Arrival
from gradwire.runtime.zeromq import ZmqTransport

ANY = "tcp://127.0.0.1:0"


class Job:
    """Nodes by rank. Settings are those of all; `start` starts one more."""

    def __init__(self, num_workers: int, num_servers: int, **settings: Any) -> None:
        self.num_workers, self.num_servers = num_workers, num_servers
        self.settings = {"join_s": 20.0, "close_s": 2.0, **settings}
        self.nodes: dict[int, ZmqTransport] = {}
        self.all: list[ZmqTransport] = []
        self.scheduler_address = ""
        self.reached_at = ""  # where nodes reach the scheduler
        self.proxy: Proxy | None = None  # before the scheduler

    def start(self, role: str, **settings: Any) -> ZmqTransport:
        node = ZmqTransport(
            role,  # type: ignore[arg-type]
            num_workers=self.num_workers,
            num_servers=self.num_servers,
            **{"scheduler": self.reached_at, **self.settings, **settings},
        )
        self.nodes[node.rank] = node
        self.all.append(node)
        return node

    def start_all(self, **of_role: dict[str, Any]) -> None:
        bound = threading.Event()

        def on_bound(address: str) -> None:
            self.scheduler_address = address
            if self.proxy is not None:
                self.proxy.to(address)
                self.reached_at = self.proxy.address
            self.reached_at = self.reached_at or address
            bound.set()

        failures: list[BaseException] = []

        def start(role: str, **settings: Any) -> None:
            try:
                self.start(role, **settings, **of_role.get(role, {}))
            except BaseException as error:
                failures.append(error)
                bound.set()

        scheduler = {"scheduler": ANY, "on_bound": on_bound}
        threads = [threading.Thread(target=start, args=("scheduler",), kwargs=scheduler)]
        threads[0].start()
        assert bound.wait(10)
        roles = ["server"] * self.num_servers + ["worker"] * self.num_workers
        threads += [threading.Thread(target=start, args=(role,)) for role in roles]
        for thread in threads[1:]:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]

    def close(self) -> None:
        closers = [threading.Thread(target=node.close) for node in self.all]
        for closer in closers:
            closer.start()
        for closer in closers:
            closer.join()


@contextmanager
def job(
    num_workers: int, num_servers: int = 1, proxy: "Proxy | None" = None, **settings: Any
) -> Iterator[Job]:
    of_role = {role: settings.pop(role, {}) for role in ("scheduler", "server", "worker")}
    made = Job(num_workers, num_servers, **settings)
    made.proxy = proxy
    try:
        made.start_all(**of_role)
        yield made
    finally:
        made.close()


def next_of(node: ZmqTransport, *kinds: str, seconds: float = 10.0) -> Arrival:
    """The next arrival of such a kind."""
    until = monotonic() + seconds
    while monotonic() < until:
        arrival = node.next(max(0.0, until - monotonic()))
        if arrival is not None and (not kinds or arrival.kind in kinds):
            return arrival
    raise AssertionError(f"rank {node.rank} got none of {kinds}")


def crash(node: ZmqTransport) -> None:
    """As if the process were killed: nothing more is sent."""
    node._local.is_closed = True
    node._turns.stop()
    node._wire.close(0)


def wait_until(condition: Callable[[], Any], seconds: float = 10.0) -> None:
    until = monotonic() + seconds
    while not condition():
        assert monotonic() < until, "it did not happen"
        sleep(0.005)


class Proxy:
    """Hands on bytes to a port of this machine, until its connections are cut; each of them so
    many bytes per second, if that is given."""

    def __init__(self, rate: float | None = None) -> None:
        self.rate = rate
        self.num_silent = 0  # so many of the next connections hand on nothing
        self.target: tuple[str, int] | None = None
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._pairs: list[socket.socket] = []
        self.num_bytes = 0
        self._is_over = False
        threading.Thread(target=self._accept, daemon=True).start()

    def to(self, address: str) -> None:
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        self.target = (host, int(port))

    def cut(self) -> None:
        pairs, self._pairs = self._pairs, []
        for one in pairs:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def close(self) -> None:
        self._is_over = True
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        while not self._is_over:
            try:
                here, _ = self._listener.accept()
                while self.target is None:
                    sleep(0.01)
                there = socket.create_connection(self.target)
            except OSError:
                continue
            self._pairs += here, there
            if self.num_silent:
                self.num_silent -= 1
                continue
            for a, b in ((here, there), (there, here)):
                threading.Thread(target=self._hand_on, args=(a, b), daemon=True).start()

    def _hand_on(self, a: socket.socket, b: socket.socket) -> None:
        with suppress(OSError):
            while data := a.recv(1 << 16):
                if self.rate is not None:
                    sleep(len(data) / self.rate)
                b.sendall(data)
                self.num_bytes += len(data)
        for one in (a, b):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
