"""Snapshots of the model during a run that does not pause, on disk until they are evaluated."""

import tempfile
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.runtime.storage.files import DamagedError, naming


class _StoredTensor(NamedTuple):
    offset: int
    nbytes: int
    dtype: torch.dtype
    shape: torch.Size
    digest: bytes


class ModelSnapshots:
    """Tensors by step, in a file without a name: it disappears when the process ends."""

    def __init__(self, folder: Path | None) -> None:
        """Without a folder the file is in the folder for temporary files, which may be memory."""
        self._path = (folder or Path(tempfile.gettempdir())) / "(a file without a name)"
        with naming(self._path):
            self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115, as long as this lives
        self._stored: dict[int, list[_StoredTensor]] = {}

    def save(self, step: int, tensors: Sequence[Tensor]) -> None:
        with naming(self._path):
            self._file.seek(0, 2)
            self._stored[step] = [self._write(tensor) for tensor in tensors]

    def load(self, step: int) -> list[Tensor]:
        """What was saved at this step; a `DamagedError` if the file was changed."""
        with naming(self._path, "read"):
            return [self._read(step, stored) for stored in self._stored[step]]

    def _write(self, tensor: Tensor) -> _StoredTensor:
        flat = tensor.detach().cpu().reshape(-1).view(torch.uint8)
        offset, content = self._file.tell(), flat.numpy().data
        self._file.write(content)
        return _StoredTensor(offset, flat.numel(), tensor.dtype, tensor.shape, _digest(content))

    def _read(self, step: int, stored: _StoredTensor) -> Tensor:
        self._file.seek(stored.offset)
        tensor = torch.empty(stored.shape, dtype=stored.dtype)
        content = tensor.view(-1).view(torch.uint8).numpy().data
        if self._file.readinto(content) != stored.nbytes or _digest(content) != stored.digest:
            raise DamagedError(f"{self._path}: the model of step {step} is damaged")
        return tensor


def _digest(content: memoryview) -> bytes:
    return blake2b(content, digest_size=16).digest()
