"""Bounds on what a server takes from the members of a job, derived from the job's own model.

A member is not trusted: what it sends may name any tensor, of any size, any number of times. The
model says which tensors are exchanged and how large they are, so everything else is a `WireError`.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from torch import Tensor

from gradwire.core.errors import WireError
from gradwire.core.notation import Expression
from gradwire.core.spec import Spec

_MAX_EXPANSION = 32  # limit of a message or a stored state, relative to its tensor
_MIN_NBYTES = 1 << 16  # accepted for any tensor, however short it is
_ENTRY_NBYTES = 1 << 10  # counted for a stored value, besides its tensors


@dataclass(frozen=True)
class Limits:
    """The tensors that the workers of one job exchange: label -> number of elements."""

    numels: Mapping[str, int]
    itemsize: int = 8

    def numel(self, label: str) -> int:
        if label not in self.numels:
            raise WireError(f"{label[:100]!r} is no tensor that this job exchanges")
        return self.numels[label]

    def check_message(self, label: str, nbytes: int) -> None:
        own_nbytes = self.numel(label) * self.itemsize
        if nbytes > max_nbytes(own_nbytes):
            raise WireError(
                f"a message of {nbytes} bytes for {label!r}, a tensor of {own_nbytes}; at most "
                f"{max_nbytes(own_nbytes)} are accepted"
            )

    def check_job(self, label: str, job: Any) -> None:
        """Refuses an aggregation of a tensor that is larger than the one it is sent for."""
        most = self.numel(label)
        for spec in specs_in(job):
            if not is_valid(spec) or spec.numel > most or spec.dtype.itemsize > self.itemsize:
                raise WireError(
                    f"a job on a tensor {list(spec.shape[:8])} {spec.dtype}, but {label!r} has "
                    f"{most} elements of at most {self.itemsize} bytes"
                )

    def check_kept(self, label: str, nbytes: int) -> None:
        """Refuses to keep so many bytes for all exchanges of one tensor."""
        own_nbytes = self.numel(label) * self.itemsize
        if nbytes > max_nbytes(own_nbytes):
            raise WireError(
                f"a server would keep {nbytes} bytes for {label!r}, a tensor of {own_nbytes}; at "
                f'most {max_nbytes(own_nbytes)} are kept. Use fewer rounds, or answers="dense"'
            )


def max_nbytes(own_nbytes: int) -> int:
    """The most bytes that are accepted for a tensor of so many bytes."""
    return max(_MIN_NBYTES, _MAX_EXPANSION * own_nbytes)


def specs_in(value: Any) -> Iterator[Spec]:
    """The specs in the fields of a value; expressions have none."""
    if isinstance(value, Spec):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from specs_in(item)
    elif is_dataclass(value) and not isinstance(value, Expression):
        for field in fields(value):
            yield from specs_in(getattr(value, field.name))


def is_valid(spec: Spec) -> bool:
    """Whether its shape, and the tensors that lie in it, fit together."""
    if any(dim < 0 for dim in spec.shape):
        return False
    return all(
        0 <= start <= stop <= spec.numel
        and all(dim >= 0 for dim in shape)
        and math.prod(shape) == stop - start
        for _, start, stop, shape in spec.tensors
    )


def kept_nbytes(state: Any) -> int:
    """How many bytes a state takes that is kept from one exchange to the next."""
    return _ENTRY_NBYTES + _tensor_nbytes(state)


def _tensor_nbytes(state: Any) -> int:
    if isinstance(state, Tensor):
        return state.nbytes
    if isinstance(state, Mapping):
        return sum(map(_tensor_nbytes, state.values()))
    return sum(map(_tensor_nbytes, state)) if isinstance(state, tuple | list) else 0
