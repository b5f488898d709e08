"""Scores kept in files between runs."""

import os

import pytest
import torch

from gradwire.coding.polar import cache, monte_carlo
from gradwire.coding.polar.channel import bsc_table
from gradwire.coding.polar.construction import _free_positions

DAMAGES = ["shorter", "longer", "changed", "other", "empty", "folder", "pipe"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    where = tmp_path / "new" / "cache"
    monkeypatch.setenv("GRADWIRE_CACHE", str(where))
    return where


def answer(question: str, value: int, asked: list[str]) -> torch.Tensor:
    def compute() -> torch.Tensor:
        asked.append(question)
        return torch.full((5,), value)

    return cache.cached_tensor(question, 5, torch.int64, compute)


def test_what_was_computed_once_is_read(folder) -> None:
    asked: list[str] = []
    assert answer("one", 7, asked).tolist() == [7] * 5
    assert answer("one", 8, asked).tolist() == [7] * 5
    assert answer("two", 9, asked).tolist() == [9] * 5
    assert asked == ["one", "two"]
    assert len(list(folder.iterdir())) == 2  # and nothing that was being written


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_made_anew(folder, damage) -> None:
    asked: list[str] = []
    answer("one", 7, asked)
    (path,) = folder.iterdir()
    data = path.read_bytes()
    if damage == "folder":
        path.unlink()
        path.mkdir()
    elif damage == "pipe":  # nobody writes to it
        path.unlink()
        os.mkfifo(path)
    elif damage == "other":  # a whole file, but of another question
        answer("two", 8, asked)
        (other,) = (each for each in folder.iterdir() if each != path)
        other.replace(path)
    else:
        changed = data[:40] + bytes([data[40] ^ 1]) + data[41:]
        new = {"shorter": data[:-1], "longer": data + b"x", "changed": changed, "empty": b""}
        path.write_bytes(new[damage])
    assert answer("one", 9, asked).tolist() == [9] * 5
    if damage != "folder":
        assert answer("one", 10, asked).tolist() == [9] * 5


def test_a_folder_that_cannot_be_written_to_is_no_error(tmp_path, monkeypatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("GRADWIRE_CACHE", str(tmp_path / "file" / "below"))
    asked: list[str] = []
    assert answer("one", 7, asked).tolist() == [7] * 5
    assert answer("one", 8, asked).tolist() == [8] * 5


def test_where_files_are(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("GRADWIRE_CACHE", str(tmp_path))
    assert cache.folder() == tmp_path
    monkeypatch.setenv("GRADWIRE_CACHE", "")
    assert cache.folder() is None
    monkeypatch.delenv("GRADWIRE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache.folder() == tmp_path / "xdg" / "gradwire"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.folder() == tmp_path / ".cache" / "gradwire"


def test_constructions_are_kept(folder, monkeypatch) -> None:
    table = bsc_table(0.11)
    drawn = monte_carlo.entropies(64, table, groups=2)
    shortened = monte_carlo.entropies(64, table, groups=2, used=50)
    assert not torch.equal(drawn, shortened)
    _free_positions.cache_clear()
    free = _free_positions(64, 20, "tal_vardy")
    assert len(list(folder.iterdir())) == 3

    def fails(*_: object) -> torch.Tensor:
        raise AssertionError("computed again")

    monkeypatch.setattr(monte_carlo, "_sample_entropies", fails)
    monkeypatch.setattr("gradwire.coding.polar.tal_vardy.scores", fails)
    _free_positions.cache_clear()
    assert torch.equal(monte_carlo.entropies(64, table, groups=2), drawn)
    assert torch.equal(monte_carlo.entropies(64, table, groups=2, used=50), shortened)
    assert torch.equal(_free_positions(64, 20, "tal_vardy"), free)


def test_a_home_is_understood(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("GRADWIRE_CACHE", "~/kept")
    assert cache.folder() == tmp_path / "kept"
