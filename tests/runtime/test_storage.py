"""Files with a checksum: what is read is what was written, or an error that names the file."""

import errno
import io
import os
import random
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from gradwire.experiment.run.record import Record
from gradwire.runtime.durable import journal
from gradwire.runtime.durable.journal import Journal
from gradwire.runtime.replay.order import Recorder
from gradwire.runtime.storage import sealed, text
from gradwire.runtime.storage.files import (
    DamagedError,
    FileError,
    explain,
    make_folder,
    naming,
    write_atomically,
)
from gradwire.runtime.storage.sealed import Seal

SEAL = Seal("test", 7, "rank 1")
STATE: dict[str, Any] = {"params": torch.linspace(-1, 1, 300), "rows": [{"step": 1, "loss": 0.5}]}


def flipped(raw: bytes, bit: int) -> bytes:
    changed = bytearray(raw)
    changed[bit // 8] ^= 1 << (bit % 8)
    return bytes(changed)


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "file"
    sealed.save(path, SEAL, STATE)
    found = sealed.load(path, SEAL)
    assert torch.equal(found["params"], STATE["params"])
    assert found["rows"] == STATE["rows"]


def test_a_file_with_one_bit_changed_is_never_loaded(tmp_path: Path) -> None:
    path = tmp_path / "file"
    sealed.save(path, SEAL, STATE)
    raw = path.read_bytes()
    rng = random.Random(1)
    bits = [*range(8 * 64), *rng.sample(range(8 * 64, 8 * len(raw)), 200)]  # all of the header
    for bit in bits:
        path.write_bytes(flipped(raw, bit))
        with pytest.raises(ValueError, match=r"file (is|was) .*"):
            sealed.load(path, SEAL)
    for length in (0, 3, 64, 100, len(raw) - 1):
        path.write_bytes(raw[:length])
        with pytest.raises(DamagedError, match="is damaged"):
            sealed.load(path, SEAL)
    path.write_bytes(raw + b"\0")
    with pytest.raises(DamagedError, match="is damaged"):
        sealed.load(path, SEAL)


@pytest.mark.parametrize(
    ("seal", "message"),
    [
        (SEAL._replace(number=8), "is test 7, not test 8"),
        (SEAL._replace(kind="other"), "is test 7, not other 7"),
        (SEAL._replace(owner="rank 2"), "of another job or rank"),
    ],
)
def test_a_file_in_the_place_of_another_is_refused(
    tmp_path: Path, seal: Seal, message: str
) -> None:
    sealed.save(tmp_path / "file", SEAL, STATE)
    with pytest.raises(ValueError, match=message):
        sealed.load(tmp_path / "file", seal)


def test_files_of_older_versions_are_named(tmp_path: Path) -> None:
    path = tmp_path / "file"
    torch.save(STATE, path)
    with pytest.raises(DamagedError, match="file was written by an older gradwire"):
        sealed.load(path, SEAL)
    path.write_bytes(b"GWST" + bytes(100))
    with pytest.raises(DamagedError, match="file was written by an older gradwire"):
        sealed.load(path, SEAL)


# Text.


def test_toml_with_any_bit_changed_or_any_line_missing_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    whole = text.seal_toml('a = 1\nb = "x"\n')
    path.write_text(whole)
    assert text.open_toml(path) == 'a = 1\nb = "x"\n'
    for bit in range(8 * len(whole)):
        path.write_bytes(flipped(whole.encode(), bit))
        with pytest.raises(DamagedError, match=r"config\.toml"):
            text.open_toml(path)
    lines = whole.splitlines(keepends=True)
    for number in range(len(lines)):
        path.write_text("".join(lines[:number] + lines[number + 1 :]))
        with pytest.raises(DamagedError, match=r"config\.toml"):
            text.open_toml(path)
    path.write_text(whole + "c = 3\n")
    with pytest.raises(DamagedError, match="does not fit"):
        text.open_toml(path)


def test_json_with_any_bit_changed_is_refused_or_the_same(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    values = {"x": 0.1, "by": [[1, 2], [3, 4]], "name": "run", "nothing": None}
    path.write_text(text.seal_json(values))
    assert text.open_json(path) == values
    raw, num_same = path.read_bytes(), 0
    for bit in range(8 * len(raw)):
        path.write_bytes(flipped(raw, bit))
        found = values  # also if only white space has changed
        with suppress(DamagedError):
            found = text.open_json(path)
            num_same += 1
        assert found == values
    assert num_same < len(raw)


def test_lines_that_are_damaged_missing_or_in_another_order_are_noticed() -> None:
    seal = text.LineSeal()
    lines = [seal.seal(f'["line",{number}]').removesuffix("\n") for number in range(4)]

    def num_opened(some: list[str]) -> int:
        seal = text.LineSeal()
        return next((n for n, line in enumerate(some) if seal.open(line) is None), len(some))

    assert num_opened(lines) == 4
    assert num_opened([lines[0], lines[2], lines[1], lines[3]]) == 1
    assert num_opened([*lines[:2], lines[3]]) == 2
    for bit in range(8 * len(lines[2])):
        damaged = flipped(lines[2].encode(), bit).decode("latin-1")
        assert num_opened([*lines[:2], damaged, lines[3]]) == 2


# What the operating system refuses.


def test_a_full_disk_names_the_file_and_what_to_do(tmp_path: Path, monkeypatch) -> None:
    class Full(io.FileIO):
        def write(self, content: Any) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "open", lambda path, mode: io.BufferedWriter(Full(path, mode)))
    for write in (
        lambda path: write_atomically(path, b"content"),
        lambda path: sealed.save(path, SEAL, STATE),
    ):
        with pytest.raises(FileError) as caught:
            write(tmp_path / "file")
        assert str(caught.value) == (
            f"cannot write {tmp_path / 'file'}: No space left on device. "
            "Free some space there; a run continues with --resume."
        )
        assert caught.value.errno == errno.ENOSPC
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs the device /dev/full")
def test_a_device_that_is_full_is_named() -> None:
    path = Path("/dev/full")
    words = r"cannot write /dev/full: No space left on device\. Free"
    with pytest.raises(FileError, match=words), naming(path), path.open("w") as file:
        file.write("x")


def test_a_file_in_the_place_of_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "taken").touch()
    for folder in (tmp_path / "taken", tmp_path / "taken" / "inside"):
        with pytest.raises(FileError, match=r"taken: .*choose another folder"):
            make_folder(folder)


def test_errors_of_the_system_are_explained(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="directory") as caught:
        tmp_path.read_bytes()
    assert explain(caught.value) == (
        f"cannot use {tmp_path}: Is a directory. There is a folder in the place of a file; choose "
        "another name."
    )
    assert explain(ValueError("as it is")) == "as it is"
    assert explain(OSError("as it is")) == "as it is"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs the device /dev/full")
def test_an_order_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    path = tmp_path / "order-0.jsonl"
    path.symlink_to("/dev/full")
    with pytest.raises(FileError, match=rf"cannot write {path}: No space left on device"):
        Recorder(path, 0, 1, 1)


@pytest.mark.parametrize("name", ["write", "sync"])
def test_a_journal_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch, name) -> None:
    log = Journal(tmp_path / "journal.log", bytes(16), 1)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(journal, name, full)
    log.append([b"record"])
    words = rf"cannot write {tmp_path}/journal\.log: No space left on device"
    with pytest.raises(FileError, match=words):
        log.commit()
    log.close()


def test_metrics_that_cannot_be_written_are_named(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    words = rf"cannot write {tmp_path}/metrics\.jsonl: Is a directory"
    with pytest.raises(FileError, match=words):
        Record(tmp_path).append({"step": 1}, None)
