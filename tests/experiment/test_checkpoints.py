"""Files of checkpoints: whole or not there, and nothing else is left."""

import errno
import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from gradwire.experiment.processes.state.checkpoints import Checkpoints
from gradwire.runtime.storage import files as storage
from gradwire.runtime.storage import sealed
from gradwire.runtime.storage.files import write_atomically
from gradwire.runtime.storage.sealed import Seal

STATE: dict[str, Any] = {"params": torch.arange(1 << 20), "rows": [{"step": 1}]}


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def full(*_: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("name", ["fsync", "replace"])
def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path, monkeypatch, name):
    path = tmp_path / "file"
    write_atomically(path, b"before")
    with monkeypatch.context() as patch:
        patch.setattr(storage.os, name, full)
        with pytest.raises(OSError, match="No space left"):
            write_atomically(path, b"after")
    assert files(tmp_path) == ["file"]
    assert path.read_bytes() == b"before"


def test_a_full_disk_is_called_one(tmp_path, monkeypatch):
    class Small(io.FileIO):
        def write(self, content: Any) -> int:
            if self.tell() + len(content) > 1 << 20:
                full()
            return super().write(content)

    monkeypatch.setattr(Path, "open", lambda path, mode: io.BufferedWriter(Small(path, mode)))
    with pytest.raises(OSError, match="No space left"):
        Checkpoints(tmp_path, 0).write(4, STATE)
    assert files(tmp_path) == []


def test_what_is_wrong_with_a_state_is_said(tmp_path):
    with pytest.raises(Exception, match="pickle"):
        sealed.save(tmp_path / "file", Seal("test"), {"function": lambda: None})
    assert files(tmp_path) == []


def test_a_checkpoint_is_written_with_no_copy_of_it_all(tmp_path, monkeypatch):
    largest = 0

    class Looking(io.FileIO):
        def write(self, content: Any) -> int:
            nonlocal largest
            largest = max(largest, len(content))
            return super().write(content)

    monkeypatch.setattr(Path, "open", lambda path, mode: io.BufferedWriter(Looking(path, mode)))
    part = torch.zeros(1 << 17)
    Checkpoints(tmp_path, 0).write(4, {str(i): part + i for i in range(8)})
    assert largest <= part.nbytes
    monkeypatch.undo()
    assert Checkpoints(tmp_path, 0).load().states[4]["3"].eq(3).all()


@pytest.mark.parametrize("how", ["load", "remove_old"])
def test_what_killed_processes_left_is_removed(tmp_path, how):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    mine, other = Checkpoints(tmp_path, 1), Checkpoints(tmp_path, 11)
    for step in (4, 8):
        mine.write(step, {"step": step})
        other.write(step, {"step": step})
    folder = tmp_path / "checkpoints"
    (folder / "step-000012").mkdir()
    left = (folder / f"step-000012/rank-1.pt.{ended.pid}.tmp",)
    left += (folder / f"step-000008/rank-1.pt.{os.getpid()}.tmp",)  # as pids come again
    kept = (folder / f"step-000008/rank-1.pt.{os.getppid()}.tmp",)  # it may be at it
    kept += (folder / f"step-000008/rank-11.pt.{ended.pid}.tmp",)
    for path in left + kept:
        path.touch()
    getattr(mine, how)()
    assert [path.exists() for path in left + kept] == [False, False, True, True]
    assert sorted(path.name for path in folder.iterdir()) == ["step-000004", "step-000008"]
    assert sorted(mine.load().states) == sorted(other.load().states) == [4, 8]


def test_folders_may_vanish_while_a_rank_looks_for_its_files(tmp_path, monkeypatch):
    """Another rank removes an old checkpoint at that very moment."""
    own, other = Checkpoints(tmp_path, 0), Checkpoints(tmp_path, 1)
    other.write(10, {"step": 10})
    own.write(20, {"step": 20})
    scan = os.scandir

    def remove_then_scan(path):
        if "step-000010" in str(path):
            other.remove_after(None)
        return scan(path)

    monkeypatch.setattr(os, "scandir", remove_then_scan)
    assert list(own.load().states) == [20]
    own.remove_old()
    assert list(own.load().states) == [20]
