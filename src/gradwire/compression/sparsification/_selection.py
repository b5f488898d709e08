"""Shared by sparsifiers: densities, thresholds, and the coding of positions.

Where the data decide how many elements are kept, the receiver must know. The count stands in
front of the coded positions, in as few bytes as the length of the tensor needs: three for a
million elements. It comes from the network, so it is checked before anything is allocated.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.coding.indices import decode_indices, encode_indices
from gradwire.core.codec import Guarantee, clamp_to, expect, is_finite, scale_dtype
from gradwire.core.errors import WireError
from gradwire.core.key import Key
from gradwire.core.spec import Spec

# A sample that estimates a threshold holds at least this many of the elements to be kept.
_MIN_SAMPLED = 64


def check_density(name: str, density: float) -> None:
    if not 0 < density <= 1:
        raise ValueError(
            f"{name}: density is the fraction kept and must lie in (0, 1], got {density}. "
            "To keep 1%, write 0.01."
        )


def check_sample(name: str, argument: str, ratio: float) -> None:
    if not 0 < ratio <= 1:
        raise ValueError(
            f"{name}: {argument} is the fraction of elements looked at and must lie in (0, 1], "
            f"got {ratio}. To look at 1%, write 0.01."
        )


def num_kept(density: float, numel: int) -> int:
    """How many of `numel` elements are kept: the nearest whole number, but at least one."""
    return min(numel, max(1, round(density * numel)))


def scatter(values: Tensor, indices: Tensor, spec: Spec) -> Tensor:
    """A vector that is zero but for `values` at `indices`."""
    if values.device.type == "cpu":
        zeros = kernels.empty(spec.numel, values.dtype).zero_()
    else:
        zeros = values.new_zeros(spec.numel)
    return zeros.scatter_(0, indices, values)


def strata(count: int, numel: int, key: Key, device: torch.device) -> tuple[Tensor, Tensor]:
    """A random position in each of `count` equal strata, and their sizes: int64 [count] both."""
    edges = torch.arange(count + 1, dtype=torch.int64, device=device) * numel // max(1, count)
    sizes = edges.diff()
    return kernels.strata_positions(numel, count, key.seed, key.stream, device), sizes


def sampled_threshold(
    x: Tensor, density: float, ratio: float, key: Key, residual: kernels.Residual | None = None
) -> float:
    """The magnitude that a fraction `density` of a random sample of x, or x + residual, reaches.

    See `_sample_size`.
    """
    numel = x.numel()
    if not numel:
        return 0.0
    size = _sample_size(density, ratio, numel)

    def of(vector: Tensor) -> Tensor:
        if size == numel:  # strata of one element each
            return vector
        return kernels.strata_values(vector, size, key.seed, key.stream)

    if isinstance(residual, kernels.Motion):
        residual = residual.replaced(of(residual.residual), of(residual.velocity))
    elif residual is not None:
        residual = of(residual)
    sample = kernels.with_residual(of(x), residual)
    return float(kernels.select_largest(sample, None, num_kept(density, size))[1].abs().min())


def _sample_size(density: float, ratio: float, numel: int) -> int:
    """A fraction `ratio` of the elements, or more where that would be too few: about 64 elements
    that are kept, for an error of one in eight, or all elements."""
    return min(numel, max(round(ratio * numel), round(_MIN_SAMPLED / density)))


def above_sampled(
    x: Tensor,
    density: float,
    ratio: float,
    key: Key,
    most: int,
    residual: kernels.Residual | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """What reaches the `sampled_threshold`, as `above`; the target is the fraction `density`."""
    if x.numel():
        size = _sample_size(density, ratio, x.numel())
        rank = num_kept(density, size)
        chosen = kernels.select_sampled(x, residual, size, rank, key.seed, key.stream, most, out)
        if chosen is not None and len(chosen[0]):
            return chosen
    threshold = sampled_threshold(x, density, ratio, key, residual)
    return above(x, threshold, num_kept(density, x.numel()), most, residual, out)


def above_sampled_rows(
    x: Tensor,
    density: float,
    ratio: float,
    keys: Sequence[Key],
    most: int,
    residual: kernels.Residual | None = None,
    out: Tensor | None = None,
) -> list[tuple[Tensor, Tensor]]:
    """`above_sampled` of each row of x, [n, d], with a key of its own."""
    numel, together = x.shape[1], None
    if numel:
        size = _sample_size(density, ratio, numel)
        rank, streams = num_kept(density, size), [(key.seed, key.stream) for key in keys]
        together = kernels.select_sampled_rows(x, residual, size, rank, streams, most, out)
    chosen = []
    for row, key in enumerate(keys):
        found = None if together is None else together[row]
        if found is None or not len(found[0]):
            owed, left = kernels.row_of_residual(residual, row), None if out is None else out[row]
            found = above_sampled(x[row], density, ratio, key, most, owed, left)
        chosen.append(found)
    return chosen


def above(
    x: Tensor,
    threshold: float,
    target: int,
    most: int,
    residual: kernels.Residual | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Ascending positions and values of what reaches `threshold` in magnitude, zeros left out.

    If more than `most` pass, the `most` largest of them. If none does, the threshold was wrong,
    and would be again in the next step if nothing were sent now: then the `target` largest. NaN
    and infinity pass every threshold. With a residual it is x + residual, and `out` gets what is
    not selected, zeros elsewhere.
    """
    indices, values = reaching(x, threshold, min(x.numel(), 2 * most), residual, out)
    if not len(indices):
        indices, values = kernels.select_largest(x, residual, min(target, x.numel()), out)
        real = values != 0
        if isinstance(residual, kernels.Motion):
            residual.unmask(x, indices[~real])
        return indices[real], values[real]
    if len(indices) > most:
        best, best_values = kernels.select_largest(values, None, most)
        if out is not None:
            values[best] = 0  # the others go back
            out.scatter_(0, indices, values)
        if isinstance(residual, kernels.Motion):
            others = torch.ones(len(indices), dtype=torch.bool, device=x.device)
            residual.unmask(x, indices[others.index_fill_(0, best, False)])
        return indices[best], best_values
    return indices, values


def reaching(
    x: Tensor,
    threshold: float,
    capacity: int,
    residual: kernels.Residual | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """All that reaches `threshold`, as above; about `capacity` of them. NaN reaches nothing."""
    limits = torch.finfo(x.dtype)
    if not threshold <= limits.max:
        threshold = math.inf
    # The least number of the dtype, so that zero does not reach it.
    return kernels.select_above(
        x, residual, max(threshold, limits.tiny * limits.eps), capacity, out
    )


def extremes(x: Tensor, num_high: int, num_low: int) -> tuple[Tensor, Tensor]:
    """Ascending positions and values of the largest elements above zero and the smallest below.

    As many as asked for, or as there are. What is not finite is always among them.
    """
    # One selection by magnitude holds both sides, unless one has far less than its share.
    count = min(x.numel(), num_high + num_low + 4 * math.isqrt(num_high + num_low) + 64)
    indices, values = kernels.select_largest(x, None, count)
    if not is_finite(values):
        return indices, values
    kept = torch.zeros(len(values), dtype=torch.bool, device=x.device)
    missed = []
    for number, sign in ((num_high, 1), (num_low, -1)):
        side = (sign * values).clamp_(min=0)
        best, taken = kernels.select_largest(side, None, min(number, count))
        if count < x.numel() and not bool((taken > 0).all()):
            best, taken = kernels.select_largest((sign * x).clamp_(min=0), None, number)
            missed.append(best[taken > 0])
        else:
            kept[best[taken > 0]] = True
    if not missed:
        return indices[kept], values[kept]
    indices = torch.cat([indices[kept], *missed]).sort().values
    return indices, x[indices]


def largest(x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Ascending positions and values of exactly `count` largest elements, not magnitudes."""
    indices, values = extremes(x, count, 0)
    if len(indices) < count:  # zeros and negative elements are among them
        indices = x.sort(descending=True, stable=True).indices[:count].sort().values
        values = x[indices]
    return indices, values


def in_range(x: Tensor) -> tuple[Tensor, float]:
    """x / unit and unit, a power of two, such that sums of squares of float64 do not overflow.

    Those of float32 are added up in float64 and need none: there the unit is 1.
    """
    if x.dtype != torch.float64 or not x.numel():
        return x, 1.0
    most = float(x.abs().max())
    unit = 2.0 ** (math.frexp(most)[1] - 1) if 0 < most < math.inf else 1.0
    return x / unit, unit


def mean_magnitude(values: Tensor, count: int) -> Tensor:
    """The mean magnitude of `count` numbers, in the dtype in which scales travel: [1]."""
    total = values.abs().sum(dtype=torch.float64) / max(1, count)
    if values.dtype == torch.float64 and not bool(torch.isfinite(total)):
        total = (values.abs() * 2.0**-64).sum() / max(1, count) * 2.0**64
    return clamp_to(total.reshape(1), scale_dtype(values.dtype))


def top_at_least_one(spec: Spec) -> Guarantee:
    """Of a codec that sends the j largest elements, j >= 1 up to the data: delta = 1/d."""
    return Guarantee(delta=1 / max(1, spec.numel))


def encode_positions(indices: Tensor, universe: int) -> Tensor:
    """Ascending positions whose number the receiver does not know: count and code, as uint8."""
    count = bytearray(len(indices).to_bytes(count_bytes(universe), "little"))
    packed = encode_indices(indices, universe)
    if not count:
        return packed
    return torch.cat([torch.frombuffer(count, dtype=torch.uint8).to(packed.device), packed])


def num_positions(packed: Tensor, name: str, universe: int) -> int:
    """The number of positions, read from the front of the bytes."""
    known = kernels.noted(packed, "positions")
    if known is not None and known[0] == universe:
        return int(known[1])
    width = count_bytes(universe)
    expect(packed, name, packed.numel(), torch.uint8)
    if packed.numel() < width:
        raise WireError(f"{name}: {packed.numel()} bytes, expected {width} of count and a code")
    count = int.from_bytes(bytes(packed[:width].tolist()), "little")
    if count > universe:
        raise WireError(f"{name}: {count} positions, but the tensor has {universe} elements")
    if packed.device.type != "cpu":  # which is slow to answer, and will be asked again
        kernels.note(packed, positions=(universe, count))
    return count


def decode_positions(packed: Tensor, name: str, universe: int) -> Tensor:
    """The inverse of `encode_positions`, as int64; other bytes are a WireError."""
    count = num_positions(packed, name, universe)
    return decode_indices(packed[count_bytes(universe) :], universe, count)


def count_bytes(universe: int) -> int:
    """Of the number in front of `encode_positions`."""
    return -(-universe.bit_length() // 8)


def matching_memory(memory: object, x: Tensor) -> Tensor | None:
    """A codec's memory per element, if it belongs to these elements, else None.

    An inner stage of a chain gets other elements in each step; it works without a memory.
    """
    if isinstance(memory, Tensor) and memory.numel() == x.numel():
        return memory.reshape(-1).to(x.device)
    return None
