"""What a user reads who goes on with a run: that it had finished, begins again, or cannot."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from gradwire.cli import main
from gradwire.experiment.processes.state.checkpoints import Checkpoints
from sampling import slow

QUICK = ["--steps", "4", "--batch-size", "8", "--model", "mlp((16,))", "--eval-every", "2"]
QUICK += ["--threads", "1", "--evaluation", "sequential"]
SIMULATED = [*QUICK, "--compute", "fixed(0.001)"]
FINISHED = "this run had finished; nothing was computed"


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def code_of(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main(list(arguments))
    return int(stop.value.code or 0)


def damage(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


@pytest.mark.parametrize("synchronization", ["bsp", "asp"])
def test_a_finished_run_says_so_and_shows_its_result(capsys, monkeypatch, synchronization):
    method = ["--architecture", "parameter_server", "--synchronization", synchronization]
    main(["run", *SIMULATED, *method, "--out", "run", "--json"])
    whole = json.loads(capsys.readouterr().out)
    monkeypatch.setattr(
        "gradwire.experiment.simulate.simulation.resume", lambda *_, **__: pytest.fail("it ran")
    )
    before = {path.name: path.read_bytes() for path in Path("run").iterdir()}
    main(["run", "--resume", "run", "--json"])
    printed = capsys.readouterr()
    assert json.loads(printed.out) == whole
    assert FINISHED in printed.err
    main(["run", "--resume", "run"])
    printed = capsys.readouterr()
    assert f"{100 * whole['test_accuracy']:.2f}%" in printed.out
    assert FINISHED in printed.err
    assert {path.name: path.read_bytes() for path in Path("run").iterdir()} == before


def test_a_simulated_run_without_a_usable_checkpoint(capsys):
    main(["run", *SIMULATED, "--out", "run", "--json"])
    whole = json.loads(capsys.readouterr().out)
    Path("run/summary.json").unlink()
    damage(Path("run/checkpoint.pt"))
    assert code_of("run", "--resume", "run") == 2
    said = capsys.readouterr().err
    assert "run/checkpoint.pt is damaged" in said
    assert "gradwire run --resume run --restart" in said
    main(["run", "--resume", "run", "--restart", "--json"])
    printed = capsys.readouterr()
    assert json.loads(printed.out)["test_loss"] == whole["test_loss"]
    assert "run/checkpoint.pt is damaged" in printed.err
    assert "the run begins again from step 0" in printed.err


def test_restart_is_for_runs_that_go_on(capsys):
    assert code_of("run", *SIMULATED, "--restart") == 2
    assert "--restart goes with --resume" in capsys.readouterr().err


def test_a_comparison_does_not_go_into_the_folder_of_a_run(capsys):
    main(["run", *SIMULATED, "--out", "run"])
    before = sorted(Path("run").rglob("*"))
    assert code_of("compare", *SIMULATED, "--compression", "sign", "--out", "run") == 2
    assert "run already holds a run. Choose another folder" in capsys.readouterr().err
    assert sorted(Path("run").rglob("*")) == before


def test_a_file_in_the_place_of_a_folder_is_named(capsys):
    Path("taken").touch()
    for command in ("run", "compare"):
        assert code_of(command, *SIMULATED, "--out", "taken") == 2
        said = " ".join(capsys.readouterr().err.split())
        assert "taken: " in said
        assert "choose another folder" in said
        assert "Errno" not in said


@pytest.mark.slow
@pytest.mark.parametrize("number", [slow(signal.SIGTERM), signal.SIGINT])
def test_a_signal_to_the_simulator_says_how_to_go_on(tmp_path, number):
    flags = [*SIMULATED, "--steps", "1000000", "--eval-every", "5", "--out", "run"]
    with subprocess.Popen(
        [sys.executable, "-m", "gradwire", "run", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    ) as process:
        try:
            until = time.monotonic() + 300
            while not (tmp_path / "run" / "checkpoint.pt").exists():
                assert process.poll() is None
                assert time.monotonic() < until
                time.sleep(0.02)
            os.kill(process.pid, number)
            _, said = process.communicate(timeout=300)
        finally:
            process.kill()
    assert process.returncode == 128 + number
    assert said.splitlines()[-1] == "interrupted; resume: gradwire run --resume run"
    assert "Traceback" not in said


@pytest.mark.slow
def test_ranks_whose_checkpoints_are_damaged_do_not_begin_again_in_silence(capfd):
    """All files of one rank are damaged: whoever finds it, the terminal has it."""
    real = ["--engine", "process", "--workers", "2"]
    main(["run", *QUICK, *real, "--out", "run"])
    whole = torch.load("run/model.pt", weights_only=True)["params"]
    capfd.readouterr()
    main(["run", "--resume", "run"])
    printed = capfd.readouterr()
    assert "test accuracy" in printed.out
    assert FINISHED in printed.err
    Path("run/summary.json").unlink()
    for step in (2, 4):
        damage(Path(f"run/checkpoints/step-{step:06d}/rank-1.pt"))
    assert code_of("run", "--resume", "run") == 2
    said = capfd.readouterr().err
    for step in (2, 4):
        assert f"rank 1: run/checkpoints/step-{step:06d}/rank-1.pt is damaged" in said
    assert said.count("gradwire run --resume run --restart") == 1
    assert len(Checkpoints(Path("run"), 0).load().states) == 2  # nothing was removed
    main(["run", "--resume", "run", "--restart"])
    printed = capfd.readouterr()
    for step in (2, 4):
        assert "rank-1.pt is damaged: its checksum does not fit" in printed.err
        assert f"step-{step:06d}" in printed.err
    assert "the run begins again from step 0" in printed.err
    assert torch.equal(torch.load("run/model.pt", weights_only=True)["params"], whole)


@pytest.mark.slow
def test_ranks_skip_a_damaged_checkpoint_and_say_so(capfd):
    real = ["--engine", "process", "--workers", "2"]
    main(["run", *QUICK, *real, "--out", "run"])
    whole = torch.load("run/model.pt", weights_only=True)["params"]
    Path("run/summary.json").unlink()
    damage(Path("run/checkpoints/step-000004/rank-1.pt"))
    capfd.readouterr()
    main(["run", "--resume", "run"])
    printed = capfd.readouterr()
    words = "rank 1: run/checkpoints/step-000004/rank-1.pt is damaged: its checksum does not fit"
    assert words in printed.err
    assert "it is not used" in printed.err
    assert "from step 2" in printed.out
    assert torch.equal(torch.load("run/model.pt", weights_only=True)["params"], whole)
