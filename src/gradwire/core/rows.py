"""Tensors of n workers that lie in one memory, as rows of [n, ...].

The simulator computes for all workers at once where it can. Each worker gets a row; where all rows
are wanted together again, `stack_rows` finds the memory that they lie in and copies nothing. What
is asked of one row and needs a look at all of them, such as whether it is finite, is found for all
rows with one reduction and one read.
"""

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

_ALIGNMENT = 64  # bytes, torch's on CPUs


class Rows:
    """A tensor [n, ...] whose rows are values of n workers."""

    __slots__ = ("_finite", "whole")

    def __init__(self, whole: Tensor) -> None:
        self.whole = whole
        self._finite: list[bool] | None = None

    def split(self) -> tuple[Tensor, ...]:
        """The rows, which remember where they are from."""
        rows = self.whole.unbind()
        for number, row in enumerate(rows):
            _remember(row, self, number)
        return rows

    def is_finite(self, number: int) -> bool:
        """Whether every element of a row is finite; for all rows in one go."""
        if self._finite is None:
            flat = self.whole.flatten(1)
            # A sum is finite if all terms are, unless it overflows; then look closely.
            finite = torch.isfinite(flat.sum(1))
            self._finite = finite.tolist()
            if not all(self._finite):
                self._finite = torch.isfinite(flat).all(1).tolist()
        return self._finite[number]


# Only a memory of where rows are from, by identity; an entry ends with its row. (An attribute of
# the row would be saved with it in checkpoints.)
_ORIGINS: dict[int, tuple[weakref.ref[Tensor], Rows, int]] = {}


def _remember(row: Tensor, rows: Rows, number: int) -> None:
    identity = id(row)

    def forget(reference: weakref.ref[Tensor]) -> None:
        entry = _ORIGINS.get(identity)
        if entry is not None and entry[0] is reference:
            del _ORIGINS[identity]

    _ORIGINS[identity] = (weakref.ref(row, forget), rows, number)


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
    entry = _ORIGINS.get(id(x))
    return entry[1:] if entry is not None and entry[0]() is x else None


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
