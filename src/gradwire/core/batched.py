"""Functions that can be done for n workers at once.

A function that programs `call` may have a batched form: given the arguments of n calls it returns
the n results, bit for bit those of one call after another. The simulator hands over the calls of
one function that are outstanding together (`runtime/virtual/late_calls.py`); real processes never
do. Functions of vectors whose every element is computed by itself get theirs with `@elementwise`:
the vectors of n workers are stacked to [n, d], and the function itself does the rest.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from gradwire.core.metering import Work
from gradwire.core.rows import aligned_rows, row_of, split_rows, stack_rows

F = TypeVar("F", bound=Callable[..., Any])
Arguments = tuple[Any, ...]

_FORM = "_batched_form"
# On a CPU a call costs microseconds, and n long vectors at once fall out of the cache.
_MOST_ON_CPU = 1 << 14  # elements of a vector


class BatchedForm(Protocol):
    """How n calls of a function are done at once."""

    # Whether what a call costs is known by the reports of codecs in it only: then `run` returns
    # pairs, of a result and the work that was done for it (`core/metering.py`).
    reports: bool

    def keys(self, args: Arguments) -> tuple[Hashable, Hashable] | None:
        """Two keys. The first is equal for calls that read and make as many bytes, the second for
        calls that can be done at once. None: this call is done alone."""
        ...

    def run(self, calls: Sequence[Arguments]) -> list[Any] | None:
        """The results of calls of one group, in order. None, of a form that `reports`: they are
        done one after another."""
        ...

    def least_work(self, args: Arguments) -> Sequence[Work]:
        """Of a form that `reports`: a part of what the call will report, known before."""
        return ()


def batched(form: BatchedForm) -> Callable[[F], F]:
    """Gives a function a batched form."""

    def decorate(function: F) -> F:
        setattr(function, _FORM, form)
        return function

    return decorate


def form_of(function: Callable[..., Any]) -> BatchedForm | None:
    """The batched form of a function, if it has one."""
    found: BatchedForm | None = getattr(function, _FORM, None)
    return _OF_TORCH.get(function) if found is None else found


def elementwise(function: F) -> F:
    """For functions that compute each element of their vectors by itself and change no argument."""
    return batched(Elementwise(function))(function)


class Elementwise:
    """Stacks vectors to [n, d]. Calls must agree in everything but the values of vectors."""

    reports = False

    def __init__(
        self, function: Callable[..., Any], suits: Callable[[Arguments], bool] = lambda args: True
    ) -> None:
        self._function = function
        self._suits = suits

    def keys(self, args: Arguments) -> tuple[Hashable, Hashable] | None:
        if not self._suits(args):
            return None
        tensors: list[Tensor] = []
        numbers: list[float] = []
        structure = _structure(args, tensors, numbers)
        if not tensors or any(map(_is_too_long, tensors)):
            return None
        # Which of them are the same decides how many bytes are read.
        identities = [id(tensor) for tensor in tensors]
        same = tuple(map(identities.index, identities))
        # Some functions do without what is multiplied by zero or one.
        plain = tuple([number if number in (0, 1) else None for number in numbers])
        found = (structure, same, plain), (structure, tuple(numbers))
        try:
            hash(found)
        except TypeError:  # an argument that is no value
            return None
        return found

    def least_work(self, args: Arguments) -> Sequence[Work]:
        return ()

    def run(self, calls: Sequence[Arguments]) -> list[Any]:
        columns: list[list[Tensor]] = []
        for args in calls:
            tensors: list[Tensor] = []
            _structure(args, tensors, [])
            columns.append(tensors)
        by_position = list(zip(*columns))
        order = _order(by_position)
        stacked, is_stacked = [], False
        for own in by_position:
            first = own[0]
            if all(each is first for each in own):  # one for all: broadcast
                stacked.append(first)
            else:
                stacked.append(stack_rows([own[i] for i in order]))
                is_stacked = True
        result = self._function(*_with(calls[0], iter(stacked)))
        if not is_stacked:
            return [result] * len(calls)
        return _unstacked(result, order, max(tensor.dim() for tensor in stacked))


def _order(by_position: Sequence[Sequence[Tensor]]) -> list[int]:
    """The calls in the order of the rows that they were given, so that these lie together."""
    for own in by_position:
        if own[0] is not own[-1]:
            places = _places(own)
            if places is not None:
                return sorted(range(len(own)), key=places.__getitem__)
    return list(range(len(by_position[0])))


def order_of_rows(vectors: Sequence[Tensor]) -> list[int]:
    """The numbers of vectors in the order in which they lie in one memory, if they are rows."""
    return _order([vectors])


def _places(vectors: Sequence[Tensor]) -> list[int] | None:
    """Which rows of one memory they are; None if they are not."""
    first = row_of(vectors[0])
    if first is None:
        return None
    found = [row_of(each) for each in vectors]
    places = [each[1] for each in found if each is not None and each[0] is first[0]]
    return places if len(places) == len(found) else None


def _is_too_long(x: Tensor) -> bool:
    return x.device.type == "cpu" and x.numel() > _MOST_ON_CPU


def _structure(value: Any, tensors: list[Tensor], numbers: list[float]) -> Hashable:
    """What calls have in common but for vectors and numbers, which are appended."""
    if isinstance(value, Tensor):
        if value.dim():
            tensors.append(value)
            return value.shape, value.dtype, value.device
        if value.device.type != "cpu":
            return value.dtype, id(value)
        numbers.append(value.item())  # such as a count of steps
        return value.dtype
    if isinstance(value, tuple | list):
        return tuple([_structure(item, tensors, numbers) for item in value])
    if isinstance(value, Mapping):
        return tuple([(name, _structure(item, tensors, numbers)) for name, item in value.items()])
    if isinstance(value, int | float):
        numbers.append(value)
        return (type(value),)
    return type(value), value


def _with(value: Any, tensors: Any) -> Any:
    """The same arguments with other vectors."""
    if isinstance(value, Tensor):
        return next(tensors) if value.dim() else value
    if isinstance(value, tuple):
        return tuple([_with(item, tensors) for item in value])
    if isinstance(value, list):
        return [_with(item, tensors) for item in value]
    if isinstance(value, Mapping):
        return {name: _with(item, tensors) for name, item in value.items()}
    return value


def _unstacked(result: Any, order: Sequence[int], dim: int) -> list[Any]:
    """The result of each call. Tensors of fewer dimensions are the same for all."""
    count = len(order)
    if isinstance(result, Tensor):
        if result.dim() < dim:
            return [result] * count
        own: list[Any] = [None] * count
        for place, row in zip(order, split_rows(aligned_rows(result))):
            own[place] = row
        return own
    if isinstance(result, tuple):
        return list(zip(*(_unstacked(item, order, dim) for item in result)))
    if isinstance(result, dict):
        items = {name: _unstacked(item, order, dim) for name, item in result.items()}
        return [{name: items[name][i] for name in items} for i in range(count)]
    return [result] * count


_OF_TORCH: dict[Callable[..., Any], BatchedForm] = {
    function: Elementwise(function) for function in (torch.add, torch.sub, torch.mul)
}
