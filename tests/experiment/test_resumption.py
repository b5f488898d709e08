"""Runs whose files are damaged or missing: nothing is loaded that was not written, nothing begins
again in silence."""

import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import gradwire
from gradwire.core.errors import GradwireWarning
from gradwire.experiment.processes.resumption import choose_checkpoint
from gradwire.experiment.processes.state.checkpoints import Checkpoints
from gradwire.experiment.processes.state.model_snapshots import ModelSnapshots
from gradwire.experiment.run.record import Record
from gradwire.runtime.storage.files import DamagedError
from gradwire.runtime.storage.text import open_toml, seal_toml

TINY: dict[str, Any] = {
    "workers": 2,
    "model": "mlp((4,))",
    "batch_size": 4,
    "steps": 6,
    "eval_every": 2,
    "compute": "fixed(0.001)",
    "threads": 1,
    "evaluation": "sequential",
    "compression": "ef(topk(0.1))",
}


def flip_bits(path: Path, count: int, seed: int, check: Callable[[], None]) -> None:
    """Changes one bit at a time."""
    raw = path.read_bytes()
    for bit in random.Random(seed).sample(range(8 * len(raw)), count):
        changed = bytearray(raw)
        changed[bit // 8] ^= 1 << (bit % 8)
        path.write_bytes(changed)
        check()
    path.write_bytes(raw)


def no_words(text: str) -> None:
    pytest.fail(text)


# Single bits.


def test_no_checkpoint_of_the_simulator_with_one_bit_changed_is_loaded(tmp_path):
    gradwire.simulate(**TINY, out=tmp_path)
    record = Record(tmp_path)

    def check() -> None:
        with pytest.raises(DamagedError, match=r"checkpoint\.pt .*--restart"):
            record.resume(has_checkpoints=True, may_restart=False, say=no_words)

    flip_bits(tmp_path / "checkpoint.pt", 200, 1, check)
    assert record.resume(has_checkpoints=True, may_restart=False, say=no_words) is not None


def test_no_checkpoint_of_a_rank_with_one_bit_changed_is_loaded(tmp_path):
    checkpoints = Checkpoints(tmp_path, 3)
    checkpoints.write(120, {"params": torch.linspace(-1, 1, 500), "step": 120})
    path = tmp_path / "checkpoints" / "step-000120" / "rank-3.pt"

    def check() -> None:
        states, (skipped,) = checkpoints.load()
        assert not states
        assert str(path) in skipped

    flip_bits(path, 200, 2, check)
    assert list(checkpoints.load().states) == [120]
    assert checkpoints.load().skipped == []


def test_a_checkpoint_of_another_rank_or_step_is_not_used(tmp_path):
    checkpoints = Checkpoints(tmp_path, 3)
    for step in (4, 8):
        checkpoints.write(step, {"step": step})
    Checkpoints(tmp_path, 2).write(4, {"step": 4})
    folder = tmp_path / "checkpoints"
    (folder / "step-000008" / "rank-3.pt").replace(folder / "step-000004" / "rank-3.pt")
    (folder / "step-000008" / "rank-3.pt").write_bytes(
        (folder / "step-000004" / "rank-2.pt").read_bytes()
    )
    states, skipped = checkpoints.load()
    assert not states
    assert len(skipped) == 2


def test_a_tensor_that_was_kept_on_disk_and_is_damaged_is_refused(tmp_path):
    snapshots = ModelSnapshots(tmp_path)
    snapshots.save(10, [torch.ones(8), torch.zeros(8)])
    snapshots._file.seek(40)
    snapshots._file.write(b"\1")
    with pytest.raises(DamagedError, match="step 10 is damaged"):
        snapshots.load(10)


# The simulator.


@pytest.fixture
def interrupted(tmp_path) -> Path:
    """A run that was interrupted after its second evaluation."""

    def interrupt(row: Any, steps: int) -> None:
        if row["step"] == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        gradwire.simulate(**TINY, out=tmp_path / "run", progress=interrupt)
    return tmp_path / "run"


@pytest.mark.parametrize("how", ["damaged", "missing", "older"])
def test_a_simulated_run_begins_again_only_if_the_user_allows_it(interrupted, how):
    path = interrupted / "checkpoint.pt"
    if how == "damaged":
        path.write_bytes(path.read_bytes()[:-1])
    elif how == "missing":
        path.unlink()
    else:
        torch.save({"step": 4}, path)
    why = {"damaged": "is damaged", "missing": "is missing", "older": "by an older gradwire"}[how]
    before = {file.name: file.read_bytes() for file in interrupted.iterdir()}
    with pytest.raises(ValueError, match=rf"checkpoint\.pt .*{why}.* --restart"):
        gradwire.resume(interrupted)
    assert {file.name: file.read_bytes() for file in interrupted.iterdir()} == before
    with pytest.warns(GradwireWarning, match=rf"{why}.*: the run begins again from step 0"):
        resumed = gradwire.resume(interrupted, restart=True)
    assert torch.equal(resumed.params, gradwire.simulate(**TINY).params)
    assert [row["step"] for row in resumed.metrics] == [2, 4, 6]


@pytest.mark.parametrize("num_rows", [0, 1])
def test_a_run_that_had_no_checkpoint_yet_begins_again_and_says_so(interrupted, num_rows):
    """It was stopped before its first evaluation, or between that and the checkpoint."""
    (interrupted / "checkpoint.pt").unlink()
    lines = (interrupted / "metrics.jsonl").read_text().splitlines(keepends=True)
    (interrupted / "metrics.jsonl").write_text("".join(lines[:num_rows]))
    said: list[str] = []
    resumed = gradwire.resume(interrupted, say=said.append)
    (text,) = said
    assert text == f"{interrupted} has no checkpoint yet: the run begins again from step 0"
    assert [row["step"] for row in resumed.metrics] == [2, 4, 6]


def test_damaged_metrics_are_said_and_written_again(interrupted):
    path = interrupted / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text(lines[0] + lines[1].replace("step", "stop") + '{"torn')
    said: list[str] = []
    resumed = gradwire.resume(interrupted, say=said.append)
    (text,) = said
    assert f"{path} is damaged in line 2" in text
    assert path.read_text().splitlines(keepends=True)[:2] == lines
    assert len(resumed.metrics) == 3
    assert not Record(interrupted).finished_metrics()
    path.write_text(path.read_text().replace("6", "7"))
    assert f"{path} was changed or damaged" in Record(interrupted).finished_metrics()


@pytest.mark.parametrize("setting", ["engine", "seed", "workers"])
def test_a_shortened_configuration_is_refused(interrupted, setting):
    path = interrupted / "config.toml"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if not line.startswith(f"{setting} =")))
    with pytest.raises(ValueError, match=r"config\.toml .* checksum does not fit") as caught:
        gradwire.resume(interrupted)
    assert "Put it back" in str(caught.value)
    assert "gradwire run --config" not in str(caught.value)
    with pytest.warns(GradwireWarning, match=rf"{path} was changed or damaged .*defaults"):
        gradwire.Config.from_toml(path)
    path.write_text("".join(lines[:-1]))
    with pytest.raises(ValueError, match=r"config\.toml has no checksum.*older gradwire") as caught:
        gradwire.resume(interrupted)
    assert "gradwire run --config" not in str(caught.value)
    assert gradwire.Config.from_toml(path).workers == 2  # as a file of settings it is fine


def test_a_configuration_as_a_run_wrote_it_needs_no_warning(interrupted):
    path = interrupted / "config.toml"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert gradwire.Config.from_toml(path) == Record(interrupted).config


def test_a_whole_configuration_of_another_version_serves_a_new_run(interrupted):
    path = interrupted / "config.toml"
    lines = open_toml(path).splitlines(keepends=True)
    path.write_text(seal_toml("".join(line for line in lines if not line.startswith("seed ="))))
    with pytest.raises(DamagedError, match=rf"has no seed\. .*gradwire run --config {path}"):
        gradwire.resume(interrupted)


def test_a_damaged_summary_is_named(tmp_path):
    gradwire.simulate(**TINY, out=tmp_path)
    path = tmp_path / "summary.json"
    path.write_text(path.read_text().replace('"steps": 6', '"steps": 7'))
    with pytest.raises(DamagedError, match=r"summary\.json was changed or damaged.*Remove it"):
        _ = Record(tmp_path).is_finished


def test_what_is_left_of_a_run_is_not_taken_for_the_beginning_of_another(tmp_path):
    gradwire.simulate(**TINY, out=tmp_path)
    (tmp_path / "config.toml").unlink()
    with pytest.raises(ValueError, match=r"already holds metrics\.jsonl of a run, without its"):
        gradwire.simulate(**TINY, out=tmp_path)


# Real processes: from where they go on.


def offer(*steps: int, skipped: tuple[str, ...] = (), **others: Any) -> dict[str, Any]:
    usual = {"steps": list(steps), "skipped": list(skipped), "lost": [], "has_updates": False}
    return {**usual, **others}


def chosen(*reports: Any, **others: Any) -> dict[str, Any]:
    usual = {"is_resumed": True, "had_complete": True, "may_restart": False}
    return choose_checkpoint(
        reports,
        range(len(reports)),
        lambda rank: f"rank {rank}",
        folder=Path("runs/x"),
        **{**usual, **others},
    )


def test_the_newest_checkpoint_that_all_have_counts():
    decision = chosen(offer(4, 8), offer(4, skipped=("B is damaged",)))
    assert decision == {
        "step": 4,
        "failure": "",
        "notices": ["rank 1: B is damaged; it is not used"],
    }


def test_without_one_it_begins_again_only_if_the_user_allows_it():
    reports = (offer(4, 8), offer(skipped=("A is damaged", "B is damaged")), offer())
    refused = chosen(*reports)
    for words in (
        "rank 1: A is damaged",
        "rank 1: B is damaged",
        "rank 2 has no file of a checkpoint",
        "gradwire run --resume runs/x --restart",
    ):
        assert words in refused["failure"]
    allowed = chosen(*reports, may_restart=True)
    assert (allowed["step"], allowed["failure"]) == (None, "")
    assert "rank 1: A is damaged; it is not used" in allowed["notices"]
    assert allowed["notices"][-1].endswith("the run begins again from step 0")


def test_files_of_different_steps_are_no_checkpoint():
    assert "files of different steps" in chosen(offer(4), offer(8))["failure"]


@pytest.mark.parametrize("reports", [(offer(), offer()), (offer(4), offer())])
def test_before_the_first_checkpoint_is_complete_it_begins_again_and_says_so(reports):
    decision = chosen(*reports, had_complete=False)
    assert (decision["step"], decision["failure"]) == (None, "")
    assert decision["notices"] == ["there is no checkpoint yet: the run begins again from step 0"]


def test_a_damaged_file_is_a_loss_also_if_nobody_knows_whether_it_was_complete():
    decision = chosen(offer(4), offer(skipped=("A is damaged",)), had_complete=False)
    assert "rank 1: A is damaged" in decision["failure"]


def test_servers_go_on_together_or_not_at_all():
    some = chosen(offer(0, has_updates=True), offer(), had_complete=False)
    assert "rank 1 has no file of a checkpoint" in some["failure"]
    fresh = chosen(offer(0), offer(), had_complete=False)  # nobody had pushed yet
    assert (fresh["step"], fresh["failure"]) == (None, "")
    lost = chosen(offer(0), offer(0, lost=["J is damaged"]), had_complete=False)
    assert lost["failure"] == (
        "runs/x: updates of servers cannot be read back. rank 1: J is damaged. Put them back as "
        "they were, or continue from the older state, without those updates: "
        "gradwire run --resume runs/x --restart"
    )
    allowed = chosen(offer(0), offer(0, lost=["J is damaged"]), may_restart=True)
    assert (allowed["step"], allowed["failure"]) == (0, "")
    assert allowed["notices"] == [
        "rank 1: J is damaged; it is not used",
        "rank 1 continues from an older state: the updates since then are lost",
    ]


def test_a_new_run_says_nothing():
    decision = chosen(offer(), offer(), is_resumed=False, had_complete=False)
    assert decision == {"step": None, "failure": "", "notices": []}
