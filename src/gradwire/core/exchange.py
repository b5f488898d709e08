"""What the members of a group send each other at once, and what each of them receives.

An exchange of n members is n(n - 1) messages, and so is a pass around a ring. An engine that
answers it as one effect (`core/node.py`, `Exchange` and `Pass`) needs their sizes, and at the end
what came for each member; so what a member sends is described, not cut into n pieces.
"""

from array import array
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Protocol, TypeVar, cast

import torch
from torch import Tensor

T_co = TypeVar("T_co", covariant=True)


class Outgoing(Protocol):
    """What one member sends to all."""

    @property
    def nbytes(self) -> "int | array[int]":
        """Of each message: one number, or one for each member."""
        ...

    def messages(self, size: int) -> Sequence[Tensor]:
        """By receiver."""
        ...

    def received(self, everyone: "Sequence[Outgoing]", rank: int) -> Sequence[Tensor]:
        """What member `rank` receives when all have sent something of this kind, by sender."""
        ...


class Gathered(tuple[Tensor, ...]):
    """Messages that all members receive alike: one object for all of them."""

    __slots__ = ()


class ToEach:
    """A message for each member."""

    __slots__ = ("_messages", "nbytes")

    def __init__(self, messages: Sequence[Tensor]) -> None:
        self._messages = messages
        self.nbytes = array("q", [x.numel() * x.element_size() for x in messages])

    def messages(self, size: int) -> Sequence[Tensor]:
        return self._messages

    def received(self, everyone: Sequence[Outgoing], rank: int) -> Sequence[Tensor]:
        return [own._messages[rank] for own in cast("Sequence[ToEach]", everyone)]


class ToAll:
    """The same message for all members."""

    __slots__ = ("_gathered", "_message", "nbytes")

    def __init__(self, message: Tensor) -> None:
        self._message = message
        self.nbytes = message.numel() * message.element_size()
        self._gathered: Gathered | None = None  # kept by the first member's

    def messages(self, size: int) -> Sequence[Tensor]:
        return [self._message] * size

    def received(self, everyone: Sequence[Outgoing], rank: int) -> Sequence[Tensor]:
        first = cast("ToAll", everyone[0])
        if first._gathered is None:
            first._gathered = Gathered(own._message for own in cast("Sequence[ToAll]", everyone))
        return first._gathered


class Shards:
    """Equal parts of a flat vector, as `tensor_split` makes them: one for each member."""

    __slots__ = ("_rows", "_whole", "nbytes")

    def __init__(self, whole: Tensor, size: int) -> None:
        self._whole = whole
        self.nbytes = _sizes(whole.numel(), size, whole.element_size())
        self._rows: Rows | None = None  # kept by the first member's

    def messages(self, size: int) -> Sequence[Tensor]:
        return self._whole.tensor_split(size)

    def received(self, everyone: Sequence[Outgoing], rank: int) -> Sequence[Tensor]:
        first = cast("Shards", everyone[0])
        if first._rows is None:
            first._rows = Rows([own._whole for own in cast("Sequence[Shards]", everyone)])
        return Column(first._rows, rank)


class Rows:
    """The vectors of all members, of which each receives a column."""

    __slots__ = ("means", "whole")

    def __init__(self, whole: list[Tensor]) -> None:
        self.whole = whole
        # Of all shards, once the owner of one has asked for it.
        self.means: tuple[Tensor, ...] | None = None


class Column(Sequence[Tensor]):
    """One shard of every member's vector. The pieces are cut when they are asked for."""

    __slots__ = ("rank", "rows")

    def __init__(self, rows: Rows, rank: int) -> None:
        self.rows, self.rank = rows, rank

    def __len__(self) -> int:
        return len(self.rows.whole)

    def __getitem__(self, number: int) -> Tensor:  # type: ignore[override]
        whole = self.rows.whole[number]
        start, stop = span(whole.numel(), len(self), self.rank)
        return whole[start:stop]

    def __iter__(self) -> Iterator[Tensor]:
        return map(self.__getitem__, range(len(self)))

    @property
    def span(self) -> tuple[int, int]:
        """Where its pieces begin and end."""
        return span(self.rows.whole[0].numel(), len(self), self.rank)


class Passed(Protocol[T_co]):
    """What one member starts with that goes around a ring."""

    @property
    def nbytes(self) -> int: ...

    @property
    def message(self) -> Tensor: ...

    @property
    def is_added(self) -> bool:
        """Whether each receiver calls `torch.add` on the message and its own part."""
        ...

    def received(self, everyone: "Sequence[Passed[object]]", rank: int) -> T_co:
        """What member `rank` has when all have passed on something of this kind, by rank."""
        ...


class Whole:
    """A message for all members, which each passes on as it is. They are gathered by number."""

    __slots__ = ("_gathered", "first", "message", "nbytes")

    is_added = False

    def __init__(self, message: Tensor, first: int) -> None:
        self.message = message
        self.first = first  # its number
        self.nbytes = message.numel() * message.element_size()
        self._gathered: Gathered | None = None  # kept by the first member's

    def received(self, everyone: Sequence[Passed[object]], rank: int) -> Sequence[Tensor]:
        wholes = cast("Sequence[Whole]", everyone)
        if wholes[0]._gathered is None:
            by_number = sorted(wholes, key=lambda own: own.first)
            wholes[0]._gathered = Gathered(own.message for own in by_number)
        return wholes[0]._gathered


class Addends:
    """A flat vector in n parts, as `tensor_split` makes them, whose sums travel around a ring.

    Part r starts at member r, and each adds its own to what comes; member r - 1 gets the sum.
    """

    __slots__ = ("_size", "_sums", "_whole", "message", "nbytes")

    is_added = True

    def __init__(self, whole: Tensor, size: int, rank: int) -> None:
        start, stop = span(whole.numel(), size, rank)
        self._whole = whole
        self._size = size
        self.message = whole[start:stop]
        self.nbytes = (stop - start) * whole.element_size()
        self._sums: Tensor | None = None  # of all parts; kept by the first member's

    def received(self, everyone: Sequence[Passed[object]], rank: int) -> Tensor:
        addends = cast("Sequence[Addends]", everyone)
        if addends[0]._sums is None:
            addends[0]._sums = sum_around([own._whole for own in addends])
        sums = addends[0]._sums
        start, stop = span(sums.numel(), self._size, (rank + 1) % self._size)
        # Like the result of a sum, an empty one shares no memory.
        return sums[start:stop] if start < stop else sums.new_empty(0)


def sum_around(wholes: Sequence[Tensor]) -> Tensor:
    """The sums of n vectors whose part r is added in the order r, r + 1, ..., r - 1.

    The parts that vector r is added to as the k-th lie together, but for a break at the end.
    """
    size, first = len(wholes), wholes[0]
    if any(own.shape != first.shape or own.dtype != first.dtype for own in wholes):
        kinds = sorted({f"{own.dtype} of shape {tuple(own.shape)}" for own in wholes})
        raise ValueError(f"members of a group add up different vectors: {', '.join(kinds)}")
    sums = torch.empty_like(first)
    for rank, own in enumerate(wholes):
        start, stop = span(first.numel(), size, rank)
        sums[:start] += own[:start]
        sums[start:stop] = own[start:stop]
    for rank, own in enumerate(wholes):
        stop = span(first.numel(), size, rank)[1]
        sums[stop:] += own[stop:]
    return sums


def as_argument(received: Sequence[Tensor]) -> Sequence[Tensor]:
    """What was received, for a function that ranks `call` or `share`."""
    return received if isinstance(received, Gathered | Column) else tuple(received)


def span(numel: int, size: int, index: int) -> tuple[int, int]:
    """Where a part begins and ends: the first ones are longer by one."""
    least, longer = divmod(numel, size)
    start = index * least + min(index, longer)
    return start, start + least + (index < longer)


@lru_cache(maxsize=64)
def _sizes(numel: int, size: int, itemsize: int) -> "array[int]":
    least, longer = divmod(numel, size)
    return array("q", [(least + (index < longer)) * itemsize for index in range(size)])
