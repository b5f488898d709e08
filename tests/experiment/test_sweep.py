"""Sweeps: every combination once, finished runs are kept, what was killed continues."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas
import pytest

import gradwire
from gradwire.experiment.run.config import Config
from gradwire.experiment.sweep.plan import plan_runs, read_sweep, varied_settings
from gradwire.experiment.sweep.pool import default_jobs
from gradwire.experiment.sweep.sweep import RESULTS

SMALL: dict[str, Any] = {
    "steps": 4,
    "batch_size": 8,
    "model": "mlp((8,))",
    "compute": "fixed(0.001)",
    "eval_every": 1,
}


class Watching:
    def __init__(self) -> None:
        self.before = -1
        self.ended: list[str] = []

    def begin(self, num_runs: int, num_done: int) -> None:
        self.before = num_done

    def step(self, run: Any, step: int, steps: int) -> None:
        pass

    def end(self, run: Any, row: Any) -> None:
        self.ended.append(run.title)


# The plan.


def test_every_combination_is_planned_once_in_the_order_of_the_lists():
    runs = plan_runs({**SMALL, "workers": [2, 4], "compression": ["fp16", "fp16()", "ef(sign)"]})
    found = [(run.config.workers, run.config.compression) for run in runs]
    assert found == [(2, "fp16"), (2, "ef(sign)"), (4, "fp16"), (4, "ef(sign)")]
    assert len({run.folder for run in runs}) == 4
    assert varied_settings(runs) == ["workers"]
    assert runs[1].title == "ef(sign), workers 2, seed 0"


def test_a_method_overrides_what_all_have():
    methods = [
        {"name": "ours", "compression": ["sign", "fp16"], "optimizer": "sgd(0.5)"},
        {"architecture": "ring"},
    ]
    runs = plan_runs({**SMALL, "seed": [0, 1], "method": methods})
    assert [run.method for run in runs] == [*["ours, sign", "ours, fp16"] * 2, "ring", "ring"]
    assert {run.config.optimizer for run in runs[:4]} == {"sgd(0.5)"}
    assert runs[4].config.optimizer == Config().optimizer


def test_a_setting_that_is_a_list_varies_by_a_list_of_lists():
    (run,) = plan_runs({**SMALL, "what_if": ["1Gbit", "10Gbit"]})
    assert run.config.what_if == ("1Gbit", "10Gbit")
    runs = plan_runs({**SMALL, "what_if": [["1Gbit"], []]})
    assert [run.config.what_if for run in runs] == [("1Gbit",), ()]


def test_the_name_of_a_run_does_not_depend_on_the_rest_of_the_file():
    alone = plan_runs({**SMALL, "seed": 1})
    among = plan_runs({**SMALL, "seed": [0, 1, 2], "workers": [4, 8]})
    assert alone[0].folder in {run.folder for run in among}


def test_a_run_has_one_thread_unless_the_file_says_how_many():
    assert [run.config.threads for run in plan_runs({"threads": [0, 2]})] == [1, 2]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"workrs": [1]}, "file.toml: unknown setting 'workrs'"),
        ({"workers": [2, "many"]}, "file.toml: workers must be a whole number, got 'many'"),
        ({"compression": ["sgn"]}, "file.toml: compression: unknown compression 'sgn'"),
        ({"seed": []}, r"file.toml: seed = \[\] has no value"),
        ({"method": []}, "method is a list of tables"),
        ({"method": [{"name": 3}]}, "the name of a method is a string, got 3"),
    ],
)
def test_mistakes_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        plan_runs(settings, "file.toml")


def test_files_that_cannot_be_read_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"there is no file .*nowhere.toml"):
        read_sweep(tmp_path / "nowhere.toml")
    (tmp_path / "no.toml").write_text("seed = [")
    with pytest.raises(ValueError, match="is not TOML"):
        read_sweep(tmp_path / "no.toml")


def test_real_processes_are_refused(tmp_path):
    with pytest.raises(ValueError, match="a sweep runs on the simulator"):
        gradwire.sweep({"engine": "process"}, tmp_path)


def test_jobs_are_limited_by_cores():
    assert default_jobs(1) <= (os.cpu_count() or 1)
    assert default_jobs(10_000) == 1


def test_the_example_is_a_plan():
    runs = read_sweep(Path(__file__).resolve().parents[2] / "examples" / "sweep.toml")
    assert [run.method for run in runs[::6]] == ["fp32", "largest 1%", "local steps"]
    assert len(runs) == 18


# Doing it.


def test_runs_are_those_of_simulate_and_are_done_once(tmp_path):
    settings = {**SMALL, "compression": ["identity", "ef(topk(0.1))"], "seed": [0, 1]}
    results = gradwire.sweep(settings, tmp_path, jobs=2)
    assert len(results.rows) == 4
    for row in results.rows:
        own = {**SMALL, "compression": row["compression"], "seed": row["seed"]}
        run = gradwire.simulate(**own, threads=1)
        assert row["test_accuracy"] == run.accuracy
        assert row["bytes_sent"] == run.bytes_sent
        assert row["virtual_time_s"] == run.virtual_time_s
    identity, largest = results.table
    scores = [row["test_accuracy"] for row in results.rows if row["compression"] == "identity"]
    assert identity["score_mean"] == pytest.approx(sum(scores) / 2)
    assert identity["score_std"] == pytest.approx(abs(scores[0] - scores[1]) / 2**0.5)
    assert largest["ratio_fp32"] == identity["bytes_sent"] / largest["bytes_sent"]
    assert largest["ratio_fp16"] is None
    lines = (tmp_path / RESULTS).read_text().splitlines()
    assert [json.loads(line) for line in lines] == results.rows
    assert "<td>ef(topk(0.1))</td>" in results._repr_html_()

    watcher = Watching()
    settings["seed"] = [1, 2, 0]
    grown = gradwire.sweep(settings, tmp_path, jobs=1, watcher=watcher)
    assert watcher.before == 4
    assert sorted(watcher.ended) == ["ef(topk(0.1)), seed 2", "identity, seed 2"]
    assert [row for row in grown.rows if row["seed"] != 2] == sorted(
        results.rows, key=lambda row: (row["compression"] != "identity", -row["seed"])
    )

    frame = gradwire.load(tmp_path)
    assert isinstance(frame, pandas.DataFrame)
    assert len(frame) == 6
    means = frame[frame.seed < 2].groupby("compression").test_accuracy.mean()
    assert means["identity"] == pytest.approx(identity["score_mean"])
    assert frame["virtual_time_s at 1Gbit"].equals(frame.virtual_time_s)
    evaluations = gradwire.load(tmp_path, rows="evaluations")
    assert len(evaluations) == 6 * SMALL["steps"]
    assert set(evaluations.step) == {1, 2, 3, 4}


@pytest.mark.slow
def test_a_run_without_result_has_a_reason_and_is_not_repeated(tmp_path):
    settings = {**SMALL, "optimizer": ["sgd(0.1)", "sgd(1e38)"], "steps": 8}
    results = gradwire.sweep(settings, tmp_path, jobs=1)
    good, bad = results.rows
    assert "failure" not in good
    assert bad["failure"].startswith("diverged: ")
    assert [row["seeds"] for row in results.table] == [1, 0]
    for retry, expected in ((False, []), (True, ["identity, sgd(1e38), seed 0"])):
        watcher = Watching()
        again = gradwire.sweep(settings, tmp_path, jobs=1, retry=retry, watcher=watcher)
        assert watcher.ended == expected
        assert again.rows == results.rows
    assert sorted(gradwire.load(tmp_path).failure.isna()) == [False, True]


@pytest.mark.slow
def test_methods_whose_messages_depend_on_the_network_run_once_for_each(tmp_path):
    settings = {
        **SMALL,
        "synchronization": "asp",
        "architecture": "parameter_server",
        "what_if": ["10Mbit"],
    }
    (row,) = gradwire.sweep(settings, tmp_path, jobs=1).rows
    times = row["virtual_times_s"]
    assert times.keys() == {"1Gbit", "10Mbit"}
    assert times["10Mbit"] > times["1Gbit"]
    assert len(gradwire.load(tmp_path)) == 1
    watcher = Watching()
    gradwire.sweep(settings, tmp_path, jobs=1, watcher=watcher)
    assert watcher.before == 1


class Killing(Watching):
    """Kills the process of the first run when it has begun."""

    def __init__(self) -> None:
        super().__init__()
        self.killed = False

    def step(self, run: Any, step: int, steps: int) -> None:
        if not self.killed:
            self.killed = True
            task = Path(f"/proc/self/task/{os.getpid()}/children")
            for child in task.read_text().split():
                os.kill(int(child), signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="finds the process in /proc")
def test_a_process_that_is_killed_costs_its_run_which_continues_next_time(tmp_path):
    settings = {**SMALL, "seed": [0, 1], "steps": 200}
    watcher = Killing()
    killed = gradwire.sweep(settings, tmp_path, jobs=1, watcher=watcher).rows
    assert len(watcher.ended) == 2
    assert "its process was killed by SIGKILL" in killed[0]["failure"]
    assert "failure" not in killed[1]
    watcher = Watching()
    rows = gradwire.sweep(settings, tmp_path, jobs=1, watcher=watcher).rows
    assert watcher.before == 1
    run = gradwire.simulate(**{**SMALL, "steps": 200}, threads=1)
    assert (rows[0]["test_accuracy"], rows[0]["bytes_sent"]) == (run.accuracy, run.bytes_sent)


@pytest.mark.slow
def test_gradients_are_measured_once_for_all(tmp_path):
    settings = {**SMALL, "compute": "measured", "seed": [0, 1]}
    rows = gradwire.sweep(settings, tmp_path, jobs=2).rows
    (compute,) = {row["compute"] for row in rows}
    assert compute.startswith("fixed(")
    grown = gradwire.sweep({**settings, "seed": [0, 1, 2]}, tmp_path, jobs=1).rows
    assert {row["compute"] for row in grown} == {compute}


def test_two_sweeps_in_one_folder_are_refused(tmp_path):
    class Again(Watching):
        def end(self, run: Any, row: Any) -> None:
            with pytest.raises(ValueError, match="another sweep is at work in"):
                gradwire.sweep(SMALL, tmp_path)
            super().end(run, row)

    watcher = Again()
    gradwire.sweep(SMALL, tmp_path, jobs=1, watcher=watcher)
    assert watcher.ended == ["identity, seed 0"]


def test_the_command_prints_the_table_and_the_reasons(tmp_path):
    (tmp_path / "few.toml").write_text(
        'steps = 4\nmodel = "mlp((8,))"\ncompute = "fixed(0.001)"\n'
        'optimizer = ["sgd(0.1)", "sgd(1e38)"]\n[[method]]\nname = "half"\ncompression = "fp16"\n'
    )
    command = [sys.executable, "-m", "gradwire", "sweep", "few.toml", "--jobs", "1"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "half" in done.stdout
    assert "half: 1 of 1 seeds diverged: " in done.stdout
    assert "Results: runs/few/results.jsonl" in done.stdout
    assert "1/2 half, sgd(0.1), seed 0: test accuracy" in done.stderr
    again = subprocess.run([*command, "--json"], cwd=tmp_path, capture_output=True, text=True)
    assert "2 of 2 runs were done before" in again.stderr
    assert [row["seeds"] for row in json.loads(again.stdout)] == [1, 0]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda folder: gradwire.load(folder / "nowhere"), "there is no folder"),
        (lambda folder: gradwire.load(folder), "has no run that has ended"),
        (lambda folder: gradwire.load(folder, rows="steps"), "rows is"),
        (lambda folder: gradwire.sweep(SMALL, folder, jobs=0), "jobs must be at least 1"),
    ],
)
def test_wrong_calls_are_explained(tmp_path, call, message):
    with pytest.raises(ValueError, match=message):
        call(tmp_path)


@pytest.mark.usefixtures("own_codecs_are_forgotten")
def test_every_process_of_a_sweep_imports_your_modules(tmp_path, monkeypatch):
    """A codec that no registry of a new process knows."""
    (tmp_path / "halves_of_mine.py").write_text(
        "from dataclasses import dataclass\n"
        "import torch\n"
        "import gradwire\n"
        "from gradwire.core.codec import Codec\n"
        "from gradwire.core.spec import Spec\n"
        "@gradwire.register\n"
        "@dataclass(frozen=True, repr=False)\n"
        "class HalvesOfMine(Codec):\n"
        "    def split(self, x, state, key):\n"
        "        return {'values': x.to(torch.float16)}, state\n"
        "    def values_spec(self, spec, parts):\n"
        "        return Spec(spec.shape, torch.float16)\n"
        "    def join(self, parts, spec, key):\n"
        "        return parts['values'].to(spec.dtype)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    paths = [str(tmp_path), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    settings = {**SMALL, "compression": ["halves_of_mine", "identity"]}
    results = gradwire.sweep(settings, tmp_path / "out", jobs=1, imports=["halves_of_mine"])
    mine, exact = results.rows
    assert "failure" not in mine
    assert (mine["compression"], mine["steps"]) == ("halves_of_mine", 4)
    assert mine["bytes_sent"] != exact["bytes_sent"]
    with pytest.raises(ModuleNotFoundError):
        gradwire.sweep(settings, tmp_path / "other", jobs=1, imports=["no_such_module"])
