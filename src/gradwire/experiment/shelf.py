"""Tensors that are wanted later, on disk meanwhile."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor


class _Place(NamedTuple):
    offset: int
    nbytes: int
    dtype: torch.dtype
    shape: torch.Size


class Shelf:
    """In a file without a name, so nothing is left of it when the process ends, however that is."""

    def __init__(self, folder: Path | None) -> None:
        """Without a folder it is where temporary files are, which may be memory."""
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115, as long as this lives
        self._places: dict[int, list[_Place]] = {}

    def put(self, key: int, tensors: Sequence[Tensor]) -> None:
        self._file.seek(0, 2)
        self._places[key] = [self._write(tensor) for tensor in tensors]

    def get(self, key: int) -> list[Tensor]:
        return [self._read(place) for place in self._places[key]]

    def _write(self, tensor: Tensor) -> _Place:
        flat = tensor.detach().cpu().reshape(-1).view(torch.uint8)
        offset = self._file.tell()
        self._file.write(flat.numpy().data)
        return _Place(offset, flat.numel(), tensor.dtype, tensor.shape)

    def _read(self, place: _Place) -> Tensor:
        self._file.seek(place.offset)
        tensor = torch.empty(place.shape, dtype=place.dtype)
        flat = tensor.view(-1).view(torch.uint8).numpy()
        if self._file.readinto(flat.data) != place.nbytes:
            raise OSError(f"{place.nbytes} bytes that were put on disk are not there any more")
        return tensor
