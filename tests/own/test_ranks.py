"""`gradwire.run` on real ranks, with Python objects."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import gradwire

SCRIPT = Path(__file__).with_name("ranks_at_work.py")


def torchrun(folder: Path, how: str) -> None:
    ranks = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*ranks, str(SCRIPT), str(folder), how], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr


def script():
    spec = importlib.util.spec_from_file_location("ranks_at_work", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.filterwarnings("ignore::gradwire.warning.GradwireWarning")
def test_ranks_end_in_the_bits_of_the_simulator(tmp_path, build):
    torchrun(tmp_path, "seeded")
    user = script()
    simulated = gradwire.simulate(
        model=build(user.Net, 3), data=user.make_data(), compute="fixed(0.01)", **user.SETTINGS
    )
    for rank in (0, 1):
        params, buffers = torch.load(tmp_path / f"rank{rank}.pt", weights_only=True)
        assert torch.equal(params, simulated.params)
        assert float(buffers["seen"]) == 6 * 8
        assert torch.equal(
            buffers["norm.running_mean"], simulated.replicas[rank].buffers["norm.running_mean"]
        )


@pytest.mark.slow
def test_modules_that_differ_between_ranks_are_an_error_on_all(tmp_path):
    torchrun(tmp_path, "unseeded")
    for rank in (0, 1):
        error = (tmp_path / f"error{rank}").read_text()
        assert 'rank 1 has model = "object:Net#' in error
        assert "give a function that makes it, or seed torch" in error
