"""The checkpoints of a run on real processes: `checkpoints/step-000120/rank-3.pt` in its folder.

Every rank writes its own file, atomically and with a checksum, so a damaged file is never used. A
checkpoint is complete if every rank has its file. Ranks agree on the newest complete one when they
start. So the folder need not be shared between machines, as long as each rank finds its own files.

The coordinator writes `checkpoints/complete` when the first checkpoint is complete. If none can be
used later, files are damaged or missing (resumption.py).
"""

import contextlib
import re
from pathlib import Path
from typing import Any, NamedTuple

from gradwire.runtime.storage import sealed
from gradwire.runtime.storage.files import make_folder, remove_leftovers, write_atomically
from gradwire.runtime.storage.sealed import Seal

_NUM_KEPT = 2  # checkpoints; the newest ones
_COMPLETE = "complete"


class Loaded(NamedTuple):
    """The checkpoints that one rank has."""

    states: dict[int, dict[str, Any]]  # by step
    skipped: list[str]  # files that cannot be used, and why


class Checkpoints:
    """One rank's files."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder = folder / "checkpoints"
        self._rank = rank
        self._name = f"rank-{rank}.pt"

    def write(self, step: int, state: dict[str, Any]) -> None:
        path = self._path(step)
        make_folder(path.parent)
        sealed.save(path, self._seal(step), state)

    def load(self) -> Loaded:
        self._remove_leftovers()
        found = Loaded({}, [])
        for step in self._steps():
            try:
                found.states[step] = sealed.load(self._path(step), self._seal(step))
            except (ValueError, OSError) as error:
                found.skipped.append(str(error))
        return found

    @property
    def had_complete(self) -> bool:
        """Whether there was a checkpoint that all ranks had."""
        return (self._folder / _COMPLETE).exists()

    def note_complete(self) -> None:
        """All ranks have their file of a checkpoint."""
        if not self.had_complete:
            text = b"All ranks have written a checkpoint here.\n"
            write_atomically(self._folder / _COMPLETE, text)

    def remove_after(self, step: int | None) -> None:
        """Removes the checkpoints after this step, which are incomplete; None: all of them."""
        if step is None:
            (self._folder / _COMPLETE).unlink(missing_ok=True)
        self._remove([other for other in self._steps() if step is None or other > step])

    def remove_old(self) -> None:
        """Removes all but the newest checkpoints, once the newest is known to be complete."""
        self._remove_leftovers()
        self._remove(self._steps()[:-_NUM_KEPT])

    def _steps(self) -> list[int]:
        matches = [
            re.fullmatch(r"step-(\d+)", folder.name)
            for folder in self._folder.glob("step-*")
            if (folder / self._name).exists()
        ]
        return sorted(int(match[1]) for match in matches if match)

    def _path(self, step: int) -> Path:
        return self._folder / f"step-{step:06d}" / self._name

    def _seal(self, step: int) -> Seal:
        return Seal("rank", step, f"rank {self._rank}")

    def _remove(self, steps: list[int]) -> None:
        for step in steps:
            path = self._path(step)
            path.unlink(missing_ok=True)
            _remove_empty(path.parent)

    def _remove_leftovers(self) -> None:
        """Removes temporary files of processes of this rank that ended while they wrote."""
        for folder in list(self._folder.glob("step-*")):
            # Another rank may remove the folder meanwhile.
            with contextlib.suppress(FileNotFoundError):
                if any(folder.glob(f"{self._name}.*.tmp")):
                    remove_leftovers(folder / self._name)
                    _remove_empty(folder)


def _remove_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):  # other ranks still have files there
        folder.rmdir()
