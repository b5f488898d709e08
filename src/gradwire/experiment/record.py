"""The records of a run: a folder with `config.toml`, `metrics.jsonl`, `summary.json`.

It also holds `checkpoint.pt`, from which an interrupted run goes on to the same bits; runs on real
processes have `checkpoints/` (see checkpoints.py) and `model.pt` instead. Files are replaced
atomically, so a record is never half written.
"""

import contextlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from gradwire.experiment.config import Config

_CONFIG, _METRICS, _SUMMARY, _CHECKPOINT, _MODEL = (
    "config.toml",
    "metrics.jsonl",
    "summary.json",
    "checkpoint.pt",
    "model.pt",
)
Row = dict[str, Any]


class Record:
    """One run's folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @staticmethod
    def create(folder: Path, config: Config) -> "Record":
        """Starts a record in a folder that holds none."""
        if Record(folder).exists:
            raise ValueError(
                f"{folder} already holds a run. Choose another folder, or go on with it: "
                f"gradwire run --resume {folder}"
            )
        record = Record.describe(folder, config)
        record.rewind([])
        return record

    @staticmethod
    def describe(folder: Path, config: Config) -> "Record":
        """Leaves the configuration in a folder, such as one on another machine of the same run."""
        folder.mkdir(parents=True, exist_ok=True)
        record = Record(folder)
        if not record.exists:
            record._write(_CONFIG, config.to_toml().encode())
        return record

    @staticmethod
    def open(folder: Path) -> "Record":
        if not Record(folder).exists:
            raise ValueError(f"{folder} holds no run: there is no {_CONFIG} in it")
        return Record(folder)

    @property
    def exists(self) -> bool:
        return (self.folder / _CONFIG).exists()

    @property
    def config(self) -> Config:
        return Config.from_toml(self.folder / _CONFIG)

    def append(self, row: Row, checkpoint: dict[str, Any] | None) -> None:
        """Adds a row of metrics and the state of the run after it, if it can be gone on from."""
        # Metrics first: `resume` writes them anew as the checkpoint has them.
        with (self.folder / _METRICS).open("a") as file:
            file.write(json.dumps(row) + "\n")
        if checkpoint is not None:
            save_atomically(self.folder / _CHECKPOINT, checkpoint)

    def resume(self) -> dict[str, Any] | None:
        """The last checkpoint if there is one; metrics go back to what they were then."""
        path = self.folder / _CHECKPOINT
        checkpoint: dict[str, Any] | None = None
        if path.exists():
            try:
                checkpoint = torch.load(path, weights_only=True)
            except Exception as error:  # torch raises many kinds for bytes it cannot read
                raise ValueError(f"{path} is damaged ({error}); start a new run") from error
        self.rewind(checkpoint["metrics"] if checkpoint else [])
        return checkpoint

    def rewind(self, rows: Sequence[Row]) -> None:
        """Metrics go back to these."""
        self._write(_METRICS, "".join(json.dumps(row) + "\n" for row in rows).encode())

    @property
    def is_finished(self) -> bool:
        """Whether it came to its end, and was not stopped."""
        path = self.folder / _SUMMARY
        return path.exists() and "stopped" not in json.loads(path.read_text())

    def reopen(self) -> None:
        """That it was stopped is true no longer."""
        if not self.is_finished:
            (self.folder / _SUMMARY).unlink(missing_ok=True)

    def finish(self, summary: Row) -> None:
        self._write(_SUMMARY, (json.dumps(summary, indent=1) + "\n").encode())

    def keep_model(self, params: Tensor, buffers: Mapping[str, Tensor]) -> None:
        """The model at the end, for `torch.load(..., weights_only=True)`."""
        model = {"params": params, "buffers": dict(buffers)}
        save_atomically(self.folder / _MODEL, model)

    def _write(self, name: str, content: bytes | memoryview) -> None:
        write_atomically(self.folder / name, content)


def write_atomically(path: Path, content: bytes | memoryview) -> None:
    """Whoever reads the file sees all of it or what was there before, even after a crash."""
    with _replacing(path) as file:
        file.write(content)


def save_atomically(path: Path, state: Mapping[str, Any]) -> None:
    """The same for `torch.load`; it goes to the disk with no copy of it all in between."""
    with _replacing(path) as file:
        try:
            torch.save(state, file)
        except RuntimeError as error:  # torch says of a full disk that a position is wrong
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise


def remove_leftovers(path: Path) -> None:
    """What processes left that ended while they wrote this file."""
    for temporary in path.parent.glob(f"{path.name}.*.tmp"):
        match = re.fullmatch(r"\.(\d+)\.tmp", temporary.name.removeprefix(path.name))
        if match and not _is_another(int(match[1])):
            temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write to, that takes the place of this one if all goes well."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if os.name == "posix":  # the new name, too, must survive
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _is_another(pid: int) -> bool:
    """Whether this is a process that runs, but not this one. In doubt it is."""
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
