"""Starts the ranks of a benchmark on this machine: one process that forks, gloo on the loopback.

With hosts (shaped.py) each rank is on one of its own, and gloo on the cable between them.
"""

import json
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shaped import WIRE, Host, enter


def on_ranks(
    size: int, function: Callable[..., Any], *args: Any, hosts: Sequence[Host] = ()
) -> list[Any]:
    """What `function(rank, *args)` returns on each rank (plain values), called in a process each.

    Each has one thread. They leave by `os._exit`, since gloo may abort when torn down.
    """
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    sys.stdout.flush()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        children: list[int] = []
        codes: list[int] = []
        try:
            for rank in range(size):
                child = os.fork()
                if child == 0:
                    _rank(folder, rank, size, function, args, hosts)
                children.append(child)
            while len(codes) < size:
                codes.append(os.waitstatus_to_exitcode(os.waitpid(children[len(codes)], 0)[1]))
        finally:
            for child in children[len(codes) :]:  # this one was told to stop
                os.kill(child, signal.SIGKILL)
        if any(codes):
            raise SystemExit(f"ranks ended with {codes}")
        return [json.loads((folder / f"result{rank}.json").read_text()) for rank in range(size)]


def _rank(
    folder: Path, rank: int, size: int, function: Any, args: Any, hosts: Sequence[Host]
) -> None:
    code = 1
    try:
        if hosts:
            enter(hosts[rank])
            os.environ["GLOO_SOCKET_IFNAME"] = WIRE
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=120),
        )
        (folder / f"result{rank}.json").write_text(json.dumps(function(rank, *args)))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
