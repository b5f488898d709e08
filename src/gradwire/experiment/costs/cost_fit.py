"""Costs from measured times: three numbers for each operation.

seconds = fixed + per_element * elements + per_byte * bytes
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import median

import torch

from gradwire.runtime.virtual.coding_time import Cost

Size = tuple[int, int]  # elements and bytes
Times = dict[Size, list[float]]
Samples = dict[Size, float]  # the usual time
_MAX_MISS = 1.5  # an example that is off by a larger factor has its own entry
_BYTES_EXPLAIN = 0.7  # of the squared error that is left without them, at most
_DIGITS, _ITERATIONS = 3, 30
_MIN_S = 1e-7  # the resolution of the clock: a difference may be below zero


def usual(times: Times) -> Samples:
    """The median time for each size. Fresh memory makes a factor of two or more for long vectors,
    and the fastest run never has fresh memory, so the minimum would be wrong."""
    return {size: max(median(seconds), _MIN_S) for size, seconds in times.items()}


def entries(name: str, samples: Mapping[str, Mapping[str, Samples]]) -> dict[str, dict[str, Cost]]:
    """The entry of a codec, and those of examples that do not fit it; none if nothing reported.

    The first example always counts, each of the others if all so far can be described together.
    """
    fits: dict[str, Cost] = {}
    together: list[Mapping[str, Samples]] = []
    own: dict[str, dict[str, Cost]] = {}
    for text, samples_of in samples.items():
        joint = _fitted_together([*together, samples_of])
        if not together or all(_miss(joint, one) <= _MAX_MISS for one in (*together, samples_of)):
            fits, together = joint, [*together, samples_of]
        else:
            own[text] = _fitted_together([samples_of])
    return {name: fits, **own} if fits else {}


def _fitted_together(several: Sequence[Mapping[str, Samples]]) -> dict[str, Cost]:
    pooled: defaultdict[str, Samples] = defaultdict(dict)
    for own in several:
        for operation, points in own.items():
            pooled[operation] |= points
    return {operation: fitted(pooled[operation]) for operation in sorted(pooled)}


def _miss(fits: Mapping[str, Cost], samples: Mapping[str, Samples]) -> float:
    return max((miss(fits[operation], points) for operation, points in samples.items()), default=1)


def miss(cost: Cost, samples: Samples) -> float:
    """By what factor a cost is off at the greatest length."""
    size, seconds = max(samples.items())
    ratio = cost.seconds(*size) / seconds
    return max(ratio, 1 / ratio if ratio else math.inf)


def fitted(samples: Samples) -> Cost:
    """The costs, none below zero, with the least squared logarithm of estimate over time.

    Of most codecs bytes are a multiple of elements, and either would do. So bytes count only if
    they explain what elements do not.
    """
    sizes = torch.tensor([(1, *size) for size in samples], dtype=torch.float64)  # [m, 3]
    seconds = torch.tensor(list(samples.values()), dtype=torch.float64)
    rows = sizes / seconds[:, None]  # what they add up to should be 1
    varied = bool(sizes[:, 2].max() > 2 * sizes[:, 2].min())  # or else they are a constant
    best, least = Cost(0.0, 0.0, 0.0), math.inf
    for columns in ((0,), (1,), (0, 1), (2,), (0, 2), (1, 2), (0, 1, 2)):
        chosen = rows[:, columns]
        scale = chosen.amax(dim=0)
        if not bool((scale > 0).all()) or (2 in columns and not varied):
            continue
        numbers = _least_log_error(chosen / scale)
        if numbers is None:
            continue
        error = float((chosen / scale @ numbers).log().square().sum())
        if error < least * (_BYTES_EXPLAIN if 2 in columns else 1.0):
            three = dict(zip(columns, (numbers / scale).tolist()))
            best = Cost(*(float(f"{three.get(i, 0.0):.{_DIGITS}g}") for i in range(3)))
            least = error
    return best


def _least_log_error(rows: torch.Tensor) -> torch.Tensor | None:
    """Numbers [k], none below zero, for which log(rows @ numbers) is nearest to 0.

    By Newton's method without second derivatives (Gauss-Newton); None if a number leaves the range.
    """
    ones = torch.ones(len(rows), dtype=rows.dtype)
    numbers = torch.linalg.lstsq(rows, ones[:, None]).solution[:, 0]
    for _ in range(_ITERATIONS):
        if not bool(torch.isfinite(numbers).all()) or bool((numbers < 0).any()):
            return None
        estimates = rows @ numbers
        if not bool((estimates > 0).all()):
            return None
        slopes = rows / estimates[:, None]
        step = torch.linalg.lstsq(slopes, -estimates.log()[:, None]).solution[:, 0]
        # A step that would leave the range goes half of the way to its border.
        falls = step < -numbers / 2
        share = torch.where(falls, -numbers / 2 / step, 1.0).min()
        numbers = numbers + share * step
    return numbers
