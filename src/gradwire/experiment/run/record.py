"""The records of a run: a folder with `config.toml`, `metrics.jsonl`, `summary.json`.

It also holds `checkpoint.pt`, from which an interrupted run continues to the same bits; runs on
real processes have `checkpoints/` (see checkpoints.py) and `model.pt` instead. Files are replaced
atomically, so a record is never half written. Files that are read back have a checksum
(`runtime/storage`): `config.toml` in a comment, `summary.json` under a key, together with that of
`metrics.jsonl`. Until a run is finished, its checkpoints contain its rows of metrics, too.
"""

import json
import tomllib
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from torch import Tensor

from gradwire.core.errors import GradwireWarning, StoppedError
from gradwire.experiment.run.config import Config
from gradwire.runtime.storage import sealed, text
from gradwire.runtime.storage.files import (
    DamagedError,
    explain,
    make_folder,
    naming,
    replacing,
    write_atomically,
)
from gradwire.runtime.storage.sealed import Seal, save_plain

_CONFIG, _METRICS, _SUMMARY, _CHECKPOINT, _MODEL = (
    "config.toml",
    "metrics.jsonl",
    "summary.json",
    "checkpoint.pt",
    "model.pt",
)
_METRICS_DIGEST = "metrics_checksum"  # in the summary
_SEAL = Seal("simulate")
Row = dict[str, Any]
Say = Callable[[str], None]


def warn(message: str) -> None:
    """Shows a message to a caller in Python, as a warning."""
    warnings.warn(message, GradwireWarning, stacklevel=3)


class Record:
    """One run's folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @staticmethod
    def create(folder: Path, config: Config) -> "Record":
        """Starts a record in a folder that holds none."""
        Record(folder).check_empty()
        record = Record.describe(folder, config)
        record.rewind([])
        return record

    @staticmethod
    def describe(folder: Path, config: Config) -> "Record":
        """Writes the configuration into a folder, perhaps on another machine of the same run."""
        make_folder(folder)
        record = Record(folder)
        if not record.exists:
            write_config(folder / _CONFIG, config)
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
    def remains(self) -> str:
        """A file of a run whose configuration is missing; "" if there is none."""
        names = (_METRICS, _SUMMARY, _CHECKPOINT, _MODEL, "checkpoints")
        found = (name for name in names if (self.folder / name).exists())
        return "" if self.exists else next(found, "")

    def check_empty(self) -> None:
        """Raises if there is a run, or files of one."""
        if self.exists:
            raise ValueError(
                f"{self.folder} already holds a run. Choose another folder, or resume it: "
                f"gradwire run --resume {self.folder}"
            )
        if self.remains:
            raise ValueError(
                f"{self.folder} already holds {self.remains} of a run, without its {_CONFIG}. "
                "Choose another folder."
            )

    @property
    def config(self) -> Config:
        return read_config(self.folder / _CONFIG)

    def append(self, row: Row, checkpoint: dict[str, Any] | None) -> None:
        """Adds a row of metrics and the checkpoint after it, if there is one."""
        # Metrics first: `resume` replaces them by those of the checkpoint.
        path = self.folder / _METRICS
        with naming(path), path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        if checkpoint is not None:
            sealed.save(self.folder / _CHECKPOINT, _SEAL, checkpoint)

    def resume(self, *, has_checkpoints: bool, may_restart: bool, say: Say) -> Row | None:
        """The checkpoint of a simulated run; None: it begins again from step 0.

        If there was a checkpoint, beginning again needs `may_restart`. Metrics are reset to those
        of the checkpoint; those of a finished run stay as they are.
        """
        path = self.folder / _CHECKPOINT
        checkpoint: Row | None = None
        why = ""
        if path.exists():
            try:
                checkpoint = sealed.load(path, _SEAL)
            except DamagedError as error:
                why = str(error)
        elif has_checkpoints and self._num_rows() > 1:  # it is written after each row
            why = f"{path} is missing, though {_METRICS} has rows"
        if why and not may_restart:
            raise DamagedError(f"{why}. {restart_advice(self.folder)}")
        if checkpoint is None:
            if not why:
                why = (
                    f"{self.folder} has no checkpoint yet"
                    if has_checkpoints
                    else f"{self.folder} holds a run of a method that has no checkpoints"
                )
            say(f"{why}: the run begins again from step 0")
        if self.is_finished:
            if changed := self.finished_metrics():
                say(changed)
            return checkpoint
        if checkpoint is None:
            path.unlink(missing_ok=True)
        elif changed := self.changed_metrics(checkpoint["metrics"]):
            say(changed)
        self.rewind(checkpoint["metrics"] if checkpoint else [])
        return checkpoint

    def rewind(self, rows: Sequence[Row]) -> None:
        """Resets the metrics to these rows."""
        self._write(_METRICS, "".join(json.dumps(row) + "\n" for row in rows))

    def changed_metrics(self, rows: Sequence[Row]) -> str:
        """A message if `metrics.jsonl` does not begin with these rows; else ""."""
        path = self.folder / _METRICS
        lines = path.read_bytes().split(b"\n") if path.exists() else []
        lines += [b""] * (len(rows) - len(lines))
        for number, (row, line) in enumerate(zip(rows, lines), 1):
            if json.dumps(row).encode() != line:
                return (
                    f"{path} is damaged in line {number}; it is written again, with the rows of "
                    "the checkpoint"
                )
        return ""

    def _num_rows(self) -> int:
        path = self.folder / _METRICS
        return path.read_bytes().count(b"\n") if path.exists() else 0

    @property
    def summary(self) -> Row:
        """The summary of a run that has ended, or was stopped."""
        path = self.folder / _SUMMARY
        try:
            summary = text.open_json(path)
        except DamagedError as error:
            raise DamagedError(
                f"{error}. Remove it to resume from the last checkpoint: "
                f"gradwire run --resume {self.folder}"
            ) from error
        summary.pop(_METRICS_DIGEST, None)
        return summary

    @property
    def has_summary(self) -> bool:
        return (self.folder / _SUMMARY).exists()

    @property
    def is_finished(self) -> bool:
        """Whether it came to its end, and was not stopped."""
        return self.has_summary and "stopped" not in self.summary

    def finished_metrics(self) -> str:
        """A message if the metrics of a finished run were changed; else ""."""
        path = self.folder / _METRICS
        digest = text.open_json(self.folder / _SUMMARY)[_METRICS_DIGEST]
        if path.exists() and text.digest_of(path.read_bytes()) == digest:
            return ""
        return f"{path} was changed or damaged since the run ended"

    def reopen(self) -> None:
        """Removes the summary of a run that was stopped, and now continues."""
        if not self.is_finished:
            (self.folder / _SUMMARY).unlink(missing_ok=True)

    def finish(self, summary: Row) -> None:
        metrics = text.digest_of((self.folder / _METRICS).read_bytes())
        self._write(_SUMMARY, text.seal_json({**summary, _METRICS_DIGEST: metrics}))

    def finish_stopped(self, error: StoppedError, config: Config, lost: Sequence[Row]) -> None:
        """Writes why a run stopped. If that fails, the error gets a note about it."""
        try:
            self.finish({"config": asdict(config), "stopped": str(error), "lost": list(lost)})
        except OSError as problem:
            error.add_note(f"The record does not say why the run stopped: {explain(problem)}")

    def save_model(self, params: Tensor, buffers: Mapping[str, Tensor]) -> None:
        """Saves the final model, for `torch.load(..., weights_only=True)`."""
        with replacing(self.folder / _MODEL) as file:
            save_plain(file, {"params": params, "buffers": dict(buffers)})

    def _write(self, name: str, content: str) -> None:
        write_atomically(self.folder / name, content.encode())


def restart_advice(folder: Path | None) -> str:
    """What the user can do if there was a checkpoint, but none can be used."""
    return (
        "Put it back as it was, or let the run begin again from step 0: "
        f"gradwire run --resume {folder} --restart"
    )


def write_config(path: Path, config: Config) -> None:
    """Writes a configuration with a checksum, as part of a record."""
    write_atomically(path, text.seal_toml(config.to_toml()).encode())


def read_config(path: Path) -> Config:
    """What `write_config` wrote. Settings that are missing are not replaced by defaults."""
    try:
        values = tomllib.loads(text.open_toml(path))
    except DamagedError as error:
        raise DamagedError(
            f"{error}. Put it back as it was written, or start a new run in another folder. Do not "
            "take this file as its --config: defaults would replace what is missing in it."
        ) from error
    missing = [field.name for field in fields(Config) if field.name not in values]
    if missing:
        raise DamagedError(
            f"{path} was written by another gradwire: it has no {missing[0]}. Start a new run with "
            f"these settings: gradwire run --config {path}"
        )
    return Config.from_dict(values, str(path))
