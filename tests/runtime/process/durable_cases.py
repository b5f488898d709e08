"""A job of real processes whose server is killed and begun again: `python durable_cases.py ...`.

The process imports everything, forks scheduler, workers and server, kills the server when rank 0
has done certain steps, begins another one each time, and prints how all ended.
"""

import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from gradwire.experiment.processes.headers import HEADERS
from gradwire.runtime.durable.checkpoint import Store
from gradwire.runtime.durable.transport import DurableTransport, links_of
from gradwire.runtime.process.engine import ProcessEngine
from gradwire.runtime.zeromq import ZmqTransport
from gradwire.testing import quadratics
from gradwire.testing.quadratics import Quadratics
from gradwire.training import program
from gradwire.training.server import TrainingServer

WORKERS, STEPS = 3, 32


class Slow(Quadratics):
    def gradients(self, requests: Any) -> Any:
        time.sleep(0.02)
        return super().gradients(requests)


def trained(synchronization: str, architecture: str, compression: str) -> Any:
    settings: dict[str, Any] = {"workers": WORKERS, "steps": STEPS, "momentum": 0.9, "lr": 0.02}
    return quadratics.train(
        synchronization, architecture, compression, layers=(300, 30), **settings
    )


class _Progress:
    """Tells how far rank 0 is."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def worker_started(self, worker: Any) -> None:
        pass

    def step_finished(self, rank: int, step: int, replica: Any, now: float) -> None:
        (self.folder / f"step{step}").touch()


def _transport(role: str, folder: Path, **settings: Any) -> ZmqTransport:
    file = folder / "address"

    def on_bound(address: str) -> None:
        if role == "scheduler":
            part = folder / "address.part"
            part.write_text(address)
            part.rename(file)

    while role != "scheduler" and not file.exists():
        time.sleep(0.01)
    return ZmqTransport(
        role,  # type: ignore[arg-type]
        scheduler="tcp://127.0.0.1:0" if role == "scheduler" else file.read_text(),
        num_workers=WORKERS,
        num_servers=1,
        on_bound=on_bound,
        headers=HEADERS,
        heartbeat_s=2.0,
        **settings,
    )


def _worker(plan: Any, rank: int, folder: Path) -> None:
    transport = _transport("worker", folder, rank=rank)
    task = plan.task
    slow = Slow(tuple(t.stop - t.start for t in task.layout.tensors), task.start, 0.0, ())
    engine = ProcessEngine(transport, WORKERS, evaluate=slow.gradients, timeout_s=30)
    replica = plan.initial_replicas()[rank]
    progress = _Progress(folder) if rank == 0 else None
    result = engine.run(lambda node: program.train(plan, node, replica, 0, STEPS, progress))
    assert result is not None
    torch.save(result.params, folder / f"worker{rank}.pt")
    transport.close()


def _scheduler(plan: Any, folder: Path) -> None:
    transport = _transport("scheduler", folder)
    engine = ProcessEngine(transport, WORKERS, timeout_s=30)
    engine.run(lambda node: plan.architecture.daemon(node, {}))
    transport.close()


def _server(plan: Any, folder: Path, is_durable: bool) -> None:
    store = Store(folder / "server", "a test")
    server = TrainingServer(plan, 0)
    if store.state is not None:
        server.restore(store.state["state"], is_replayed=True)
    inner = _transport("server", folder, rank=WORKERS, acknowledges="asked", links=links_of(store))
    transport = DurableTransport(
        inner,
        store,
        lambda: server.snapshot() if engine.is_at_rest else None,
        headers=HEADERS,
        is_durable=is_durable,
        checkpoint_every_s=0.3,
    )
    engine = ProcessEngine(transport, WORKERS, timeout_s=30)
    engine.run(lambda node: transport.recorded(server.run(node)))
    torch.save(server.snapshot(), folder / "server.pt")
    transport.close()
    inner.close()


def _fork(call: Any, *args: Any) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        call(*args)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def main(case: list[str], folder: Path, is_durable: bool, steps: list[int]) -> list[int]:
    torch.set_num_threads(1)
    plan = trained(*case).plan
    children = [_fork(_scheduler, plan, folder)]
    children += [_fork(_worker, plan, rank, folder) for rank in range(WORKERS)]
    server = _fork(_server, plan, folder, is_durable)
    try:
        for step in steps:
            until = time.monotonic() + 30
            while not (folder / f"step{step}").exists():
                assert time.monotonic() < until, f"step {step} was not reached"
                time.sleep(0.001)
            time.sleep(step % 4 * 0.007)
            os.kill(server, signal.SIGKILL)
            os.waitpid(server, 0)
            server = _fork(_server, plan, folder, is_durable)
        children.append(server)
        codes, until = [], time.monotonic() + 40
        while children and time.monotonic() < until:
            child, status = os.waitpid(-1, os.WNOHANG)
            if child:
                children.remove(child)
                codes.append(os.waitstatus_to_exitcode(status))
            else:
                time.sleep(0.01)
        return codes
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]), Path(sys.argv[2]), *json.loads(sys.argv[3]))))
