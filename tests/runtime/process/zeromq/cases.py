"""What real processes go through: killed, suspended, begun again.

Ranks 0 and 1 are workers, then come a server and the scheduler. Whoever is to be killed is a child
of its rank, so that the rank can go on with the next case.
"""

import json
import os
import signal
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from gradwire.runtime.process.transport import ARRIVED, GOODBYE, JOINED, LOST
from gradwire.runtime.zeromq import NoMemberError, ZmqTransport
from runtime.process.zeromq.jobs import next_of

SERVER, SCHEDULER = 2, 3
HEARTBEAT_S = 1.5


def run(rank: int, folder: Path) -> dict[str, Any]:
    return {case.__name__: case(rank, folder) for case in (killed, suspended, begun_again)}


def connect(rank: int, folder: Path, case: str, **settings: Any) -> ZmqTransport:
    found = folder / case

    def tell(address: str) -> None:
        part = folder / f"{case}.part"
        part.write_text(address)
        part.rename(found)

    if rank == SCHEDULER:
        settings.update(scheduler="tcp://127.0.0.1:0", on_bound=tell)
    else:
        wait_for(found)
        settings.update(scheduler=found.read_text(), rank=rank)
    role = "worker" if rank < SERVER else "server" if rank == SERVER else "scheduler"
    return ZmqTransport(
        role,  # type: ignore[arg-type]
        num_workers=2,
        num_servers=1,
        heartbeat_s=HEARTBEAT_S,
        join_s=30,
        **settings,
    )


def wait_for(path: Path, seconds: float = 30) -> None:
    until = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < until, f"{path.name} does not come"
        time.sleep(0.01)


def child(function: Callable[[], None]) -> int:
    """Runs it in a process of its own; its exit code, negative for a signal."""
    pid = os.fork()
    if pid == 0:
        try:
            function()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(77)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def value(number: int, size: int = 1) -> torch.Tensor:
    return torch.full((size,), number, dtype=torch.int64)


def killed(rank: int, folder: Path) -> Any:
    """A worker is killed while it sends. The others are told in time, and a new one comes."""

    def die() -> None:
        node = connect(rank, folder, "killed")
        for number in range(20):
            node.send(SERVER, 0, 0, value(number, 50_000))
        next_of(node, ARRIVED)
        (folder / "died").write_text(repr(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)

    if rank == 1:
        code = child(die)
        wait_for(folder / "noticed")  # or it would take the place of one that is there
        node = connect(rank, folder, "killed")
        node.send(SERVER, 0, 0, value(99))
        node.close()
        return {"code": code, "incarnation": node.incarnation}
    node = connect(rank, folder, "killed")
    if rank == SERVER:
        for number in range(20):
            assert int(next_of(node, ARRIVED).message[0]) == number
        node.send(1, 0, 0, value(0))
    lost = next_of(node, LOST)
    after_s = time.time() - float((folder / "died").read_text())
    if rank == SCHEDULER:
        (folder / "noticed").touch()
    joined = next_of(node, JOINED, seconds=30)
    if rank == SERVER:
        arrival = next_of(node, ARRIVED)
        assert (int(arrival.message[0]), arrival.number) == (99, 1)
    node.close()
    return {
        "lost": lost.src,
        "after_s": after_s,
        "joined": joined.src,
        "incarnation": joined.time_s,
    }


def suspended(rank: int, folder: Path) -> Any:
    """A worker that was stopped for too long learns that it is out."""
    node = connect(rank, folder, "suspended")
    if rank == 1:
        (folder / "pid").write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
        try:
            next_of(node)
        except NoMemberError as error:
            node.close()
            return str(error)
        return "nobody told it"
    lost = next_of(node, LOST)
    if rank == SCHEDULER:
        os.kill(int((folder / "pid").read_text()), signal.SIGCONT)
    time.sleep(0.5)
    while (arrival := node.next(0.0)) is not None:
        assert arrival.kind == GOODBYE, "of others that are done"
    node.close()
    return lost.src


def begun_again(rank: int, folder: Path) -> Any:
    """A server is killed again and again; every message counts once."""
    count = 60
    if rank == SERVER:
        state: dict[str, Any] = {"links": {}, "sum": 0, "seen": 0}
        incarnations = []

        def serve(dies: bool) -> None:
            links = {int(peer): tuple(link) for peer, link in state["links"].items()}
            node = connect(rank, folder, "begun_again", acknowledges="asked", links=links)
            total, seen = state["sum"], state["seen"]
            while seen < 2 * count:
                arrival = next_of(node, ARRIVED)
                total, seen = total + int(arrival.message[0]), seen + 1
                last[arrival.src] = arrival.number
                if seen % 10 == 0:  # a checkpoint; what came before it is acknowledged
                    for peer, number in last.items():
                        node.acknowledge(peer, number)
                    written = {"links": node.links(), "sum": total, "seen": seen}
                    part = folder / "state.part"
                    part.write_text(json.dumps(written))
                    part.rename(folder / "state")
                if dies and seen == state["seen"] + 35:
                    os.kill(os.getpid(), signal.SIGKILL)
            incarnations.append(node.incarnation)
            for peer in (0, 1):
                node.send(peer, 0, 0, value(total))
            node.close()

        codes = []
        for _ in range(2):
            last: dict[int, int] = {}
            codes.append(child(lambda: serve(True)))
            state = json.loads((folder / "state").read_text())
        last = {}
        serve(False)
        return {"codes": codes, "incarnations": incarnations}
    node = connect(rank, folder, "begun_again")
    if rank == SCHEDULER:
        while len(node.deferred(0)) < 3:  # until all have said goodbye
            node.next(0.1)
        node.close()
        return None
    for number in range(1, count + 1):
        node.send(SERVER, 0, 0, value(number, 5000))
    total = int(next_of(node, ARRIVED, seconds=40).message[0])
    node.close()
    return {"total": total, "expected": count * (count + 1)}
