"""The vectors of a selection, as its kernels take them."""

from functools import lru_cache
from typing import Any, NamedTuple

from torch import Tensor

from gradwire.kernels._motion import Motion, Residual


class Vectors(NamedTuple):
    """What p is formed from, and what is written beside: all of `rows` times n elements."""

    inputs: tuple[Tensor, Tensor, Tensor]  # x, residual, velocity
    outputs: tuple[Tensor, Tensor]  # the moved velocity, and what is left
    rows: int
    n: int
    rule: tuple[float, float]
    form: dict[str, Any]
    writes: dict[str, bool]


def vectors_of(
    x: Tensor, residual: Residual | None, out: Tensor | None, rows: int | None = None
) -> Vectors:
    """Of matrices, or of flat vectors, which are one row."""
    rows, n = (1, x.numel()) if rows is None else (rows, x.shape[1])
    x = x.contiguous()
    left = x if out is None else out
    if residual is None:
        inputs, kind = (x, x, x), 0
    elif not isinstance(residual, Motion):
        inputs, kind = (x, residual.contiguous(), x), 1
    else:
        motion = residual
        inputs = x, motion.residual.contiguous(), motion.velocity.contiguous()
        return Vectors(
            inputs,
            (motion.moved, left),
            rows,
            n,
            (float(motion.momentum), float(motion.scale)),
            _form(2, motion.nesterov, rows > 1),
            _writes(motion.masks, out is not None),
        )
    form, writes = _form(kind, False, rows > 1), _writes(False, out is not None)
    return Vectors(inputs, (x, left), rows, n, (0.0, 0.0), form, writes)


@lru_cache
def _form(kind: int, nesterov: bool, batch: bool) -> dict[str, Any]:
    return {"KIND": kind, "NESTEROV": nesterov, "BATCH": batch}


@lru_cache
def _writes(masks: bool, has_out: bool) -> dict[str, bool]:
    return {"MASKS": masks, "HAS_OUT": has_out}
