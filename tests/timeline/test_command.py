"""`gradwire timeline`."""

import json

import pytest

import gradwire
from gradwire.cli import main

TASK = ["--model", "mlp((16,))", "--batch-size", "4", "--workers", "2"]
SMALL = [*TASK, "--compute", "fixed(0.001)"]
PNG = b"\x89PNG\r\n"


def test_it_draws_and_prints(tmp_path, capsys):
    picture, trace = tmp_path / "a.png", tmp_path / "a.json"
    main(["timeline", *SMALL, "--scheduling", "wfbp", "--out", str(picture), "--trace", str(trace)])
    assert picture.read_bytes().startswith(PNG)
    lanes = {event.get("cat") for event in json.loads(trace.read_text())["traceEvents"]}
    assert {"compute", "encode", "decode", "update", "send", "receive"} <= lanes
    printed = capsys.readouterr().out
    assert "exposed" in printed
    assert "Critical path: compute 2 ms" in printed


def test_one_panel_for_each_synchronization(tmp_path, capsys):
    """With asp the fast worker does not wait for the slow one."""
    picture = tmp_path / "b.png"
    straggler = ["--stragglers", "always((0,), slowdown=3.0)", "--bandwidth", "10Gbit"]
    settings = [*SMALL, *straggler, "--architecture", "parameter_server", "--json"]
    both = ["--synchronization", "bsp", "asp", "--out", str(picture)]
    main(["timeline", *settings, *both])
    assert picture.read_bytes().startswith(PNG)
    figures = json.loads(capsys.readouterr().out)
    assert list(figures) == ["bsp", "asp"]
    shares = {name: row["workers"][1]["exposed_share"] for name, row in figures.items()}
    assert shares["bsp"] > 0.5 > 2 * shares["asp"]


def test_a_recorded_run_is_drawn(tmp_path, capsys):
    gradwire.simulate(
        model="mlp((16,))",
        workers=2,
        steps=4,
        compute="fixed(0.001)",
        record_spans=True,
        out=tmp_path / "run",
    )
    main(["timeline", "--run", str(tmp_path / "run"), "--out", str(tmp_path / "c.png"), "--json"])
    (row,) = json.loads(capsys.readouterr().out).values()
    assert row["critical_path_s"]["compute"] == pytest.approx(0.002)


def test_spans_need_a_folder():
    with pytest.raises(ValueError, match="give a folder"):
        gradwire.simulate(record_spans=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--run", "nowhere"], "there is no folder nowhere"),
        (["--run", "nowhere", "--workers", "3"], "give no settings"),
        (["--steps-shown", "0"], "--steps-shown must be at least 1"),
        (["--out", "a.gif"], "--out takes a .png, .pdf or .svg file"),
        (["--out", "nowhere/a.png"], "there is no folder nowhere"),
        (["--synchronization", "bsp", "asp", "--trace", "a.json"], "--trace takes one run"),
        (["--synchronization"], "--synchronization needs at least one value"),
    ],
)
def test_mistakes_are_explained(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        main(["timeline", *arguments])
    assert end.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_real_processes(tmp_path, capfd):
    """Both ranks compute and send; their messages have been matched."""
    picture, trace = tmp_path / "d.png", tmp_path / "d.json"
    real = ["--engine", "process", "--scheduling", "wfbp", "--trace", str(trace)]
    main(["timeline", *TASK, *real, "--out", str(picture), "--json"])
    assert picture.read_bytes().startswith(PNG)
    events = json.loads(trace.read_text())["traceEvents"]
    seen = {(event["pid"], event["cat"]) for event in events if event["ph"] == "X"}
    lanes = ("compute", "encode", "send", "receive", "update")
    assert seen >= {(rank, lane) for rank in (0, 1) for lane in lanes}
    names = {event["name"] for event in events if event.get("cat") == "receive"}
    assert any(name.endswith("weight from 1") for name in names)
    (row,) = json.loads(capfd.readouterr().out).values()  # the run's own result is not there
    assert sum(row["critical_path_s"].values()) == pytest.approx(row["window_s"])
    assert all(worker["busy_compute"] > 0 for worker in row["workers"])


@pytest.mark.slow
def test_native_collectives_are_on_the_network(tmp_path, capfd):
    trace = tmp_path / "e.json"
    real = ["--engine", "process", "--native", "--scheduling", "wfbp", "--trace", str(trace)]
    main(["timeline", *TASK, *real, "--compression", "identity", "--out", str(tmp_path / "e.png")])
    events = json.loads(trace.read_text())["traceEvents"]
    names = {
        (event["pid"], event["cat"])
        for event in events
        if event["ph"] == "X" and event["name"].startswith("all-reduce ")
    }
    assert names == {(rank, lane) for rank in (0, 1) for lane in ("send", "receive")}


def test_the_architecture_is_one_on_which_all_synchronizations_run(tmp_path, capsys):
    both = ["--synchronization", "bsp", "ssp(2)", "localsgd(4)", "--out", str(tmp_path / "d.png")]
    main(["timeline", *SMALL, *both, "--json"])
    assert list(json.loads(capsys.readouterr().out)) == ["bsp", "ssp(2)", "localsgd(4)"]
