"""`--model my_file:make_model --data my_file:make_data`, of a file in the current directory."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import gradwire
from gradwire.cli.front import run

SOURCE = '''
"""A user's file."""
import torch
from torch import nn

CLASSES = 3

def make_model():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, CLASSES))

def make_data():  # draws without a seed
    x = torch.randn(200, 4)
    y = x[:, :CLASSES].argmax(dim=1)
    return (x[:150], y[:150]), (x[150:], y[150:])

class Branching(nn.Linear):
    def __init__(self):
        super().__init__(4, CLASSES)

    def forward(self, x):
        return super().forward(x if x.mean().item() > 0 else 2 * x)

def hinge(outputs, targets):
    return nn.functional.multi_margin_loss(outputs, targets)

def error_rate(outputs, targets):
    return (outputs.argmax(dim=1) != targets).double().mean()

def collate(examples):
    xs, ys = zip(*examples)
    return torch.stack(xs), torch.stack(ys)
'''
FEW = ["--workers", "2", "--batch-size", "8", "--steps", "6", "--compute", "fixed(0.01)"]


@pytest.fixture
def name(tmp_path, monkeypatch):
    """The name of a module in the current directory, which is importable for this test only."""
    name = f"users_file_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    yield name
    sys.modules.pop(name, None)


def own(name: str) -> list[str]:
    return ["--model", f"{name}:make_model", "--data", f"{name}:make_data"]


def test_a_run_and_its_record(name, capsys):
    run(["run", *own(name), *FEW, "--out", "first", "--json"])
    summary = json.loads(capsys.readouterr().out)
    assert summary["config"]["model"].startswith(f"{name}:make_model#")
    assert summary["config"]["data"].startswith(f"{name}:make_data#")
    assert summary["test_accuracy"] > 0.0
    recorded = Path("first/config.toml").read_text()
    assert summary["config"]["model"] in recorded
    # The record can be run again, and is the same run.
    Path("again.toml").write_text("".join(recorded.splitlines(keepends=True)[:-1]))
    run(["run", "--config", "again.toml", "--out", "second", "--json"])
    assert json.loads(capsys.readouterr().out)["test_loss"] == summary["test_loss"]


def test_own_loss_metric_and_collate(name, capsys):
    functions = [f"--{s}={name}:{f}" for s, f in (("loss", "hinge"), ("metric", "error_rate"))]
    run(["run", *own(name), *functions, f"--collate={name}:collate", *FEW, "--out", "first"])
    printed = capsys.readouterr()
    assert "test error_rate" in printed.out
    assert "test error_rate 0." in printed.err  # progress
    assert "test accuracy" not in printed.out + printed.err


def test_why_workers_are_evaluated_one_after_another_is_shown(name, capsys):
    run(["run", "--model", f"{name}:Branching", "--data", f"{name}:make_data", *FEW, "--out=first"])
    printed = capsys.readouterr()
    assert f"warning: the gradients of {name}:Branching are evaluated one worker" in printed.err
    (line,) = (line for line in printed.out.splitlines() if "one worker after another" in line)
    assert "vmap cannot evaluate it" in line


def test_compare(name, capsys):
    metric = f"--metric={name}:error_rate"
    run(["compare", *own(name), metric, *FEW, "--compression", "ef(sign)", "--out", "compared"])
    printed = capsys.readouterr().out
    assert "ef(sign)" in printed
    assert "error_rate" in printed
    assert f"{name}:make_model#" in printed.replace("\n", "")
    rows = json.loads(Path("compared/table.json").read_text())
    assert [row["metric"] for row in rows] == ["error_rate"] * 3
    assert all("test_accuracy" not in row for row in rows)
    assert Path("compared/comparison.png").exists()


def test_timeline(name, capsys):
    run(["timeline", *own(name), *FEW, "--scheduling", "wfbp", "--json"])
    assert json.loads(capsys.readouterr().out)
    assert Path("timeline.png").exists()


def test_resume_imports_again_and_notices_changes(name, capsys):
    few = ["--eval-every", "2", "--json"]
    run(["run", *own(name), *FEW, *few, "--out", "whole"])
    whole = json.loads(capsys.readouterr().out)
    interrupted(name)
    run(["run", "--resume", "half", "--json"])
    assert json.loads(capsys.readouterr().out)["test_loss"] == whole["test_loss"]

    interrupted(name, "changed")
    path = Path(f"{name}.py")
    path.write_text(SOURCE.replace("nn.Linear(4, 8)", "nn.Linear(4, 9)").replace("(8, C", "(9, C"))
    sys.modules.pop(name)
    os.utime(path, (1, 1))  # or Python may take what it compiled before
    with pytest.raises(SystemExit):
        run(["run", "--resume", "changed"])
    error = capsys.readouterr().err.replace("\n", "")
    assert "is not what is there now" in error
    assert "structure and initial parameters" in error


def interrupted(name: str, folder: str = "half") -> None:
    """Leaves the record of a run that ended after its first evaluation."""

    def stop(row, steps):
        raise KeyboardInterrupt

    settings = {"workers": 2, "batch_size": 8, "steps": 6, "compute": "fixed(0.01)"}
    with pytest.raises(KeyboardInterrupt):
        gradwire.simulate(
            model=f"{name}:make_model",
            data=f"{name}:make_data",
            eval_every=2,
            out=folder,
            progress=stop,
            **settings,
        )


def gradwire_command(*arguments: str) -> subprocess.CompletedProcess:
    # -P: the current directory is not importable by itself, as for the installed command.
    return subprocess.run(
        [sys.executable, "-P", "-m", "gradwire", *arguments],
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.slow
def test_real_processes_import_it_themselves(name, capsys):
    few = [*own(name), "--workers", "2", "--batch-size", "8", "--steps", "6"]
    done = gradwire_command("run", *few, "--engine", "process", "--out", "real", "--json")
    assert done.returncode == 0, done.stderr
    real = json.loads(done.stdout)
    run(["run", *few, "--compute", "fixed(0.01)", "--out", "simulated", "--json"])
    simulated = json.loads(capsys.readouterr().out)
    assert real["test_loss"] == simulated["test_loss"]
    assert real["bytes_sent"] == simulated["bytes_sent"]
    assert real["config"]["model"] == simulated["config"]["model"]
    params = torch.load("real/model.pt", weights_only=True)["params"]
    assert params.shape == (67,)


def test_a_file_that_is_not_there(name, capsys):
    with pytest.raises(SystemExit):
        run(["run", "--model", "missing_file:make_model", *FEW])
    error = capsys.readouterr().err.replace("\n", "")
    assert "there is no module missing_file" in error
    assert "my_model.py is my_model" in error


def test_objects_are_needed_again(tmp_path, capsys, monkeypatch, points):
    monkeypatch.chdir(tmp_path)
    gradwire.simulate(
        model=lambda: torch.nn.Linear(4, 3),
        data=points,
        steps=2,
        batch_size=8,
        compute="fixed(0.01)",
        out="first",
    )
    Path("first/summary.json").unlink()
    with pytest.raises(SystemExit):
        run(["run", "--resume", "first"])
    error = capsys.readouterr().err.replace("\n", "")
    assert "was given to gradwire as a Python object" in error
    assert "gradwire.resume(FOLDER, data=...)" in error
