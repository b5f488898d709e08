"""Starts n real processes on one machine, for tests: `launch(folder, n, "module:function")`.

One process imports everything, calls `prepare(n)` of the module if there is one, then forks: that
is much quicker than doing it n times. The function is called on every rank with (rank, folder);
what it returns is written as JSON and handed back. The processes leave by `os._exit`, since gloo
may abort when torn down.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

_TESTS = Path(__file__).resolve().parents[2]


def launch(
    folder: Path, size: int, function: str, seconds: float = 60.0, within: Sequence[str] = ()
) -> tuple[list[int], list[Any]]:
    """Exit codes of the ranks (negative: a signal) and their results (None: there is none).

    `within` is a command that runs another, such as that of a network namespace.
    """
    environment = {
        **os.environ,
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(_TESTS), os.environ.get("PYTHONPATH", "")]),
    }
    command = [*within, sys.executable, __file__, str(folder), str(size), function, str(seconds)]
    process = subprocess.Popen(
        command, env=environment, start_new_session=True, stdout=subprocess.PIPE, text=True
    )
    try:
        output, _ = process.communicate(timeout=seconds + 20)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # whatever is left of them
        process.wait()
    results = [folder / f"result{rank}.json" for rank in range(size)]
    return json.loads(output.splitlines()[-1]), [
        json.loads(path.read_text()) if path.exists() else None for path in results
    ]


def hang(rank: int, folder: Path) -> None:
    """A rank that does not end."""
    time.sleep(600)


def _main() -> None:
    _die_with_parent()
    folder, size, name, seconds = sys.argv[1:]
    module, function = name.split(":")
    import torch

    torch.set_num_threads(1)
    imported = import_module(module)
    call = getattr(imported, function)
    prepare = getattr(imported, "prepare", None)
    if prepare is not None:
        prepare(int(size))
    children = {}
    for rank in range(int(size)):
        child = os.fork()
        if child == 0:
            _rank(call, rank, int(size), Path(folder))
        children[child] = rank
    codes = [-9999] * int(size)
    until = time.monotonic() + float(seconds)
    while children:
        child, status = os.waitpid(-1, os.WNOHANG)
        if child:
            codes[children.pop(child)] = os.waitstatus_to_exitcode(status)
        elif time.monotonic() > until:
            for left in children:
                os.kill(left, signal.SIGKILL)
            until += 10
        else:
            time.sleep(0.01)
    print(json.dumps(codes), flush=True)


def _die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _rank(call: Any, rank: int, size: int, folder: Path) -> None:
    import torch
    import torch.distributed as dist

    _die_with_parent()
    torch.set_num_threads(1)  # makes a thread pool: the parent's is not that of a child

    code = 1
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=30),
        )
        result = call(rank, folder)
        part = folder / f"result{rank}.part"
        part.write_text(json.dumps(result))
        part.rename(folder / f"result{rank}.json")
        code = 0
        # What runs at the end of a process; without it messages to others may be lost.
        if "gradwire.integration.communicator" in sys.modules:
            sys.modules["gradwire.integration.communicator"].close_all()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _main()
