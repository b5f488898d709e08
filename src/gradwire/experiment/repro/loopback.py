"""What a mean by an all-reduce algorithm takes on real processes of this machine.

`measure` starts ranks of one thread, gloo on the loopback, as `gradwire run --engine process` does;
each of them is this module. Before each mean all ranks wait for each other, and the time of the
slowest counts. The median over the repeats is what is measured.
"""

import json
import os
import sys
import traceback
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import NoReturn

import torch
import torch.distributed as dist

from gradwire.architecture import ARCHITECTURE
from gradwire.core.node import Node
from gradwire.experiment.processes.launch.children import die_with_parent, is_launched
from gradwire.experiment.processes.launch.launcher import launch
from gradwire.experiment.processes.launch.scratch import scratch_folder
from gradwire.experiment.processes.meeting import meet
from gradwire.runtime.process.engine import ProcessEngine
from gradwire.runtime.process.gloo import GlooTransport
from gradwire.runtime.storage.files import write_atomically

_WARM_UP, _REPEATS = 3, 11
_JOIN_S = 120.0  # how long ranks may take to start
_SILENCE_S = 120.0  # in which nothing happens before a rank gives up


def measure(size: int, algorithms: Sequence[str], nbytes: Sequence[int]) -> dict[str, list[float]]:
    """Median seconds of a mean, by algorithm, for each number of bytes."""
    with scratch_folder() as place:
        path = place / "seconds.json"
        job = json.dumps({"algorithms": list(algorithms), "nbytes": list(nbytes)})
        command = [sys.executable, "-m", __name__, str(path), job]
        failure = launch(size, lambda attempt: command)
        if failure is not None:
            raise ValueError(f"the ranks on this machine failed: {failure.message}")
        found: dict[str, list[float]] = json.loads(path.read_text())
        return found


async def _seconds(node: Node, algorithm: str, nbytes: int) -> float:
    """Of the slowest rank, the median."""
    group = ARCHITECTURE.parse(algorithm).group(node, "x")
    x = torch.ones(nbytes // 4)
    taken = []
    for _ in range(_WARM_UP + _REPEATS):
        dist.barrier()
        began = await node.now()
        await group.mean(x)
        taken.append(await node.now() - began)
    slowest = torch.tensor(taken[_WARM_UP:], dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return median(slowest.tolist())


def _run_rank(path: Path, algorithms: Sequence[str], nbytes: Sequence[int]) -> None:
    torch.set_num_threads(1)
    meet(_JOIN_S)
    transport = GlooTransport()
    engine = ProcessEngine(transport, timeout_s=_SILENCE_S)
    found = {
        name: [engine.run(partial(_seconds, algorithm=name, nbytes=size)) for size in nbytes]
        for name in algorithms
    }
    transport.close()
    if transport.rank == 0:
        write_atomically(path, json.dumps(found).encode())


def main() -> NoReturn:
    """One rank. It ends without teardown, in which gloo may abort."""
    code = 1
    try:
        if is_launched():
            die_with_parent()
        job = json.loads(sys.argv[2])
        _run_rank(Path(sys.argv[1]), job["algorithms"], job["nbytes"])
        code = 0
    except Exception:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
