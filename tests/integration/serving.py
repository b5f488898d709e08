"""Starts jobs with servers for tests: `run_jobs(folder, "module:first", "module:second")`.

As in `runtime/process/launching.py`, one process imports everything, and forks the scheduler, the
servers and the workers of each job; the jobs run one after the other. A function is called on every
worker with (rank, folder); what it returns is written as JSON and handed back. The folder has the
process ids of all nodes.
"""

import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

_TESTS = Path(__file__).resolve().parents[1]
_SECONDS = 200.0  # for a job, on a loaded machine


class Job(NamedTuple):
    """What came of one: exit codes (negative: a signal) of workers, of servers and scheduler, and
    what workers returned (None: nothing)."""

    workers: list[int]
    others: list[int]
    results: list[Any]


def run_jobs(folder: Path, workers: int, servers: int, *functions: str) -> list[Job]:
    command = [sys.executable, __file__, str(folder), str(workers), str(servers), *functions]
    environment = {
        **os.environ,
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(_TESTS), os.environ.get("PYTHONPATH", "")]),
    }
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        process.wait(_SECONDS * len(functions) + 60)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # whatever is left of them
        process.wait()
    jobs = []
    for number in range(len(functions)):
        place = folder / str(number)
        codes = json.loads((place / "codes.json").read_text())
        files = [place / f"result{rank}.json" for rank in range(workers)]
        results = [json.loads(f.read_text()) if f.exists() else None for f in files]
        jobs.append(Job(codes[:workers], codes[workers:], results))
    return jobs


def kill(folder: Path, node: int) -> None:
    """In a worker: kills a node, by its rank."""
    os.kill(json.loads((folder / "pids.json").read_text())[node], signal.SIGKILL)


def _main() -> None:
    folder, workers, servers, *functions = sys.argv[1:]
    import torch

    torch.set_num_threads(1)
    for name in ("gradwire.experiment.processes.loops.node", "gradwire.integration.optimizer"):
        import_module(name)
    for number, function in enumerate(functions):
        module, name = function.split(":")
        place = Path(folder) / str(number)
        place.mkdir()
        _run(place, int(workers), int(servers), getattr(import_module(module), name))


def _run(place: Path, workers: int, servers: int, call: Callable[[int, Path], Any]) -> None:
    from gradwire.experiment.processes.launch.children import Children
    from gradwire.experiment.processes.loops.job import LoopJob
    from gradwire.runtime.zeromq.keys import make_keys

    make_keys(place / "job.key")
    job = LoopJob(workers, servers, "tcp://127.0.0.1:0", place / "job.key", silence="20s")
    layout = job.layout
    reports = Children(place, layout.size)
    pids = [0] * layout.size
    try:
        pids[layout.scheduler] = _fork(lambda: _serve(job, layout.scheduler, place))
        until = time.monotonic() + _SECONDS
        while (found := reports.address(layout.scheduler)) is None:
            assert time.monotonic() < until, "the scheduler has not reported its address"
            time.sleep(0.01)
        job = replace(job, scheduler=found[0])
        for rank in layout.servers:
            pids[rank] = _fork(lambda rank=rank: _serve(job, rank, place))
        _write(place / "pids.json", pids)
        for rank in layout.workers:
            own = job.environment(rank) | {"MASTER_PORT": str(found[1])}
            pids[rank] = _fork(lambda rank=rank, own=own: _work(call, rank, place, own))
        codes = _wait(pids)
    finally:
        for pid in filter(None, pids):
            with suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
    _write(place / "codes.json", codes)


def _fork(call: Callable[[], Any]) -> int:
    pid = os.fork()
    if pid:
        return pid
    import torch

    torch.set_num_threads(1)  # makes a thread pool: the parent's is not that of a child
    code = 1
    try:
        call()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _serve(job: Any, rank: int, place: Path) -> None:
    from gradwire.experiment.processes.launch.signals import Signals
    from gradwire.experiment.processes.loops.node import LoopNode, serve

    os.environ["GRADWIRE_REPORT"] = str(place / f"report-{rank}.json")
    role = job.layout.role_of(rank)
    number = job.layout.number_of(rank) if role == "server" else None
    with Signals().caught() as signals:
        serve(LoopNode(job, role, number), signals)


def _work(
    call: Callable[[int, Path], Any], rank: int, place: Path, variables: dict[str, str]
) -> None:
    import gradwire
    from gradwire.integration.communicator import close_all

    os.environ.update(variables)
    gradwire.init()
    _write(place / f"result{rank}.json", call(rank, place))
    close_all()


def _wait(pids: list[int]) -> list[int]:
    codes, left = [-9999] * len(pids), dict(zip(pids, range(len(pids))))
    until = time.monotonic() + _SECONDS
    while left:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            codes[left.pop(pid)] = os.waitstatus_to_exitcode(status)
        elif time.monotonic() > until:
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            until += 10
        else:
            time.sleep(0.01)
    return codes


def _write(path: Path, value: Any) -> None:
    part = path.with_suffix(".part")
    part.write_text(json.dumps(value))
    part.rename(path)


if __name__ == "__main__":
    _main()
