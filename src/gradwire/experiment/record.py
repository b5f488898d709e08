"""The records of a run: a folder with `config.toml`, `metrics.jsonl`, `summary.json`.

While the run goes on it also holds `checkpoint.pt`, from which an interrupted run goes on to the
same bits. Files are replaced atomically, so a record is never half written. Reports and tables
are made from records alone.
"""

import json
import os
from pathlib import Path
from typing import Any

import torch

from gradwire.experiment.config import Config

_CONFIG, _METRICS, _SUMMARY, _CHECKPOINT = (
    "config.toml",
    "metrics.jsonl",
    "summary.json",
    "checkpoint.pt",
)
Row = dict[str, Any]


class Record:
    """One run's folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @staticmethod
    def create(folder: Path, config: Config) -> "Record":
        """Starts a record in a folder that holds none."""
        if (folder / _CONFIG).exists():
            raise ValueError(
                f"{folder} already holds a run. Choose another folder, or go on with it: "
                f"gradwire run --resume {folder}"
            )
        folder.mkdir(parents=True, exist_ok=True)
        record = Record(folder)
        record._write(_CONFIG, config.to_toml().encode())
        record._write(_METRICS, b"")
        return record

    @staticmethod
    def open(folder: Path) -> "Record":
        if not (folder / _CONFIG).exists():
            raise ValueError(f"{folder} holds no run: there is no {_CONFIG} in it")
        return Record(folder)

    @property
    def config(self) -> Config:
        return Config.from_toml(self.folder / _CONFIG)

    @property
    def summary(self) -> Row | None:
        path = self.folder / _SUMMARY
        return json.loads(path.read_text()) if path.exists() else None

    @property
    def metrics(self) -> list[Row]:
        return [json.loads(line) for line in (self.folder / _METRICS).read_text().splitlines()]

    def append(self, row: Row, checkpoint: dict[str, Any]) -> None:
        """Adds a row of metrics and the state of the run after it."""
        # Metrics first: a row without its checkpoint is cut off again by `resume`.
        with (self.folder / _METRICS).open("a") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())
        temporary = self.folder / (_CHECKPOINT + ".tmp")
        torch.save(checkpoint, temporary)
        os.replace(temporary, self.folder / _CHECKPOINT)

    def resume(self) -> tuple[list[Row], dict[str, Any] | None]:
        """The metrics up to the last checkpoint, and the checkpoint if there is one."""
        path = self.folder / _CHECKPOINT
        if not path.exists():
            self._write(_METRICS, b"")
            return [], None
        checkpoint: dict[str, Any] = torch.load(path, weights_only=True)
        rows = []
        for line in (self.folder / _METRICS).read_text().splitlines():
            row = _row(line)
            if row is None or row["step"] > checkpoint["step"]:
                break
            rows.append(row)
        self._write(_METRICS, "".join(json.dumps(row) + "\n" for row in rows).encode())
        return rows, checkpoint

    def finish(self, summary: Row) -> None:
        self._write(_SUMMARY, (json.dumps(summary, indent=1) + "\n").encode())

    def _write(self, name: str, content: bytes) -> None:
        temporary = self.folder / (name + ".tmp")
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self.folder / name)


def _row(line: str) -> Row | None:
    """A line of metrics; None if a crash cut it off."""
    try:
        row: Row = json.loads(line)
    except json.JSONDecodeError:
        return None
    return row
