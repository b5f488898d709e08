"""The checkpoints of a run on real processes: `checkpoints/step-000120/rank-3.pt` in its folder.

Every rank writes its own file, atomically, so a file is whole if it is there. A checkpoint counts
if every rank has its file of it; ranks agree on the newest such one when they start. So the folder
need not be shared between machines, as long as each rank finds the files it wrote itself.
"""

import contextlib
import re
import warnings
from pathlib import Path
from typing import Any

import torch

from gradwire.core.errors import GradwireWarning
from gradwire.experiment.record import remove_leftovers, save_atomically
from gradwire.runtime.process.checkpoint import make_folder

_KEPT = 2  # the newest ones


class Checkpoints:
    """One rank's files."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder = folder / "checkpoints"
        self._name = f"rank-{rank}.pt"

    def write(self, step: int, state: dict[str, Any]) -> None:
        path = self._path(step)
        make_folder(path.parent)
        save_atomically(path, state)

    def load(self) -> dict[int, dict[str, Any]]:
        """By step; damaged ones are left out, with a warning."""
        self._remove_leftovers()
        found = {}
        for step in self._steps():
            path = self._path(step)
            try:
                found[step] = torch.load(path, weights_only=True)
            except Exception as error:  # torch raises many kinds for bytes it cannot read
                text = f"{path} is damaged ({error}), so it is not used"
                warnings.warn(text, GradwireWarning, stacklevel=2)
        return found

    def forget_after(self, step: int) -> None:
        """Those of a run that came further but cannot be gone on from."""
        self._remove([other for other in self._steps() if other > step])

    def forget_old(self) -> None:
        """All but the newest, once that is known to be complete."""
        self._remove_leftovers()
        self._remove(self._steps()[:-_KEPT])

    def _steps(self) -> list[int]:
        matches = [
            re.fullmatch(r"step-(\d+)", path.parent.name)
            for path in self._folder.glob(f"step-*/{self._name}")
        ]
        return sorted(int(match[1]) for match in matches if match)

    def _path(self, step: int) -> Path:
        return self._folder / f"step-{step:06d}" / self._name

    def _remove(self, steps: list[int]) -> None:
        for step in steps:
            path = self._path(step)
            path.unlink(missing_ok=True)
            _remove_empty(path.parent)

    def _remove_leftovers(self) -> None:
        """Of this rank, from processes that ended while they wrote. No rank writes now."""
        for path in list(self._folder.glob(f"step-*/{self._name}.*.tmp")):
            remove_leftovers(path.with_name(self._name))
            _remove_empty(path.parent)


def _remove_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):  # other ranks still have files there
        folder.rmdir()
