"""Tensors of n workers that lie in one memory, as rows of [n, ...].

The simulator computes for all workers at once where it can. Each worker gets a row; where all rows
are wanted together again, `stack_rows` finds the memory that they lie in and copies nothing. What
is asked of one row and needs a look at all of them, such as whether it is finite, is found for all
rows with one reduction and one read. A part of a row that `cut` makes is a row as well, of the same
part of all; and parts of one vector can be put together again (`split_vector`, `whole_of`).
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

W = TypeVar("W")
_ALIGNMENT = 64  # bytes, torch's on CPUs


class Rows:
    """A tensor [n, ...] whose rows are values of n workers."""

    __slots__ = ("_columns", "_finite", "is_part", "is_trusted", "whole")

    def __init__(self, whole: Tensor, is_part: bool = False) -> None:
        self.whole = whole
        self.is_part = is_part  # of other rows, between which there are gaps
        self.is_trusted = False  # taken as finite: something made of all of them is looked at
        self._finite: list[bool] | None = None
        self._columns: dict[tuple[int, int], Rows] = {}

    def columns(self, start: int, stop: int) -> "Rows":
        """The same part of all rows, which are vectors."""
        found = self._columns.get((start, stop))
        if found is None:
            found = self._columns[start, stop] = Rows(self.whole[:, start:stop], is_part=True)
        return found

    def split(self) -> tuple[Tensor, ...]:
        """The rows, which remember where they are from."""
        rows = self.whole.unbind()
        for number, row in enumerate(rows):
            _remember(row, self, number)
        return rows

    def is_finite(self, number: int) -> bool:
        """Whether every element of a row is finite; for all rows in one go."""
        if self.is_trusted:
            return True
        if self._finite is None:
            flat = self.whole.flatten(1)
            # A sum is finite if all terms are, unless it overflows; then look closely.
            finite = torch.isfinite(flat.sum(1))
            self._finite = finite.tolist()
            if not all(self._finite):
                self._finite = torch.isfinite(flat).all(1).tolist()
        return self._finite[number]


class _Place(weakref.ref[Tensor], Generic[W]):
    """Where a tensor is from, as long as it lives."""

    __slots__ = ("identity", "number", "whole")

    identity: int  # of the tensor
    number: int
    whole: W


# Only a memory of where rows are from, by identity; an entry ends with its row. (An attribute of
# the row would be saved with it in checkpoints.)
_ORIGINS: dict[int, _Place[Rows]] = {}


def _forgetting(memory: dict[int, _Place[W]]) -> Callable[[Any], None]:
    """What a place calls when its tensor is collected; one function for all of a memory, since
    making one for each would take longer than the rest."""

    def forget(place: _Place[W]) -> None:
        if memory.get(place.identity) is place:
            del memory[place.identity]

    return forget


_forget_origin = _forgetting(_ORIGINS)


def _remember(row: Tensor, rows: Rows, number: int) -> None:
    _note(_ORIGINS, _forget_origin, row, rows, number)


def _note(
    memory: dict[int, _Place[W]],
    forget: Callable[[Any], None],
    part: Tensor,
    whole: W,
    number: int,
) -> None:
    """Remembers where a tensor is from, as long as it lives."""
    place: _Place[W] = _Place(part, forget)
    place.whole, place.number = whole, number
    place.identity = identity = id(part)
    memory[identity] = place


def split_rows(whole: Tensor) -> tuple[Tensor, ...]:
    """The rows of a tensor [n, ...], which nobody changes."""
    return Rows(whole).split()


def aligned_rows(whole: Tensor) -> Tensor:
    """The same rows, on a CPU each at an address where a tensor of its own would begin: BLAS adds
    up in an order that depends on it (seen with `powersgd` and MKL)."""
    length = whole[0].numel()
    padded = -(-length * whole.element_size() // _ALIGNMENT) * _ALIGNMENT // whole.element_size()
    if whole.device.type != "cpu" or padded == length:
        return whole
    memory = torch.empty(len(whole), padded, dtype=whole.dtype)
    own = memory[:, :length].unflatten(1, whole.shape[1:])
    return own.copy_(whole)


def row_of(x: Tensor) -> tuple[Rows, int] | None:
    """Where a tensor is from, if it is a row."""
    place = _ORIGINS.get(id(x))
    return (place.whole, place.number) if place is not None and place() is x else None


def cut(x: Tensor, start: int, stop: int) -> Tensor:
    """A part of a vector. A part of a row remembers where it is from; all of it is the row."""
    if start == 0 and stop == len(x):
        return x
    part, found = x[start:stop], row_of(x)
    if found is not None and found[0].whole.dim() == 2:
        _remember(part, found[0].columns(start, stop), found[1])
    return part


class _Parts:
    """A vector that was split into so many parts."""

    __slots__ = ("count", "whole")

    def __init__(self, whole: Tensor, count: int) -> None:
        self.whole, self.count = whole, count


_WHOLES: dict[int, _Place[_Parts]] = {}  # of parts, as for rows
_forget_whole = _forgetting(_WHOLES)


def split_vector(whole: Tensor, count: int) -> tuple[Tensor, ...]:
    """The parts of a vector, as `tensor_split` makes them; nobody changes it."""
    pieces, parts = whole.tensor_split(count), _Parts(whole, count)
    for number, piece in enumerate(pieces):
        _note(_WHOLES, _forget_whole, piece, parts, number)
    return pieces


def whole_of(pieces: Sequence[Tensor]) -> Tensor | None:
    """The vector of which these are all parts, in order; None if they are something else."""
    place = _WHOLES.get(id(pieces[0])) if pieces else None
    if place is None or place.whole.count != len(pieces):
        return None
    parts = place.whole
    for number, piece in enumerate(pieces):
        place = _WHOLES.get(id(piece))
        if place is None or place() is not piece:
            return None
        if place.whole is not parts or place.number != number:
            return None
    return parts.whole


def stack_rows(tensors: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
    """[n, ...], as `torch.stack`; without a copy if they lie one after another in one memory.

    Nobody may change the result. `out` is memory for a copy.
    """
    whole = rows_in_memory(tensors)
    return torch.stack(list(tensors), out=out) if whole is None else whole


def rows_in_memory(tensors: Sequence[Tensor]) -> Tensor | None:
    """[n, ...] of tensors that lie one after another in one memory; None if they do not."""
    first = tensors[0]
    if len(tensors) == 1:
        return first.unsqueeze(0)
    found = row_of(first)
    if found is not None and found[1] == 0 and len(found[0].whole) == len(tensors):
        rows = found[0]
        if rows.is_part and not rows.whole.is_contiguous():
            return None
        if all(row_of(each) == (rows, number) for number, each in enumerate(tensors)):
            return rows.whole
    if not first.is_contiguous() or not first.numel():
        return None
    kind = first.shape, first.dtype, first.device
    nbytes, memory = first.numel() * first.element_size(), first.untyped_storage().data_ptr()
    expected = first.data_ptr()
    for each in tensors:
        if each.data_ptr() != expected or (each.shape, each.dtype, each.device) != kind:
            return None
        # Two allocations may be neighbours by chance.
        if not each.is_contiguous() or each.untyped_storage().data_ptr() != memory:
            return None
        expected += nbytes
    return first.as_strided((len(tensors), *first.shape), (first.numel(), *first.stride()))


def joined_in_memory(pieces: Sequence[Tensor]) -> Tensor | None:
    """One vector of vectors that lie one after another in one memory; None if they do not."""
    first = pieces[0]
    memory, expected, total = first.untyped_storage().data_ptr(), first.data_ptr(), 0
    size = first.element_size()
    for each in pieces:
        if each.dtype != first.dtype or each.dim() != 1 or each.stride() != (1,):
            return None
        if each.data_ptr() != expected or each.untyped_storage().data_ptr() != memory:
            return None
        expected += each.numel() * size
        total += each.numel()
    return first.as_strided((total,), (1,))
