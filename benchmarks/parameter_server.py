"""How fast do workers and a server talk over ZeroMQ?

One process each for the scheduler, the server and the workers; what the server does is to answer a
push with as many bytes. Bytes are counted both ways, without headers.

- default: 3 workers push and pull 10 MB on loopback, against bare DEALER and ROUTER sockets in
  turns; and the round trip of 4 KB.
- `--shaped 100`: the server on a host of its own whose link carries 100 Mbit/s each way
  (shaped.py); 3 workers at once push, pull, and do both; the share of the line, with few large
  messages at a time and with all at once. Needs to be root.
- `--slow-server SECONDS --num-workers 8`: the server takes a while for each message; the memory of
  all must not grow.

Answer: 2.0 to 2.1 GB/s, 0.84 of bare sockets, and 0.30 ms (bare 0.06). On the shaped link one large
message at a time gives 0.95 of the line for pushes, 0.94 for pulls and 0.91 for both at once;
without limit it is 0.87, 0.83 and 0.62. With a server that takes 50 ms per message and 8 workers
memory stays the same from the third second on. 2-core AMD EPYC virtual machine, pyzmq 27.3.
"""

import argparse
import multiprocessing as mp
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import torch
import zmq

from gradwire.runtime.process.transport import ARRIVED, GOODBYE
from gradwire.runtime.zeromq import ZmqTransport
from shaped import Host, inside, shaped

SMALL, LARGE = 4_000, 10_000_000
BOTH, PUSH, PULL = range(3)  # which way the bytes go


def rss_mb(pid: int | str = "self") -> float:
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


# The nodes. Each has a pipe to the one that measures.


def scheduler(pipe: Connection, settings: dict[str, Any]) -> None:
    node = ZmqTransport("scheduler", on_bound=pipe.send, **settings)
    while node.next(None) is not None:
        if not node._scheduler_view.membership.present_ranks():
            break
    node.close()


def server(pipe: Connection, settings: dict[str, Any], slow_s: float) -> None:
    torch.set_num_threads(1)
    node = ZmqTransport("server", **settings)
    num_left = 0
    while num_left < settings["num_workers"]:
        arrival = node.next(None)
        assert arrival is not None
        if arrival.kind == ARRIVED:
            if slow_s:
                time.sleep(slow_s)
            answer = arrival.message
            if arrival.tag == PUSH:
                answer = answer[:8].clone()
            elif arrival.tag == PULL:
                answer = torch.ones(int(answer.view(torch.int64)), dtype=torch.uint8)
            node.send(arrival.src, 0, 0, answer)
        elif arrival.kind == GOODBYE:
            num_left += 1
    node.close()


def worker(pipe: Connection, settings: dict[str, Any]) -> None:
    """Waits for (bytes, how often, how many at a time, way); answers with the seconds of each."""
    torch.set_num_threads(1)
    node = ZmqTransport("worker", **settings)
    there = settings["num_workers"]
    pipe.send("ready")
    while (order := pipe.recv()) is not None:
        nbytes, count, ahead, way = order
        message = torch.ones(nbytes, dtype=torch.uint8)
        if way == PULL:
            message = torch.tensor([nbytes]).view(torch.uint8)
        sent = got = 0
        times = []
        began = time.perf_counter()
        while got < count:
            while sent < min(count, got + ahead):
                node.send(there, 0, way, message)
                sent += 1
            arrival = node.next(60)
            assert arrival is not None, "nothing came for a minute"
            assert arrival.message.numel() == (8 if way == PUSH else nbytes)
            got += 1
            times.append(time.perf_counter() - began)
        pipe.send(times)
    node.close()


def bare_server(pipe: Connection) -> None:
    socket = zmq.Context().socket(zmq.ROUTER)
    pipe.send(f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}")
    while True:
        identity, message = socket.recv_multipart(copy=False)
        if len(message) == 0:
            return
        socket.send_multipart([identity, message], copy=False)


def bare_worker(pipe: Connection, address: str) -> None:
    socket = zmq.Context().socket(zmq.DEALER)
    socket.connect(address)
    pipe.send("ready")
    while (order := pipe.recv()) is not None:
        nbytes, count, ahead, _ = order
        message = torch.ones(nbytes, dtype=torch.uint8).numpy().data
        sent, times, began = 0, [], time.perf_counter()
        while len(times) < count:
            while sent < min(count, len(times) + ahead):
                socket.send(message, copy=False)
                sent += 1
            assert len(socket.recv(copy=False)) == nbytes
            times.append(time.perf_counter() - began)
        pipe.send(times)
    socket.send(b"")


class Nodes:
    """Processes with a pipe to each."""

    def __init__(self) -> None:
        self.processes: list[Any] = []
        self.workers: list[Connection] = []

    def start(
        self, function: Callable[..., None], *args: Any, host: Host | None = None
    ) -> Connection:
        here, there = mp.Pipe()
        process = mp.Process(target=inside, args=(host, function, there, *args), daemon=True)
        process.start()
        self.processes.append(process)
        return here

    def begin(self, *order: Any) -> None:
        for pipe in self.workers:
            pipe.send(order)

    def measure(self, *order: Any) -> list[list[float]]:
        self.begin(*order)
        return [pipe.recv() for pipe in self.workers]

    def stop(self) -> None:
        for pipe in self.workers:
            pipe.send(None)
        for process in self.processes:
            process.join(10)
            process.kill()


@contextmanager
def ours(
    num_workers: int,
    *,
    at: Host | None = None,
    server_at: Host | None = None,
    slow_s: float = 0,
    **more: Any,
) -> Iterator[Nodes]:
    """`at` is where scheduler and workers are; on this machine's loopback if nothing is said."""
    nodes = Nodes()
    settings = {
        "num_workers": num_workers, "num_servers": 1, "insecure": at is not None, "server_s": 30.0,
        **more,
    }  # fmt: skip

    def any_port(host: Host | None) -> str:
        return f"tcp://{'127.0.0.1' if host is None else host.address}:0"

    try:
        pipe = nodes.start(scheduler, {**settings, "scheduler": any_port(at)}, host=at)
        settings["scheduler"] = pipe.recv()
        bind = any_port(server_at)
        nodes.start(server, {**settings, "bind": bind}, slow_s, host=server_at)
        nodes.workers = [nodes.start(worker, settings, host=at) for _ in range(num_workers)]
        for one in nodes.workers:
            one.recv()
        yield nodes
    finally:
        nodes.stop()


@contextmanager
def bare(num_workers: int) -> Iterator[Nodes]:
    nodes = Nodes()
    try:
        address = nodes.start(bare_server).recv()
        nodes.workers = [nodes.start(bare_worker, address) for _ in range(num_workers)]
        for one in nodes.workers:
            one.recv()
        yield nodes
    finally:
        nodes.stop()


def bytes_per_s(nodes: Nodes, nbytes: int, count: int, ahead: int = 1, way: int = BOTH) -> float:
    began = time.perf_counter()
    nodes.measure(nbytes, count, ahead, way)
    return (
        (2 if way == BOTH else 1)
        * nbytes
        * count
        * len(nodes.workers)
        / (time.perf_counter() - began)
    )


def steady_bytes_per_s(nodes: Nodes, *order: Any) -> float:
    """One way, from when all workers have their first answer until one has its last."""
    times = nodes.measure(*order)
    begin, end = max(one[0] for one in times), min(one[-1] for one in times)
    count = sum(begin < time <= end for one in times for time in one)
    return order[0] * count / (end - begin)


# The questions.


def loopback(num_workers: int, count: int, max_large: tuple[int, ...]) -> None:
    rates: dict[str, list[float]] = {"bare": []}
    for _ in range(3):  # in turns: the machine is shared
        with bare(num_workers) as nodes:
            bytes_per_s(nodes, LARGE, 3)
            rates["bare"].append(bytes_per_s(nodes, LARGE, count))
        for large in max_large:
            with ours(num_workers, max_large=large) as nodes:
                bytes_per_s(nodes, LARGE, 3)
                rate = bytes_per_s(nodes, LARGE, count)
                rates.setdefault(f"max_large={large}", []).append(rate)
    best = max(rates["bare"])
    for name, found in rates.items():
        print(
            f"{num_workers} workers x 10 MB there and back, {name:12} best {max(found) / 1e9:.2f} "
            f"GB/s, median {median(found) / 1e9:.2f}; {max(found) / best:.2f} of bare"
        )
    for name, make in (("bare", bare), ("ours", ours)):
        with make(1) as nodes:
            nodes.measure(SMALL, 200, 1, BOTH)
            (times,) = nodes.measure(SMALL, 2000, 1, BOTH)
            trips = sorted(b - a for a, b in pairwise(times))
            print(
                f"4 KB there and back, {name}: median {1e3 * median(trips):.3f} ms, "
                f"99% {1e3 * trips[len(trips) * 99 // 100]:.3f} ms"
            )


def incast(mbit: float, num_workers: int, count: int, nbytes: int) -> None:
    with shaped(mbit, num_hosts=1) as (switch, [host]):
        for large in (1, 2, 1000):
            with ours(num_workers, at=switch, server_at=host, max_large=large) as nodes:
                bytes_per_s(nodes, nbytes, 1)
                name = "no limit" if large == 1000 else f"max_large={large}"
                shares = [
                    8 * steady_bytes_per_s(nodes, nbytes, count, 2, way) / mbit / 1e6
                    for way in (PUSH, PULL, BOTH)
                ]
                print(
                    f"{num_workers} workers on {mbit:g} Mbit/s, {name}: push {shares[0]:.2f} of "
                    f"it, pull {shares[1]:.2f}, both at once {shares[2]:.2f}",
                    flush=True,
                )


def slow(slow_s: float, num_workers: int, seconds: float, nbytes: int) -> None:
    with ours(num_workers, slow_s=slow_s, max_bytes_posted=64 << 20) as nodes:
        nodes.begin(nbytes, 10**9, 1000, PUSH)
        pids = [process.pid for process in nodes.processes]
        print("MB in use: after s, scheduler, server, workers")
        for step in range(11):
            print(f"{step * seconds / 10:7.1f}", *(f"{rss_mb(pid):7.0f}" for pid in pids))
            time.sleep(seconds / 10)
        for process in nodes.processes:
            process.kill()
        nodes.workers = []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-workers", type=int, default=3)
    parser.add_argument("--count", type=int, default=20, help="messages of each worker")
    parser.add_argument("--max-large", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--shaped", type=float, metavar="MBIT")
    parser.add_argument("--slow-server", type=float, metavar="SECONDS")
    parser.add_argument("--seconds", type=float, default=20.0, help="of --slow-server in all")
    parser.add_argument("--nbytes", type=int, default=LARGE, help="of --shaped and --slow-server")
    args = parser.parse_args()
    mp.set_start_method("fork")
    if args.shaped is not None:
        incast(args.shaped, args.num_workers, args.count, args.nbytes)
    elif args.slow_server is not None:
        slow(args.slow_server, args.num_workers, args.seconds, args.nbytes)
    else:
        loopback(args.num_workers, args.count, tuple(args.max_large))


if __name__ == "__main__":
    main()
