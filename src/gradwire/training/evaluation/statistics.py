"""Running statistics of n workers as one matrix for each type of number, [n, size].

ResNet-20 has 57 of these tensors. Cut into those of 32 workers they would be 1,824 views a step, of
which the next step wants none: it takes the matrices as they are. So a worker's statistics are a
row, whose tensors are cut when somebody asks for them.
"""

from collections.abc import Iterator, KeysView, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class _Place(NamedTuple):
    """Where one tensor lies: `vectors[vector][start:stop].view(shape)`."""

    vector: int
    start: int
    stop: int
    shape: torch.Size


class StatisticsLayout:
    """The order of a module's running statistics in one vector for each type."""

    def __init__(self, buffers: Mapping[str, Tensor]) -> None:
        self.places: dict[str, _Place] = {}
        self.dtypes: list[torch.dtype] = []
        self._sizes: list[list[int]] = []  # by vector
        for name, buffer in buffers.items():
            if buffer.dtype not in self.dtypes:
                self.dtypes.append(buffer.dtype)
                self._sizes.append([])
            vector = self.dtypes.index(buffer.dtype)
            start = sum(self._sizes[vector])
            self._sizes[vector].append(buffer.numel())
            self.places[name] = _Place(vector, start, start + buffer.numel(), buffer.shape)

    def flatten(self, buffers: Mapping[str, Tensor]) -> list[Tensor]:
        """One vector for each type."""
        pieces: list[list[Tensor]] = [[] for _ in self.dtypes]
        for name, place in self.places.items():
            piece = buffers[name].to(self.dtypes[place.vector])
            pieces[place.vector].append(piece.reshape(-1))
        return [torch.cat(each) for each in pieces]

    def unflatten(self, vectors: Sequence[Tensor]) -> dict[str, Tensor]:
        """Views by name."""
        left = [iter(torch.split(each, sizes)) for each, sizes in zip(vectors, self._sizes)]
        return {
            name: next(left[place.vector]).view(place.shape) for name, place in self.places.items()
        }

    def rows(self, wholes: Sequence[Tensor], num_workers: int) -> list["StatisticsRow"]:
        """The statistics of each worker, of the matrices [n, size] of all; nobody changes them."""
        shared = tuple(wholes)
        return [StatisticsRow(self, shared, number) for number in range(num_workers)]

    def stack(self, each: Sequence[Mapping[str, Tensor]]) -> tuple[Tensor, ...]:
        """The matrices of all workers; no copy if `each` are the rows that `rows` gave."""
        first = each[0]
        if isinstance(first, StatisticsRow) and first.layout is self:
            wholes = first.wholes
            num_rows = len(wholes[0]) if wholes else len(each)
            if num_rows == len(each) and all(
                isinstance(row, StatisticsRow) and row.wholes is wholes and row.number == number
                for number, row in enumerate(each)
            ):
                return wholes
        vectors: dict[int, list[Tensor]] = {}  # workers may share them at the beginning
        for buffers in each:
            if id(buffers) not in vectors:
                vectors[id(buffers)] = self._vectors(buffers)
        rows = [vectors[id(buffers)] for buffers in each]
        return tuple(torch.stack(column) for column in zip(*rows))

    def _vectors(self, buffers: Mapping[str, Tensor]) -> list[Tensor]:
        if isinstance(buffers, StatisticsRow) and buffers.layout is self:
            return [whole[buffers.number] for whole in buffers.wholes]
        return self.flatten(buffers)


class StatisticsRow(Mapping[str, Tensor]):
    """The running statistics of one of n workers, by name: views of a row of [n, size]."""

    __slots__ = ("_cut", "layout", "number", "wholes")

    def __init__(self, layout: StatisticsLayout, wholes: tuple[Tensor, ...], number: int) -> None:
        self.layout = layout
        self.wholes = wholes  # one matrix for each type
        self.number = number
        self._cut: dict[str, Tensor] = {}  # the same tensor for who asks twice

    def __getitem__(self, name: str) -> Tensor:
        found = self._cut.get(name)
        if found is None:
            place = self.layout.places[name]
            row = self.wholes[place.vector][self.number]
            found = self._cut[name] = row[place.start : place.stop].view(place.shape)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self.layout.places)

    def __len__(self) -> int:
        return len(self.layout.places)

    def keys(self) -> KeysView[str]:  # compared in every step
        return self.layout.places.keys()

    def __repr__(self) -> str:
        return f"<running statistics of worker {self.number}: {', '.join(self)}>"
