"""kill -9 a real server again and again: it goes on where it was, to the same bits."""

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from runtime.process import durable_cases
from runtime.process.durable_cases import STEPS, WORKERS, trained
from sampling import slow

HOLDING = 'parameter_server(optimizer="server")'
SQUEEZING = 'parameter_server(optimizer="server", answers="compressed")'


def launch(case: list[str], folder: Path, is_durable: bool, steps: list[int]) -> list[int]:
    tests = Path(durable_cases.__file__).parents[2]
    path = os.pathsep.join([str(tests), os.environ.get("PYTHONPATH", "")])
    rest = [json.dumps(case), str(folder), json.dumps([is_durable, steps])]
    process = subprocess.Popen(
        [sys.executable, durable_cases.__file__, *rest],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        start_new_session=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        output, _ = process.communicate(timeout=300)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return json.loads(output.splitlines()[-1])


BSP, ASP = ["bsp", HOLDING, "identity"], ["asp", SQUEEZING, "ef(topk(0.1))"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "is_durable"),
    [
        (BSP, True),
        slow(ASP, False),
        slow(BSP, False),
        slow(ASP, True),
    ],
)
def test_a_server_that_is_killed(tmp_path: Path, case: list[str], is_durable: bool) -> None:
    codes = launch(case, tmp_path, is_durable, [4, 11, 20])
    assert codes == [0] * (WORKERS + 2)
    state = torch.load(tmp_path / "server.pt", weights_only=True)
    workers = [torch.load(tmp_path / f"worker{rank}.pt") for rank in range(WORKERS)]
    if case[0] == "bsp":
        expected = trained(*case)
        assert torch.equal(state["params"], expected.servers[0].params)
        for params in workers:
            assert torch.equal(params, expected.params[0])
        assert state["notes"] == expected.servers[0].notes
    else:
        # Every push counts once, and what the server thinks a worker has is what it has.
        assert state["memory"]["updates"] == WORKERS * STEPS
        _, count, _ = state["notes"]["staleness"]
        assert count == WORKERS * STEPS
        for rank, params in enumerate(workers):
            assert torch.equal(params, state["known"][rank])
