"""The records of a run: a folder with `config.toml`, `metrics.jsonl`, `summary.json`.

It also holds `checkpoint.pt`, from which an interrupted run goes on to the same bits. Files are
replaced atomically, so a record is never half written.
"""

import io
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

    def append(self, row: Row, checkpoint: dict[str, Any] | None) -> None:
        """Adds a row of metrics and the state of the run after it, if it can be gone on from."""
        # Metrics first: `resume` writes them anew as the checkpoint has them.
        with (self.folder / _METRICS).open("a") as file:
            file.write(json.dumps(row) + "\n")
        if checkpoint is None:
            return
        content = io.BytesIO()
        torch.save(checkpoint, content)
        self._write(_CHECKPOINT, content.getbuffer())

    def resume(self) -> dict[str, Any] | None:
        """The last checkpoint if there is one; metrics go back to what they were then."""
        path = self.folder / _CHECKPOINT
        checkpoint: dict[str, Any] | None = None
        if path.exists():
            try:
                checkpoint = torch.load(path, weights_only=True)
            except Exception as error:  # torch raises many kinds for bytes it cannot read
                raise ValueError(f"{path} is damaged ({error}); start a new run") from error
        rows = checkpoint["metrics"] if checkpoint else []
        self._write(_METRICS, "".join(json.dumps(row) + "\n" for row in rows).encode())
        return checkpoint

    def finish(self, summary: Row) -> None:
        self._write(_SUMMARY, (json.dumps(summary, indent=1) + "\n").encode())

    def _write(self, name: str, content: bytes | memoryview) -> None:
        temporary = self.folder / (name + ".tmp")
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self.folder / name)
