"""What sparsifiers share: densities, thresholds, and how a selection travels.

Where the data decide how many elements are kept, the receiver must be told. The count stands in
front of the coded positions, in as few bytes as the length of the tensor needs: three for a
million elements. It comes from the network, so it is checked before anything is allocated.
"""

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.coding.indices import decode_indices, encode_indices
from gradwire.compression.quantization._buckets import clamp_to
from gradwire.core.codec import Codec, Kind, Parts, expect, scale_dtype
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
    return values.new_zeros(spec.numel).scatter_(0, indices, values)


def largest(x: Tensor, count: int) -> Tensor:
    """Positions of the `count` largest elements, ascending."""
    return torch.topk(x, count, sorted=False).indices.sort().values


def strata(count: int, numel: int, key: Key, device: torch.device) -> tuple[Tensor, Tensor]:
    """A random position in each of `count` equal strata, and their sizes: int64 [count] both."""
    edges = torch.arange(count + 1, dtype=torch.int64, device=device) * numel // max(1, count)
    sizes = edges.diff()
    return kernels.strata_positions(numel, count, key.seed, key.stream, device), sizes


def sampled_threshold(
    x: Tensor, density: float, ratio: float, key: Key, residual: Tensor | None = None
) -> Tensor:
    """The magnitude that a fraction `density` of a random sample reaches, as a tensor of one.

    The sample is a fraction `ratio` of the elements of x, or x + residual, or more where that would
    be too few to tell: it holds about 64 elements that are kept, for an error of one in eight, or
    all elements.
    """
    numel = x.numel()
    if not numel:
        return x.new_zeros(())
    size = min(numel, max(round(ratio * numel), round(_MIN_SAMPLED / density)))
    sample = kernels.strata_values(x, size, key.seed, key.stream)
    if residual is not None:
        sample = sample + kernels.strata_values(residual, size, key.seed, key.stream)
    return kernels.select_largest(sample, None, num_kept(density, size))[1].abs().min()


def above(x: Tensor, threshold: Tensor | float, target: int, most: int) -> Tensor:
    """Ascending positions of elements of at least `threshold` in magnitude, zeros left out.

    If more than `most` pass, the `most` largest of them. If none does, the threshold was wrong,
    and would be again in the next step if nothing were sent now: then the `target` largest.
    """
    magnitude = x.abs()
    passed = ((magnitude >= threshold) & (magnitude > 0)).nonzero().reshape(-1)
    if not len(passed):
        passed = magnitude.nonzero().reshape(-1)
        most = target
    if len(passed) > most:
        passed = passed[kernels.select_largest(magnitude[passed], None, most)[0]]
    return passed


def encode_positions(indices: Tensor, universe: int) -> Tensor:
    """Ascending positions whose number the receiver does not know: count and code, as uint8."""
    count = bytearray(len(indices).to_bytes(_count_bytes(universe), "little"))
    packed = encode_indices(indices, universe)
    if not count:
        return packed
    return torch.cat([torch.frombuffer(count, dtype=torch.uint8).to(packed.device), packed])


def num_positions(packed: Tensor, name: str, universe: int) -> int:
    """How many positions `encode_positions` put there, as far as one can tell from the front."""
    width = _count_bytes(universe)
    expect(packed, name, packed.numel(), torch.uint8)
    if packed.numel() < width:
        raise WireError(f"{name}: {packed.numel()} bytes, expected {width} of count and a code")
    count = int.from_bytes(bytes(packed[:width].tolist()), "little")
    if count > universe:
        raise WireError(f"{name}: {count} positions, but the tensor has {universe} elements")
    return count


def decode_positions(packed: Tensor, name: str, universe: int) -> Tensor:
    """The inverse of `encode_positions`, as int64; other bytes are a WireError."""
    count = num_positions(packed, name, universe)
    return decode_indices(packed[_count_bytes(universe) :], universe, count)


def _count_bytes(universe: int) -> int:
    return -(-universe.bit_length() // 8)


def matching(memory: object, x: Tensor) -> Tensor | None:
    """What a codec remembers per element, if it remembers these elements.

    An inner stage of a chain gets other elements in each step; it works without a memory.
    """
    if isinstance(memory, Tensor) and memory.numel() == x.numel():
        return memory.reshape(-1).to(x.device)
    return None


class Selection(Codec):
    """Sends some of the input's entries as they are; the data decide how many."""

    parts = ("indices", "values")
    selects = True

    def values_spec(self, spec: Spec, parts: Parts) -> Spec:
        return Spec((num_positions(parts["indices"], "indices", spec.numel),), spec.dtype)

    def join(self, parts: Parts, spec: Spec, key: Key) -> Tensor:
        indices = decode_positions(parts["indices"], "indices", spec.numel)
        return scatter(parts["values"], indices, spec)

    @staticmethod
    def selected(x: Tensor, indices: Tensor) -> Parts:
        """The parts for these ascending positions."""
        return {"indices": encode_positions(indices, x.numel()), "values": x[indices]}


class SignedSelection(Codec):
    """Sends the signs of some entries, one bit each; the data decide how many."""

    leaves = Kind.SYMBOLS

    def values_spec(self, spec: Spec, parts: Parts) -> Spec:
        count = num_positions(parts["indices"], "indices", spec.numel)
        return Spec((count,), spec.dtype, alphabet=2)

    @staticmethod
    def signed(x: Tensor, indices: Tensor) -> dict[str, Tensor]:
        """The parts `indices` and `values`: where, and which of them are negative."""
        return {"indices": encode_positions(indices, x.numel()), "values": x[indices] < 0}

    @staticmethod
    def placed(
        parts: Parts, spec: Spec, positive: float | Tensor, negative: float | Tensor
    ) -> Tensor:
        """The vector that is `positive` or minus `negative` at the positions, zero elsewhere."""
        indices = decode_positions(parts["indices"], "indices", spec.numel)
        is_negative = parts["values"].to(torch.bool)
        dtype = scale_dtype(spec.dtype)
        device = is_negative.device
        plus = torch.as_tensor(positive, dtype=dtype, device=device)
        minus = torch.as_tensor(negative, dtype=dtype, device=device)
        values = torch.where(is_negative, -minus, plus)
        return scatter(clamp_to(values, spec.dtype), indices, spec)
