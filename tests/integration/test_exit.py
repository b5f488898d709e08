"""A script whose all-reduce fails since another rank was killed ends as Python scripts do."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
LIMIT_S = 180.0  # on a loaded machine

SCRIPT = """
import os, signal, sys
import torch
import torch.distributed as dist
import gradwire
from integration.loops import ddp, loss_of, make_model, sgd, train

use, rank, store = sys.argv[1], int(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
model = make_model()
if use == "hook":
    model, _ = ddp(model, "identity")
    optimizer = sgd(model)
else:
    optimizer = gradwire.DistributedOptimizer(sgd(model), model.named_parameters())
train(model, optimizer, range(2), rank)
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
loss_of(model, rank, 2).backward()
"""


@pytest.mark.long  # its end depends on how torch tears gloo down
@pytest.mark.parametrize("use", ["hook", "optimizer"])
def test_a_script_ends_after_another_rank_was_killed(tmp_path, use):
    environment = {
        **os.environ,
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]),
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, use, str(rank), str(tmp_path / "store")],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        _, err = processes[0].communicate(timeout=LIMIT_S)
        processes[1].communicate(timeout=LIMIT_S)
    finally:
        for process in processes:
            with suppress(ProcessLookupError):
                process.kill()
            process.wait()
    assert processes[1].returncode == -signal.SIGKILL
    assert processes[0].returncode == 1, err
    assert "PeerLost: rank 1" in err
