"""Tensors that are wanted later, on disk meanwhile."""

import tempfile
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.runtime.storage.files import DamagedError, naming


class _Place(NamedTuple):
    offset: int
    nbytes: int
    dtype: torch.dtype
    shape: torch.Size
    digest: bytes


class Shelf:
    """In a file without a name, so nothing is left of it when the process ends, however that is."""

    def __init__(self, folder: Path | None) -> None:
        """Without a folder it is where temporary files are, which may be memory."""
        self._path = (folder or Path(tempfile.gettempdir())) / "(a file without a name)"
        with naming(self._path):
            self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115, as long as this lives
        self._places: dict[int, list[_Place]] = {}

    def put(self, key: int, tensors: Sequence[Tensor]) -> None:
        with naming(self._path):
            self._file.seek(0, 2)
            self._places[key] = [self._write(tensor) for tensor in tensors]

    def get(self, key: int) -> list[Tensor]:
        """What was put, or a `DamagedError`."""
        with naming(self._path, "read"):
            return [self._read(key, place) for place in self._places[key]]

    def _write(self, tensor: Tensor) -> _Place:
        flat = tensor.detach().cpu().reshape(-1).view(torch.uint8)
        offset, content = self._file.tell(), flat.numpy().data
        self._file.write(content)
        return _Place(offset, flat.numel(), tensor.dtype, tensor.shape, _digest(content))

    def _read(self, key: int, place: _Place) -> Tensor:
        self._file.seek(place.offset)
        tensor = torch.empty(place.shape, dtype=place.dtype)
        content = tensor.view(-1).view(torch.uint8).numpy().data
        if self._file.readinto(content) != place.nbytes or _digest(content) != place.digest:
            raise DamagedError(f"{self._path}: what was kept there of step {key} is damaged")
        return tensor


def _digest(content: memoryview) -> bytes:
    return blake2b(content, digest_size=16).digest()
