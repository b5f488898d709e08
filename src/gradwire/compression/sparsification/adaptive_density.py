"""Top-k for a number of bytes, shared out over the layers where they lower the error most.

Of a bucket with layers x_l the k_l largest elements of each are sent, where k_l solve

    minimise   sum of the squares of all that is not sent,
    subject to bytes of the packed message <= target_bytes.

An element is worth sending if x^2 > lambda * bits, with one lambda for all layers and the bits of
an element of its layer: those of the value and of a position, log2((1 - p) / p) at the density p
of that layer. This is reverse water-filling (Cover and Thomas 2006, sec. 10.3.3) in the form of
Shoham and Gersho 1988 for measured rates and errors; `_water_filling.py` says how lambda is found.
It is found anew in every step, on a sample of each layer and then on the elements in question; one
pass over the vector selects those. Positions in layers of different density are coded by
themselves, those in neighbours of about the same density together. Tensors of fewer than 512
elements count as one layer with their neighbours.

The survey leaves adapting compression to the course of training as an open question (Tang et al.
2020, sec. 10, the third). Accordion (Agarwal et al. 2021) switches each layer between two rates by
the change of its gradient norm; L-GreCo (Markov et al. 2024) searches for parameters of each layer
by dynamic programming. Here elements compete directly, and shares of layers follow the gradient.

`target_bytes` are those of one payload: per worker, step and bucket. The packed payload is never
larger, and takes at least 95% of it unless the gradient has too few nonzero elements. In a chain
the values are encoded by others: say with `value_bits` how many bits they take each, as in
`adaptive_density(20000, value_bits=16) >> fp16`. Then positions, header and so many bits for each
value keep to the budget; scales or tables that a later stage adds come on top. Without it values
are counted at the width of the tensor.

On the saved gradients at 0.2 to 5% of their bytes its error was within one per cent that of a
global `topk` of as many bytes, whose density is not known beforehand; that of
`layerwise(topk(...))` was 1.02 to 25 times as large.

Use it as `ef(adaptive_density(20000))` where a link allows for so many bytes, or in place of
`layerwise(topk(...))` where layers differ in magnitude. For 25 million elements in 161 tensors it
takes as long as 3 to 7 copies of the vector where `topk` takes 1.3, and some milliseconds for small
models. How many elements are sent depends on the data, so no contraction factor is stated.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.compression._layers import tensors_covering
from gradwire.compression.sparsification._families import Entries, EntriesFusion
from gradwire.compression.sparsification._layer_positions import (
    Layers,
    all_positions,
    layers_in,
    layers_of,
    read_positions,
    sizes_of,
    write_positions,
)
from gradwire.compression.sparsification._selection import reaching
from gradwire.compression.sparsification._water_filling import (
    Histogram,
    group_starts,
    layer_bits,
    least_magnitudes,
    num_worth_keeping,
)
from gradwire.core.codec import (
    Parts,
    State,
    Traits,
    check_input,
    check_tensor,
    corrected,
    is_finite,
    layout_in_state,
    pack_parts,
    scale_dtype,
)
from gradwire.core.errors import NonFiniteError
from gradwire.core.fusion import Residual, encode_split_feedback
from gradwire.core.key import Key
from gradwire.core.payload import Payload
from gradwire.core.spec import Spec

_SAMPLE_SHARE = 1 / 64  # of a layer, but no fewer elements than
_MIN_SAMPLE = 4096
_MIN_KEPT_IN_SAMPLE = 256
_TARGET_SHARE, _ACCEPTED_SHARE = 0.997, 0.985  # of the budget; the second is enough to stop
_MAX_TRIES = 6
_MIN_CODE_BITS = 256  # of a code that shows how clustered positions are
_EMPTY_BYTES = 16  # a message of nothing, at most
_DTYPE_BY_BITS = {16: torch.float16, 32: torch.float32, 64: torch.float64}


@dataclass(frozen=True, repr=False)
class AdaptiveDensity(Entries):
    """Keep the elements that lower the error most per bit, over all layers, for so many bytes."""

    target_bytes: int  # of a payload: per worker, step and bucket
    value_bits: int | None = None  # what a value takes after the stages that follow

    paper = "Shoham and Gersho 1988, Efficient bit allocation for an arbitrary set of quantizers"
    examples = (
        "adaptive_density(100000)",
        "adaptive_density(500)",
        "adaptive_density(100)",
        "adaptive_density(300, value_bits=16) >> fp16",
    )

    traits = Traits(selects=True, biased=True, layout=layout_in_state)

    def __post_init__(self) -> None:
        if self.target_bytes < 2 * _EMPTY_BYTES:
            raise ValueError(
                f"adaptive_density: target_bytes must be at least {2 * _EMPTY_BYTES}, as header "
                f"and checksum of a payload alone take up to {_EMPTY_BYTES}; got "
                f"{self.target_bytes}. To keep a fraction of the elements write topk(0.01)."
            )
        if self.value_bits is not None and not 1 <= self.value_bits <= 64:
            raise ValueError(
                f"adaptive_density: value_bits must lie in 1 .. 64, got {self.value_bits}. "
                "Leave it out if no codec follows."
            )

    def init(self, spec: Spec) -> State:
        layers = layers_in(spec.layout)
        if spec.numel and self.target_bytes < _EMPTY_BYTES + 2 * len(layers) + 16:
            raise ValueError(
                f"{self!r}: {len(layers)} layers in a bucket take "
                f"{_EMPTY_BYTES + 2 * len(layers) + 16} bytes before anything is said about them. "
                'Raise target_bytes, or use smaller buckets: sequential("layer").'
            )
        return {"tensors": spec.layout, **_RateModel.nothing(len(layers))._asdict()}

    def values_spec(self, spec: Spec, parts: Parts) -> Spec:
        _, counts, _ = read_positions(parts["indices"], layers_of(spec))
        return Spec((sum(counts),), spec.dtype)

    def split(self, x: Tensor, state: State, key: Key) -> tuple[Parts, State]:
        message, state = self.choose_message(x, None, None, state, key)
        return message.parts, state

    @property
    def fusion(self) -> "_AdaptiveDensityFusion":
        return _AdaptiveDensityFusion(self)

    def positions(self, parts: Parts, spec: Spec) -> Tensor:
        return all_positions(*read_positions(parts["indices"], layers_of(spec)))

    def choose_message(
        self, x: Tensor, residual: Tensor | None, out: Tensor | None, state: State, key: Key
    ) -> tuple["SparseMessage", State]:
        """With a residual the elements are those of x + residual, and `out` gets all of them."""
        layers = layers_in(tensors_covering(state and state["tensors"], x.numel()))
        learnt = _RateModel.nothing(len(layers))
        if state and len(state["factors"]) == len(layers):
            learnt = _RateModel(state["ratio"], state["factors"])
        value_bits = self.value_bits or 8 * x.element_size()
        wide = x.to(scale_dtype(x.dtype))
        expected = 8 * self.target_bytes / (value_bits + 8)
        sample = _sample_histogram(wide, residual, layers, expected, key)
        for margin in (2, 16, None):
            budget = None if margin is None else margin * 8 * self.target_bytes
            kept = None if budget is None else learnt.kept(sample, value_bits, budget)
            found = _find_candidates(wide, residual, out, layers, sample, kept)
            if not is_finite(found.values):
                check_input(self, x if residual is None else x + residual)
            message, learnt = self._fit_message(found, layers, x.dtype, value_bits, learnt)
            has_enough = len(message.values) < 0.75 * len(found.values)
            if message.is_full or has_enough or found.is_everything:
                break
        if out is not None:
            out[found.indices] = found.values
        return message, {**state, **learnt._asdict()} if state else state

    def _fit_message(
        self,
        found: "Candidates",
        layers: Layers,
        dtype: torch.dtype,
        value_bits: int,
        learnt: "_RateModel",
    ) -> tuple["SparseMessage", "_RateModel"]:
        """The best of the messages tried that fit the budget, and the updated model of sizes."""
        histogram = Histogram.of(found.values, found.counts, sizes_of(layers))
        best, best_saved = SparseMessage.of_nothing(found, dtype), 0.0
        budget = _TARGET_SHARE * 8 * (self.target_bytes - _EMPTY_BYTES)
        for attempt in range(4 * _MAX_TRIES):
            kept = learnt.kept(histogram, value_bits, budget)
            message = SparseMessage.of(found, kept, layers, dtype, learnt.factors)
            size = message.size_bytes(self.value_bits)
            if size <= self.target_bytes:
                saved = float((message.values.double() / histogram.largest).square().sum())
                if saved >= best_saved:
                    left = self.target_bytes - size
                    is_full = left < max(
                        2 + value_bits / 8, (1 - _ACCEPTED_SHARE) * self.target_bytes
                    )
                    best, best_saved = message._replace(is_full=is_full), saved
            is_everything = len(message.values) == len(found.values) and size <= self.target_bytes
            if is_everything or not len(message.values):
                break
            before, learnt = learnt, learnt.updated(message, kept, layers, size, value_bits)
            if best.is_full and (attempt > 1 or learnt.is_near(before)):
                break
            if attempt >= _MAX_TRIES and len(best.values):
                break
            if size > self.target_bytes:  # by a little more each time, so that it ends
                learnt = learnt._replace(ratio=learnt.ratio * (1 + 0.003 * attempt**2))
        return best, learnt


class _AdaptiveDensityFusion(EntriesFusion):
    """Looks for what is not finite among the candidates, and adds the residual to them alone."""

    def encode(self, x: Tensor, state: State, key: Key) -> tuple[Payload, State]:
        codec: AdaptiveDensity = self.codec
        check_tensor(codec, x)
        try:
            parts, state = codec.split(x.detach().reshape(-1).contiguous(), state, key)
        except NonFiniteError:
            check_input(codec, x)  # which names the shape of the tensor
            raise
        return pack_parts(codec, parts, Spec.of(x)), state

    def split_feedback(
        self, x: Tensor, residual: Residual, state: State, key: Key, out: Tensor | None = None
    ) -> tuple[Parts, Tensor, State]:
        codec: AdaptiveDensity = self.codec
        assert isinstance(residual, Tensor), f"{codec!r} takes no motion"
        if kernels.fuses(x, residual):
            lost = kernels.empty(x.numel(), device=x.device)
            message, state = codec.choose_message(x, residual, lost, state, key)
        else:
            lost = corrected(x, residual)
            message, state = codec.choose_message(lost, None, None, state, key)
        lost.index_fill_(0, message.positions, 0)
        return message.parts, lost, state

    def encode_feedback(
        self, x: Tensor, residual: Residual, state: State, key: Key, out: Tensor | None = None
    ) -> tuple[Payload, Tensor, State]:
        return encode_split_feedback(self.codec, x, residual, state, key)


class _RateModel(NamedTuple):
    """Measured size of messages relative to the model of their size."""

    ratio: float  # of all bits
    factors: tuple[float, ...]  # of the bits of positions in each layer, which may cluster

    @staticmethod
    def nothing(num_layers: int) -> "_RateModel":
        return _RateModel(1.0, (1.0,) * num_layers)

    def kept(self, histogram: Histogram, value_bits: int, budget_bits: float) -> list[int]:
        """How many elements of each layer to send for so many bits."""
        bits = budget_bits / self.ratio
        return [int(k) for k in num_worth_keeping(histogram, value_bits, bits, self.factors)]

    def updated(
        self,
        message: "SparseMessage",
        kept: Sequence[int],
        layers: Layers,
        size: int,
        value_bits: int,
    ) -> "_RateModel":
        sizes, factors = sizes_of(layers), list(self.factors)
        for first, last, num_bytes in message.codes:
            promised = layer_bits(sum(kept[first:last]), sum(sizes[first:last]))
            if promised > _MIN_CODE_BITS:
                factor = min(1.2, max(0.1, 8 * num_bytes / promised))
                factors[first:last] = [factor] * (last - first)
        bits = sum(k * value_bits + f * layer_bits(k, n) for k, f, n in zip(kept, factors, sizes))
        ratio = 8 * (size - _EMPTY_BYTES) / max(bits, 1.0)
        return _RateModel(min(2.0, max(0.5, ratio)), tuple(factors))

    def is_near(self, other: "_RateModel") -> bool:
        return all(abs(a - b) < 0.1 for a, b in zip(self.factors, other.factors))


class Candidates(NamedTuple):
    """The candidate elements, layer by layer."""

    indices: Tensor  # int64, of the bucket
    values: Tensor
    counts: list[int]  # of each layer
    is_everything: bool  # all but zeros


class SparseMessage(NamedTuple):
    """Positions as they travel, and values."""

    indices: Tensor  # uint8
    values: Tensor
    positions: Tensor  # of the bucket, int64
    codes: list[tuple[int, int, int]]  # of which layers, first and end, and its bytes
    is_full: bool = False  # takes nearly all of the budget

    @property
    def parts(self) -> Parts:
        return {"indices": self.indices, "values": self.values}

    @staticmethod
    def of_nothing(found: Candidates, dtype: torch.dtype) -> "SparseMessage":
        empty = torch.empty(0, dtype=torch.uint8, device=found.values.device)
        return SparseMessage(empty, found.values[:0].to(dtype), found.indices[:0], [])

    @staticmethod
    def of(
        found: Candidates,
        kept: Sequence[int],
        layers: Layers,
        dtype: torch.dtype,
        factors: Sequence[float],
    ) -> "SparseMessage":
        """Of the `kept` largest of each layer."""
        if not sum(kept):
            return SparseMessage.of_nothing(found, dtype)
        choose_message = []
        by_layer = zip(
            found.indices.split(found.counts), found.values.split(found.counts), strict=True
        )
        for count, (there, own) in zip(kept, by_layer, strict=True):
            if 0 < count < len(own):
                best, own = kernels.select_largest(own.contiguous(), None, count)
                there = there[best]
            choose_message.append((there[:count], own[:count]))
        positions = torch.cat([there for there, _ in choose_message])
        values = torch.cat([own for _, own in choose_message]).to(dtype)
        firsts = group_starts(kept, sizes_of(layers), factors)
        indices, lengths = write_positions(positions, kept, layers, firsts)
        ends = pairwise([*firsts, len(layers)])
        codes = [(*group, size) for group, size in zip(ends, lengths, strict=True)]
        return SparseMessage(indices, values, positions, codes)

    def size_bytes(self, value_bits: int | None) -> int:
        """Of the packed payload, if a value takes so many bits, or as many as it has."""
        values = self.values
        if value_bits is not None:
            wide = _DTYPE_BY_BITS.get(value_bits, torch.uint8)
            count = (
                len(values) if value_bits in _DTYPE_BY_BITS else -(-len(values) * value_bits // 8)
            )
            values = torch.empty(count, dtype=wide, device=values.device)
        return Payload.pack({**self.parts, "values": values}).nbytes


def _sample_histogram(
    x: Tensor, residual: Tensor | None, layers: Layers, expected: float, key: Key
) -> Histogram:
    """Of a sample of each layer that holds some of about `expected` elements to be kept."""
    share = max(_SAMPLE_SHARE, min(1.0, _MIN_KEPT_IN_SAMPLE / max(1.0, expected)))
    sample, taken = [], []
    for number, (start, stop) in enumerate(layers):
        size = min(stop - start, max(_MIN_SAMPLE, round(share * (stop - start))))
        stream = key.child(f"sample {number}")
        pieces = [x[start:stop]] if residual is None else [x[start:stop], residual[start:stop]]
        if size < stop - start:
            pieces = [kernels.strata_values(p, size, stream.seed, stream.stream) for p in pieces]
        sample.append(pieces[0] if residual is None else pieces[0] + pieces[1])
        taken.append(size)
    sizes = sizes_of(layers)
    values = sample[0] if len(sample) == 1 else torch.cat(sample)
    if not is_finite(values):  # so must be a candidate: found by another look at all of them
        return Histogram.of(values[:0], [0] * len(taken), sizes)
    histogram = Histogram.of(values, taken, sizes)
    factors = [size / max(1, own) for size, own in zip(sizes, taken)]
    return histogram.scaled(torch.tensor(factors, dtype=torch.float64))


def _find_candidates(
    x: Tensor,
    residual: Tensor | None,
    out: Tensor | None,
    layers: Layers,
    sample: Histogram,
    kept: Sequence[int] | None,
) -> Candidates:
    """About so many of each layer, or all but zeros: one pass over the vector."""
    least, capacity = [0.0] * len(layers), list(sizes_of(layers))
    is_everything = True
    if kept is not None and sample.largest:
        is_everything = sum(kept) >= int(sample.counts.sum())
        if not is_everything:
            least, capacity = least_magnitudes(sample, kept), [2 * count for count in kept]
    indices, values = [], []
    for (start, stop), threshold, most in zip(layers, least, capacity, strict=True):
        own, found = reaching(
            x[start:stop],
            threshold,
            most + 64,
            None if residual is None else residual[start:stop],
            None if out is None else out[start:stop],
        )
        indices.append(own + start)
        values.append(found)
    counts = [len(own) for own in values]
    return Candidates(torch.cat(indices), torch.cat(values), counts, is_everything)
