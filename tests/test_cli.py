"""The command line, as a user meets it."""

import json
import subprocess
import sys

import pytest
from rich.console import Console

from gradwire.cli import main
from gradwire.cli.front import command
from gradwire.experiment.run.config import Config
from gradwire.experiment.run.registries import REGISTRIES

QUICK = ["--steps", "4", "--batch-size", "8", "--model", "mlp((16,))", "--compute", "fixed(0.001)"]


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_run_prints_a_summary_and_leaves_records(capsys, tmp_path):
    main(["run", *QUICK, "--compression", "ef(sign)", "--out", "here"])
    printed = capsys.readouterr()
    assert "test accuracy" in printed.out
    assert "ef(sign) | bsp | allreduce | sequential" in printed.out
    assert "step 4/4" in printed.err  # plain lines where there is no terminal
    assert {"config.toml", "metrics.jsonl", "summary.json"} <= {
        path.name for path in (tmp_path / "here").iterdir()
    }


def test_run_prints_json_and_nothing_else(capsys):
    main(["run", *QUICK, "--json"])
    summary = json.loads(capsys.readouterr().out)
    assert summary["steps"] == 4
    assert summary["bytes_sent"] > 0


def test_run_reads_a_file_and_flags_override_it(capsys, tmp_path):
    (tmp_path / "experiment.toml").write_text(Config(steps=4, batch_size=8, seed=3).to_toml())
    main(["run", "--config", "experiment.toml", "--compute", "fixed(0)", "--workers=2", "--json"])
    config = json.loads(capsys.readouterr().out)["config"]
    assert (config["seed"], config["workers"], config["compute"]) == (3, 2, "fixed(0.0)")


def test_resume_goes_on_with_the_folders_own_settings(capsys, tmp_path):
    main(["run", *QUICK, "--eval-every", "2", "--out", "a", "--json"])
    whole = json.loads(capsys.readouterr().out)
    metrics = (tmp_path / "a" / "metrics.jsonl").read_text()
    (tmp_path / "a" / "summary.json").unlink()
    main(["run", "--resume", "a", "--json"])
    resumed = json.loads(capsys.readouterr().out)
    assert resumed["bytes_sent"] == whole["bytes_sent"]
    assert (tmp_path / "a" / "metrics.jsonl").read_text() == metrics


def test_compare_shows_baselines_table_and_figure(capsys, tmp_path):
    main(["compare", *QUICK, "--compression", "ef(sign)", "ef(topk(0.1))", "--out", "c"])
    printed = capsys.readouterr().out
    for method in ("identity", "fp16", "ef(sign)", "ef(topk(0.1))"):
        assert method in printed
    assert (tmp_path / "c" / "comparison.png").exists()
    assert len(json.loads((tmp_path / "c" / "table.json").read_text())) == 4


def test_compare_prints_json(capsys):
    main(
        [
            "compare",
            *QUICK,
            "--compression",
            "ef(sign)",
            "--synchronization",
            "bsp",
            "localsgd(2)",
            "--json",
        ]
    )
    table = json.loads(capsys.readouterr().out)
    methods = [row["method"] for row in table]
    assert methods == ["identity", "fp16", "ef(sign)", "ef(sign), localsgd(2)"]


def test_list_names_every_algorithm_once(capsys):
    main(["list", "--json"])
    listed = json.loads(capsys.readouterr().out)
    names = [(entry["dimension"], entry["name"]) for entry in listed["algorithms"]]
    assert len(set(names)) == len(names)
    assert {("compression", "topk"), ("compression", "ef"), ("architecture", "ring")} <= set(names)
    assert {"digits", "mnist", "cifar10"} <= set(listed["data"])
    for entry in listed["algorithms"]:
        assert entry["summary"], f"{entry['name']} has no description"
    main(["list"])
    assert "topk(0.01)" in capsys.readouterr().out


@pytest.mark.parametrize("columns", [80, 130])
def test_a_list_can_be_read_in_terminals_of_usual_width(columns, capsys, monkeypatch):
    monkeypatch.setattr("gradwire.cli.listing.out", Console(width=columns))
    main(["list"])
    printed = capsys.readouterr().out
    assert "…" not in printed
    assert "Send every element as it is." in printed  # on one line
    assert ("Micikevicius" in printed) == (columns >= 100)
    assert ("papers: " in printed) == (columns < 100)


def test_a_matrix_without_any_pair_has_no_equal_time(capsys):
    main(["matrix", "--synchronization", "asp", "--architecture", "allreduce", "--refused"])
    printed = capsys.readouterr().out
    assert "eq.time:" not in printed
    assert "needs everyone" in printed


def test_a_matrix_has_a_row_per_pair(capsys):
    pairs = ["--synchronization", "bsp", "asp", "--architecture", "allreduce"]
    main(["matrix", "--workers", "2", "--steps", "2", *pairs])
    assert "eq.time: " in capsys.readouterr().out
    main(["matrix", "--workers", "2", "--steps", "2", "--json", *pairs])
    bsp, asp = json.loads(capsys.readouterr().out)
    assert bsp["survey"]["convergence"] == "easy"
    assert "refusal" in asp


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["matrix", "--compression", "bogus"], "bogus"),
        (["matrix", "--compression", "topk(5)"], "topk"),
        (["matrix", "--bandwidth", "abc"], "not understood"),
        (["matrix", "--bandwidth", "1,2"], "2 values for"),
        (["matrix", "--steps", "0"], "steps must be at least 1"),
        (["matrix", "--workers", "0"], "workers must be at least 1"),
        (["compare", "--data", "nope"], "nope"),
        (["compare", "--bandwidth", "abc"], "not understood"),
        (["run", "--compression", "topkk(0.1)"], "Did you mean topk"),
        (["run", "--resume", "nowhere"], "holds no run"),
        (["run", "--config"], "--config needs a file"),
        (["compare", "--synchronization", "bps"], "Did you mean bsp"),
        (["run", "--workers", "0"], "workers must be at least 1"),
        (["run", "--config", "."], "is a folder, not a configuration file"),
        (["run", "--device", "toaster"], "Try cpu"),
        (["run", "--out", "/dev/null/x"], "/dev/null"),
        (["run", "--resume", "x", "--workers", "9"], "give no others"),
        (["demo", "--config", "no.toml"], "no configuration file"),
    ],
)
def test_mistakes_end_with_one_line_and_status_2(arguments, message, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert "Traceback" not in printed


def test_every_listed_example_can_be_written(capsys):
    main(["list", "--json"])
    for entry in json.loads(capsys.readouterr().out)["algorithms"]:
        registry = REGISTRIES[entry["dimension"]]
        written = registry.parse(entry["example"])
        assert registry.parse(repr(written)) == written
        assert entry["name"] in repr(written)


def test_per_node_networks_are_numbered_and_explained(capsys):
    networks = ["1Gbit,1Gbit,1Gbit,10Mbit", "100Mbit"]
    main(["compare", *QUICK, "--what-if", *networks])
    printed = capsys.readouterr().out
    assert "net 2: 1Gbit,1Gbit,1Gbit,10Mbit" in printed
    assert "identity" in printed


def test_an_interrupt_says_how_to_go_on(capsys, monkeypatch, tmp_path):
    def interrupted(*args, **kwargs):
        (tmp_path / "x").mkdir()
        (tmp_path / "x" / "config.toml").touch()
        raise KeyboardInterrupt

    monkeypatch.setattr("gradwire.experiment.simulate.simulation.simulate", interrupted)
    with pytest.raises(SystemExit) as caught:
        main(["run", "--out", "x"])
    assert caught.value.code == 130
    assert "gradwire run --resume x" in capsys.readouterr().err


@pytest.mark.slow
def test_the_module_runs_as_a_program():
    done = subprocess.run(
        [sys.executable, "-m", "gradwire", "list", "--json"], capture_output=True, text=True
    )
    assert done.returncode == 0
    assert json.loads(done.stdout)["algorithms"]


def test_a_run_prints_what_only_its_method_has(capsys, tmp_path) -> None:
    def printed(*arguments: str) -> str:
        common = ["--workers", "4", "--steps", "12", "--batch-size", "8", "--threads", "1"]
        common += ["--compute", "fixed(0.01)", "--evaluation", "sequential"]
        main(["run", *common, *arguments, "--out", str(tmp_path / str(len(arguments)))])
        return " ".join(capsys.readouterr().out.split())

    text = printed("--architecture", "gossip(ring)")
    assert "ring of 4: doubly stochastic, spectral gap 0.667, 2 neighbours" in text
    assert "distance of models" in text
    text = printed(
        "--synchronization",
        "asp",
        "--architecture",
        "parameter_server",
        "--compression",
        "ef(topk(0.01))",
        "--faults",
        "crash(2, at=0.05)",
    )
    assert "staleness" in text
    assert "Worker 2 crashed at 0.05 s with what it had still to send, of norm" in text


REAL = ["--engine", "process", "--workers", "2", "--threads", "1", "--evaluation", "sequential"]


def test_run_on_real_processes_prints_what_was_measured(capfd, tmp_path):
    main(["run", *QUICK[:-2], *REAL, "--compression", "ef(sign)", "--out", "here"])
    printed = capfd.readouterr()
    for words in ("test accuracy", "bytes with framing", "time of training", "1 on each rank"):
        assert words in printed.out
    assert "virtual" not in printed.out
    assert "step 4/4" in printed.err
    names = {"config.toml", "metrics.jsonl", "summary.json", "checkpoints", "model.pt"}
    assert {path.name for path in (tmp_path / "here").iterdir()} == names
    assert 'engine = "process"' in (tmp_path / "here" / "config.toml").read_text()
    summary = json.loads((tmp_path / "here" / "summary.json").read_text())
    assert summary["threads"] == 1
    with pytest.raises(SystemExit):
        main(["run", *QUICK[:-2], *REAL, "--out", "here"])
    assert "already holds a run" in capfd.readouterr().err


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--bandwidth", "1Mbit"], "bandwidth: this describes what the simulator models"),
        (["--native", "--record-order"], "native"),
        (["--durable"], "--durable is for servers, and allreduce has none"),
        (["--engine", "simulator", "--restarts", "1"], "are for --engine process"),
        (["--silence", "soon"], "duration 'soon' is not understood"),
        (["--join-wait", "soon"], "duration 'soon' is not understood"),
        (["--timeout", "soon"], "duration 'soon' is not understood"),
        (["--restarts", "-1"], "restarts must be at least 0"),
        (["--resume", "nowhere"], "give no others"),
    ],
)
def test_what_real_processes_cannot_do_is_said_before_they_start(capsys, arguments, words):
    with pytest.raises(SystemExit) as stop:
        main(["run", *REAL, *arguments])
    assert stop.value.code == 2
    assert words in " ".join(capsys.readouterr().err.split())


def test_under_torchrun_there_are_as_many_workers_as_ranks(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert command(["run"]).config.workers == 3
    assert command(["run", "--workers", "5"]).config.workers == 5
    (tmp_path / "a.toml").write_text("workers = 7\n")
    (tmp_path / "b.toml").write_text("seed = 7\n")
    assert command(["run", "--config", "a.toml"]).config.workers == 7
    assert command(["run", "--config", "b.toml"]).config.workers == 3
    with pytest.raises(SystemExit):
        main(["run", *QUICK])
    assert "write --engine process" in " ".join(capsys.readouterr().err.split())
    with pytest.raises(SystemExit):
        main(["compare", *QUICK, "--engine", "process"])
    assert "runs on the simulator" in " ".join(capsys.readouterr().err.split())
