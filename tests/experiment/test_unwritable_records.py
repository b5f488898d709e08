"""A run stops and its record cannot be written: the user still reads why it stopped."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import gradwire
from experiment.served_at_work import Stage, flags, nbytes_of
from gradwire.cli.ending import end_with
from gradwire.core.errors import LostError, StoppedError
from gradwire.experiment.processes.launch.children import LOST
from gradwire.experiment.processes.launch.signals import Signals
from gradwire.experiment.run.record import Record
from listing import live_glob


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    stage = Stage()
    yield stage
    stage.close()


def refuse_summary(folder: Path, pid: int) -> None:
    """No summary can be written by this process: its temporary name is taken by a folder."""
    (folder / f"summary.json.{pid}.tmp").mkdir()


def journal(folder: Path) -> Path | None:
    """Of server 0, once something was written to it."""
    found = live_glob(folder, "servers/2-*/journal-*.log")
    return found[-1] if found and nbytes_of(found[-1]) > 15_000 else None


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits files of other processes")
def test_why_a_server_stopped_is_said_though_the_record_cannot_be_written(stage, tmp_path):
    import resource

    folder = tmp_path / "run"
    settings = flags(synchronization="asp", steps=100_000, eval_every=100_000)
    with stage.run("--engine", "process", *settings, "--out", str(folder)) as play:
        play.until(lambda: journal(folder) is not None, "a journal")
        nodes = play.nodes()
        refuse_summary(folder, nodes["scheduler"])
        resource.prlimit(nodes["server 0"], resource.RLIMIT_FSIZE, (15_000, 15_000))
        code, said = play.end()
    assert code == 2, said
    assert f"error: cannot write {folder}/servers/2-" in said
    assert "File too large" in said


def test_notes_of_a_loss_are_shown(capfd):
    def lose(signals: Signals) -> None:
        error = LostError("server 0 was lost. Go on: gradwire run --resume p", 2)
        error.add_note("cannot write p/summary.json")
        raise error

    pid = os.fork()
    if not pid:
        end_with(lose)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == LOST
    said = capfd.readouterr().err
    assert "error: server 0 was lost. Go on: gradwire run --resume p\ncannot write p/sum" in said


def test_why_a_simulated_run_stopped_is_said_though_the_record_cannot_be_written(tmp_path):
    refuse_summary(tmp_path, os.getpid())
    with pytest.raises(StoppedError, match="crashed") as caught:
        gradwire.simulate(
            workers=2,
            model="mlp((4,))",
            batch_size=4,
            steps=6,
            compute="fixed(0.001)",
            threads=1,
            evaluation="sequential",
            faults=("crash(0, at=0.002)",),
            out=tmp_path,
        )
    (note,) = caught.value.__notes__
    assert f"cannot write {tmp_path}/summary.json: Is a directory" in note
    assert not Record(tmp_path).has_summary
