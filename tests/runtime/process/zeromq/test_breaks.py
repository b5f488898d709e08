"""Connections that break while a message is read part by part, and those made after a break."""

import os
import subprocess
import sys
from threading import Event, Thread
from time import monotonic, sleep

import pytest
import torch
import zmq

from gradwire.runtime.zeromq.connections.sockets import Sockets
from gradwire.runtime.zeromq.connections.wire import Wire
from runtime.process.zeromq.jobs import Proxy, job, next_of, wait_until

NUM_NODES = 4
SECONDS = 6.0  # with zmq.IMMEDIATE on these sockets libzmq 4.3.5 aborted after one or two


def identity_of(node: int) -> bytes:
    return bytes([node + 1]) * 16


@pytest.mark.slow
def test_a_break_in_the_middle_of_a_message_does_not_end_the_process() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "runtime.process.zeromq.test_breaks"],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    num_messages, num_breaks = map(int, done.stdout.split())
    assert num_messages > 1000
    assert num_breaks > 20


def test_a_new_connection_that_carries_nothing_is_given_up() -> None:
    """Left to itself, ZeroMQ would wait for half a minute before it tries another one."""
    proxy = Proxy()
    server = {"on_bound": proxy.to, "advertise": proxy.address}
    try:
        with job(1, heartbeat_s=1.0, server=server) as made:
            link = made.nodes[0]._traffic.links[1]
            wait_until(lambda: link.is_up)
            proxy.num_silent = 1
            proxy.cut()
            wait_until(lambda: not (proxy.num_silent or link.is_up))
            made.nodes[0].send(1, 0, 0, torch.arange(3))
            assert next_of(made.nodes[1], seconds=15).src == 0
    finally:
        proxy.close()


def say(proxy: Proxy, is_over: Event) -> None:
    """Messages of three parts to all nodes, as fast as they go."""
    sockets = Sockets(identity_of(NUM_NODES), None, 1 << 20, 5.0)
    router, _, bound = sockets.bind("tcp://127.0.0.1:0")
    proxy.to(bound)
    while not is_over.is_set():
        for node in range(NUM_NODES):
            try:
                router.send_multipart([identity_of(node), b"head", b"body", bytes(70)], zmq.NOBLOCK)
            except zmq.Again:
                sleep(0.0002)
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:  # of who is not connected
                    raise
    sockets.close(0)


def main() -> None:
    proxy, is_over = Proxy(), Event()
    counts, breaks = [0] * NUM_NODES, [0] * NUM_NODES

    def read(node: int) -> None:
        wire = Wire(Sockets(identity_of(node), None, 1 << 20, 5.0))

        def take(identity: bytes | None, peer: int, parts: list[zmq.Frame]) -> None:
            assert [part.bytes for part in parts] == [b"head", b"body", bytes(70)]
            counts[node] += 1

        def changed(peer: int, change: int) -> None:
            breaks[node] += 1

        wire.connect(0, proxy.address, take, changed)
        while not is_over.is_set():
            wire.poll(0.05)
        wire.close(0)

    threads = [Thread(target=say, args=(proxy, is_over))]
    threads += [Thread(target=read, args=(node,)) for node in range(NUM_NODES)]
    for thread in threads:
        thread.start()
    end = monotonic() + SECONDS
    while monotonic() < end:
        sleep(0.03)
        proxy.cut()
    is_over.set()
    for thread in threads:
        thread.join()
    proxy.close()
    print(sum(counts), sum(breaks))


if __name__ == "__main__":
    main()
