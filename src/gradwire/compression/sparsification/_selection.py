"""What sparsifiers share: densities, thresholds, and how a selection travels.

Where the data decide how many elements are kept, the receiver must be told. The count stands in
front of the coded positions, in as few bytes as the length of the tensor needs: three for a
million elements. It comes from the network, so it is checked before anything is allocated.
"""

import math
from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.coding.indices import decode_indices, encode_indices
from gradwire.core.codec import (
    Codec,
    Guarantee,
    Kind,
    Parts,
    State,
    check_input,
    clamp_to,
    corrected,
    expect,
    is_finite,
    scale_dtype,
)
from gradwire.core.errors import NonFiniteError, WireError
from gradwire.core.key import Key
from gradwire.core.payload import Payload
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
    """The magnitude that a fraction `density` of a random sample reaches.

    The sample is a fraction `ratio` of the elements of x, or x + residual, or more where that would
    be too few to tell: it holds about 64 elements that are kept, for an error of one in eight, or
    all elements.
    """
    numel = x.numel()
    if not numel:
        return 0.0
    size = min(numel, max(round(ratio * numel), round(_MIN_SAMPLED / density)))

    def of(vector: Tensor) -> Tensor:
        if size == numel:  # strata of one element each
            return vector
        return kernels.strata_values(vector, size, key.seed, key.stream)

    sample = of(x)
    if isinstance(residual, kernels.Motion):
        sample = sample + residual.replaced(of(residual.residual), of(residual.velocity))
    elif residual is not None:
        sample = sample + of(residual)
    return float(kernels.select_largest(sample, None, num_kept(density, size))[1].abs().min())


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


def mean_of(values: Tensor, count: int) -> Tensor:
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


class Selector(Codec):
    """Sends some elements of a vector: `choose` finds them, `message` tells of them.

    How they travel may be up to a second class, which then comes first: `(Selection, Selector)`.
    With feedback the corrected vector is written once, into what becomes the new residual.
    """

    @abstractmethod
    def choose(
        self, x: Tensor, key: Key, residual: Any = None, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Ascending positions and values of what is sent of x; `residual` and `out` if `one_pass`.

        x is float32 or float64. NaN and infinity must be among what is found.
        """

    @abstractmethod
    def message(self, indices: Tensor, values: Tensor, numel: int) -> Parts:
        """The parts that tell of a selection; `values` are of the tensor's dtype."""

    @property
    def biased(self) -> bool:
        return True

    @property
    def one_pass(self) -> bool:
        """Whether `choose` adds the residual itself, and leaves in `out` what it does not take."""
        return False

    @property
    def moves(self) -> bool:
        """Whether a `kernels.Motion` may stand for the residual, here and for `choose`."""
        return False

    def heard(self, parts: Parts, values: Tensor) -> Tensor | None:
        """What the parts decode to where `values` were selected; None if those themselves."""
        return None

    def split(self, x: Tensor, state: State, key: Key) -> tuple[Parts, State]:
        indices, values = self.choose(x.to(scale_dtype(x.dtype)), key)
        return self.message(indices, values.to(x.dtype), x.numel()), state

    def split_feedback(
        self, x: Tensor, residual: kernels.Residual, state: State, key: Key
    ) -> tuple[Parts, Tensor, State]:
        if not kernels.fuses(x, residual):
            if isinstance(residual, kernels.Motion):
                return (*self._split_motion(x, residual, key), state)
            return super().split_feedback(x, residual, state, key)
        lost = kernels.empty(x.numel())
        if self.one_pass:
            indices, values = self.choose(x, key, residual, lost)
        else:
            assert isinstance(residual, Tensor), f"{self!r} takes no motion"
            indices, values = self.choose(torch.add(x, residual, out=lost), key)
        if not is_finite(values):
            check_input(self, x + residual)
        parts = self.message(indices, values, x.numel())
        heard = self.heard(parts, values)
        if heard is not None:
            lost.scatter_(0, indices, values - heard)
        elif not self.one_pass:
            lost.index_fill_(0, indices, 0)
        return parts, lost, state

    def _split_motion(self, x: Tensor, motion: kernels.Motion, key: Key) -> tuple[Parts, Tensor]:
        check_input(self, x)  # here, because saturating would hide infinities
        velocity, step = motion.step(x)
        total = corrected(clamp_to(step, x.dtype), motion.residual)
        check_input(self, total)
        indices, values = self.choose(total.to(scale_dtype(x.dtype)), key)
        parts = self.message(indices, values.to(x.dtype), x.numel())
        motion.moved.copy_(velocity)
        if motion.masks:
            motion.moved.index_fill_(0, indices, 0)
        return parts, total - self.join(parts, Spec.of(x), key)

    def encode(self, x: Tensor, state: State, key: Key) -> tuple[Payload, State]:
        if self.coder is not None or not kernels.fuses(x):
            return super().encode(x, state, key)
        flat = x.detach().reshape(-1).contiguous()
        indices, values = self.choose(flat, key)
        if not is_finite(values):  # what is not finite is always found: no pass looks for it
            check_input(self, x)
        return self._packed(self.message(indices, values, x.numel()), Spec.of(x)), state

    def encode_feedback(
        self, x: Tensor, residual: kernels.Residual, state: State, key: Key
    ) -> tuple[Payload, Tensor, State]:
        if isinstance(residual, Tensor) and not kernels.fuses(x, residual):
            return super().encode_feedback(x, residual, state, key)
        flat, kept = x.detach().reshape(-1).contiguous(), residual.detach().reshape(-1).contiguous()
        try:
            if self.coder is not None and isinstance(residual, Tensor):
                coded = self >> self.coder
                return self._coded(coded.encode_feedback(x, residual, (state, None), key))
            parts, lost, state = self.split_feedback(flat, kept, state, key)
        except NonFiniteError:
            check_input(self, x + residual)  # which names the shape of the tensor
            raise
        return self._packed(parts, Spec.of(x)), lost.reshape(x.shape), state

    @staticmethod
    def _coded(done: tuple[Payload, Tensor, State]) -> tuple[Payload, Tensor, State]:
        payload, lost, states = done
        return payload, lost, states[0]  # that of the coder is None


class Entries(Codec):
    """Sends some of the input's entries as they are, and their positions."""

    parts = ("indices", "values")
    selects = True
    adds_few = True

    @abstractmethod
    def positions(self, parts: Parts, spec: Spec) -> Tensor:
        """Where the values belong, int64, each once."""

    def join(self, parts: Parts, spec: Spec, key: Key) -> Tensor:
        return scatter(parts["values"], self.positions(parts, spec), spec)

    def add_joined(self, total: Tensor, parts: Parts, spec: Spec, key: Key) -> Tensor:
        return total.index_add_(0, self.positions(parts, spec), parts["values"].to(total.dtype))


class Selection(Entries):
    """Sends some of the input's entries as they are; the data decide how many."""

    def values_spec(self, spec: Spec, parts: Parts) -> Spec:
        return Spec((num_positions(parts["indices"], "indices", spec.numel),), spec.dtype)

    def message(self, indices: Tensor, values: Tensor, numel: int) -> Parts:
        return {"indices": encode_positions(indices, numel), "values": values}

    def positions(self, parts: Parts, spec: Spec) -> Tensor:
        return decode_positions(parts["indices"], "indices", spec.numel)


class SignedSelection(Codec):
    """Sends the signs of some entries, one bit each; the data decide how many."""

    leaves = Kind.SYMBOLS

    def values_spec(self, spec: Spec, parts: Parts) -> Spec:
        count = num_positions(parts["indices"], "indices", spec.numel)
        return Spec((count,), spec.dtype, alphabet=2)

    @abstractmethod
    def means(self, parts: Parts, dtype: torch.dtype) -> tuple[float | Tensor, float | Tensor]:
        """What stands for a positive element, and minus what for a negative one."""

    def message(self, indices: Tensor, values: Tensor, numel: int) -> Parts:
        return {"indices": encode_positions(indices, numel), "values": values < 0}

    def heard(self, parts: Parts, values: Tensor) -> Tensor:
        return self._signed(parts, values.dtype)

    def join(self, parts: Parts, spec: Spec, key: Key) -> Tensor:
        indices = decode_positions(parts["indices"], "indices", spec.numel)
        return scatter(self._signed(parts, spec.dtype), indices, spec)

    def _signed(self, parts: Parts, dtype: torch.dtype) -> Tensor:
        is_negative = parts["values"].to(torch.bool)
        wide = scale_dtype(dtype)
        plus, minus = (
            torch.as_tensor(mean, dtype=wide, device=is_negative.device)
            for mean in self.means(parts, dtype)
        )
        return clamp_to(torch.where(is_negative, -minus, plus), dtype)
