"""The report: what is in the page, and what is refused."""

import base64
import hashlib
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from statistics import mean
from typing import Any

import pandas
import pytest

import gradwire
from gradwire.experiment.report.page import report_html, write_report
from gradwire.experiment.report.page.content import content
from gradwire.experiment.report.page.page import _FILES, _LICENCE, _SCRIPTS, embedded
from gradwire.experiment.run.record import Record
from gradwire.experiment.studies.compare import combinations, compare
from gradwire.experiment.sweep.results import write_failure
from report import report_runs

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    return report_runs.make_runs(tmp_path_factory.mktemp("report") / "sweep")


@pytest.fixture
def one(tmp_path) -> Path:
    gradwire.simulate(out=tmp_path / "one", **report_runs.SMALL)
    return tmp_path / "one"


def data_of(page: str) -> Any:
    found = re.search(r'<script id="data" type="application/json">(.*?)</script>', page, re.DOTALL)
    assert found
    return json.loads(found[1])


def test_the_page_is_written_with_its_folder_and_replaced(runs, tmp_path):
    out = tmp_path / "new" / "page.html"
    assert write_report([runs], out, title="First") == out
    first = out.read_text()
    write_report([str(runs)], str(out), title="Second")
    assert "<h1>First</h1>" in first
    assert "<h1>Second</h1>" in out.read_text()
    assert report_html([runs], "Second") == out.read_text()  # the same runs, the same bytes


def test_nothing_in_the_page_is_loaded_and_scripts_have_the_hashes_of_its_policy(runs):
    page = report_html([runs])
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    assert policy
    assert policy[1].startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe-inline" not in policy[1].partition("style-src")[0]
    scripts = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    assert len(scripts) == 1 + len(_SCRIPTS)
    for script in scripts:
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy[1]
    markup = re.sub(r"<(script|style).*?</\1>|<!--.*?-->", "", page, flags=re.DOTALL)
    assert re.findall(r'(?:src|href)="([^"]*)"', markup) == ["data:,", "#methods"]
    assert "sourceMappingURL" not in page
    assert "Permission is hereby granted" in page  # the licence travels with what it is about


def test_text_of_a_user_cannot_become_markup(one):
    page = report_html([one], title="</title><script>alert(1)</script>")
    assert "<script>alert(1)" not in page
    assert embedded({"a": "</script><!--"}) == '{"a":"\\u003c/script>\\u003c!--"}'
    assert data_of(page)["title"] == "</title><script>alert(1)</script>"


def test_methods_have_the_names_and_the_order_of_the_sweep(runs):
    (task,) = content([runs])["tasks"]
    assert task["name"] == "mlp((8,)) on digits"
    assert [method["name"] for method in task["methods"]] == list(report_runs.METHODS)
    assert all(len(method["runs"]) == 2 for method in task["methods"])
    assert task["methods"][0]["settings"] == {"compression": "identity", "synchronization": "bsp"}
    assert task["shared"]["workers"] == "4"
    assert "seed" not in task["shared"]


def test_figures_are_those_of_the_records(runs):
    (task,) = content([runs])["tasks"]
    methods = {method["name"]: method for method in task["methods"]}
    frame = gradwire.load(runs / "runs")
    for name, compression in (("fp16", "fp16"), ("largest 5%", "ef(topk(0.05))")):
        rows = frame[frame.compression == compression].sort_values("seed")
        own = methods[name]["runs"]
        assert [run["score"] for run in own] == pytest.approx(rows.test_accuracy.tolist())
        sent = rows.bytes_per_worker_step.mean()
        assert mean(run["bytes_per_worker_step"] for run in own) == pytest.approx(sent)
        for run in own:
            own_sent = run["bytes_per_worker_step"]
            assert sum(run["by_tensor"].values()) == pytest.approx(own_sent)
        whole = frame[(frame.compression == "identity") & (frame.synchronization == "bsp")]
        ratio = whole.bytes_sent.mean() / rows.bytes_sent.mean()
        assert methods[name]["ratio_fp32"] == pytest.approx(ratio)
        for network in own[0]["courses"][0]["networks"]:
            column = rows[f"virtual_time_s at {network['name']}"]
            assert network["times"][-1] == pytest.approx(column.tolist()[0])
    assert methods["fp16"]["ratio_fp16"] == 1.0
    assert methods["fp32"]["base_fp16"] == "fp16"
    rates = [network["rate"] for network in methods["fp32"]["runs"][0]["courses"][0]["networks"]]
    assert sorted(rates) == [10e6, 100e6, 1e9]


def test_a_short_recording_is_the_timeline_of_its_method(runs):
    (task,) = content([runs])["tasks"]
    timelines = {method["name"]: method["timeline"] for method in task["methods"]}
    found = timelines.pop("fp32")
    assert not any(timelines.values())
    assert found["nodes"] == [f"worker {rank}" for rank in range(4)]
    assert [step["step"] for step in found["steps"]] == [1, 2, 3]
    for step in found["steps"]:
        assert all(0 <= start <= end <= step["window_s"] for *_, start, end in step["spans"])
        assert sum(step["critical_path_s"].values()) == pytest.approx(step["window_s"])


def test_a_recording_that_cannot_be_read_has_a_reason(tmp_path):
    folder = tmp_path / "run"
    gradwire.simulate(out=folder, **report_runs.SMALL | {"what_if": (), "record_spans": True})
    (folder / "spans-1.jsonl").write_text("nonsense\n")
    (task,) = content([folder])["tasks"]
    assert "spans-1.jsonl" in task["methods"][0]["timeline"]["reason"]


def test_runs_of_another_task_are_a_task_of_their_own(runs, tmp_path):
    gradwire.simulate(out=tmp_path / "other", **report_runs.SMALL | {"model": "mlp((4,))"})
    found = content([runs, tmp_path / "other"])["tasks"]
    assert [task["name"] for task in found] == ["mlp((8,)) on digits", "mlp((4,)) on digits"]
    assert [len(task["methods"]) for task in found] == [4, 1]


def test_a_folder_given_twice_counts_once(runs):
    assert content([runs, runs / "runs" / "run-0"]) == content([runs])


def test_methods_of_one_name_are_told_apart_by_as_few_settings_as_it_takes(tmp_path):
    for number, (batch_size, steps) in enumerate(((8, 4), (16, 6))):
        more = {"batch_size": batch_size, "steps": steps, "compression": "fp16"}
        gradwire.simulate(out=tmp_path / str(number), **report_runs.SMALL | more)
    (task,) = content([tmp_path])["tasks"]
    names = [method["name"] for method in task["methods"]]
    assert names == ["fp16, batch size 8", "fp16, batch size 16"]


def test_failed_runs_have_their_reason_and_unfinished_ones_are_counted(runs, tmp_path):
    settings = report_runs.SMALL | {"compression": "ef(sign)"}
    for seed in (0, 1):
        run = gradwire.simulate(out=tmp_path / f"seed-{seed}", seed=seed, **settings)
    write_failure(tmp_path / "failed", run.config, "diverged: nan")
    (tmp_path / "seed-1" / "summary.json").unlink()
    found = content([tmp_path])
    (method,) = found["tasks"][0]["methods"]
    assert found["unfinished"] == 1
    assert method["failures"] == ["diverged: nan"]
    assert [run["seed"] for run in method["runs"]] == [0]
    assert [run["seed"] for run in method["failed"]] == [1]


def test_a_method_without_any_result_is_in_the_page(one, tmp_path):
    config = Record(one).config
    write_failure(tmp_path / "failed", config, "refused: for a reason")
    (task,) = content([tmp_path / "failed"])["tasks"]
    assert task["methods"][0]["runs"] == []
    assert "refused: for a reason" in report_html([tmp_path / "failed"])


def test_a_method_whose_course_depends_on_the_network_has_one_for_each(tmp_path):
    settings = {**report_runs.SMALL, "architecture": "parameter_server", "scheduling": "sequential"}
    base = gradwire.Config(**settings)
    configs = combinations(base, synchronization=["asp"])
    compare(configs, tmp_path / "compared")
    (task,) = content([tmp_path / "compared"])["tasks"]
    asp = next(method for method in task["methods"] if method["name"].startswith("asp"))
    courses = asp["runs"][0]["courses"]
    assert [[n["name"] for n in course["networks"]] for course in courses] == [
        ["100Mbit"],
        ["10Mbit"],
        ["1Gbit"],
    ]
    frame = gradwire.load(tmp_path / "compared")
    (row,) = frame[frame.synchronization == "asp"].to_dict("records")
    for course in courses:
        (network,) = course["networks"]
        assert network["times"][-1] == pytest.approx(row[f"virtual_time_s at {network['name']}"])
    assert any("bytes counted for each header" in note for note in asp["notes"])


def test_runs_of_real_processes_have_measured_times(one):
    record = Record(one)
    summary, path = record.summary, one / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        row["time_s"] = row.pop("virtual_time_s")
        del row["virtual_times_s"]
    summary["training_time_s"] = summary.pop("virtual_time_s")
    del summary["virtual_times_s"]
    record.rewind(rows)
    record.finish(summary)
    (task,) = content([one])["tasks"]
    (run,) = task["methods"][0]["runs"]
    assert run["training_time_s"] == pytest.approx(summary["training_time_s"])
    assert run["courses"][0]["networks"] == []
    assert run["courses"][0]["measured"] == pytest.approx([row["time_s"] for row in rows])
    assert isinstance(gradwire.load(one), pandas.DataFrame)


def test_nodes_with_bandwidths_of_their_own_are_on_no_slider(tmp_path):
    settings = {**report_runs.SMALL, "workers": 2, "what_if": (), "bandwidth": "1Gbit,10Mbit"}
    gradwire.simulate(out=tmp_path / "run", **settings)
    (task,) = content([tmp_path])["tasks"]
    (network,) = task["methods"][0]["runs"][0]["courses"][0]["networks"]
    assert (network["name"], network["rate"]) == ("1Gbit,10Mbit", None)


def test_folders_without_a_result_are_named(one, tmp_path):
    (tmp_path / "empty").mkdir()
    (one / "summary.json").unlink()
    with pytest.raises(ValueError, match=r"there is no folder .*nowhere"):
        report_html([tmp_path / "nowhere"])
    with pytest.raises(ValueError, match=r"empty has no run in it\. Name the folder of a run"):
        report_html([tmp_path / "empty"])
    with pytest.raises(ValueError, match=r"one has no run that has ended: the run in it is unfin"):
        report_html([one])
    with pytest.raises(ValueError, match=r"at least one folder"):
        report_html([])


def test_a_folder_as_page_is_refused(runs, tmp_path):
    with pytest.raises(ValueError, match=r"is a folder: name a file, such as .*report\.html"):
        write_report([runs], tmp_path)


def test_all_files_of_the_page_are_used_and_packaged():
    names = {path.name for path in _FILES.iterdir()}
    others = {"page.html", "page.css", "chart.umd.min.js", _LICENCE}
    assert names == {*_SCRIPTS, *others}
    setup = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = setup["tool"]["setuptools"]["package-data"]["gradwire"]
    assert "experiment/report/html/*" in patterns


def test_the_command_writes_the_page_and_explains_mistakes(runs, tmp_path):
    def call(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "gradwire", "report", *arguments],
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )

    done = call(str(runs / "runs"), str(runs / "spans"), "-o", "page.html", "--title", "A & B")
    assert (done.returncode, done.stdout) == (0, "Report: page.html\n"), done.stderr
    assert "<h1>A &amp; B</h1>" in (tmp_path / "page.html").read_text()
    nothing = call()
    assert nothing.returncode == 2
    assert "give folders with runs: gradwire report runs/NAME" in nothing.stderr
