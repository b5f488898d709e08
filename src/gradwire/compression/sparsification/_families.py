"""Base classes of sparsifiers.

A `Selector` chooses elements of a vector. Another class, which comes first, decides what is sent of
them: `class TopK(Entries, Selector)` sends entries as they are, `class Threshold( SignedSelection,
Selector)` one bit each. A codec that chooses in a way of its own writes `split` and has one of
these alone.
"""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.compression.sparsification._entries import (
    entries_payload,
    entries_payloads,
    scattered_entries,
)
from gradwire.compression.sparsification._selection import (
    decode_positions,
    encode_positions,
    num_positions,
    scatter,
)
from gradwire.core.codec import (
    Codec,
    Kind,
    Parts,
    State,
    Traits,
    check_input,
    clamp_to,
    corrected,
    is_finite,
    pack_parts,
    payload_context,
    scale_dtype,
)
from gradwire.core.decoded_rows import EntryRows
from gradwire.core.errors import NonFiniteError
from gradwire.core.fusion import (
    Fusion,
    Residual,
    encode_feedback,
    encode_split_feedback,
    flat_residual,
    flat_vector,
)
from gradwire.core.key import Key
from gradwire.core.payload import Payload
from gradwire.core.payload_rows import moved
from gradwire.core.rows import rows_in_memory
from gradwire.core.spec import Spec

_MOST_ON_HOST = 1 << 14  # elements that are chosen of a row


class Selector(Codec):
    """Sends some elements of a vector: `choose` finds them, `make_parts` describes them."""

    traits = Traits(biased=True)

    @abstractmethod
    def choose(
        self, x: Tensor, key: Key, residual: Any = None, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Ascending positions and values of what is sent of x.

        x is float32 or float64. NaN and infinity must be among the chosen elements. `residual` and
        `out` are given only if `adds_residual`.
        """

    @abstractmethod
    def make_parts(self, indices: Tensor, values: Tensor, numel: int) -> Parts:
        """The parts that describe a selection; `values` are of the tensor's dtype."""

    @property
    def chooses_rows(self) -> bool:
        """Whether there is a `choose_rows`."""
        return False

    def choose_rows(
        self, x: Tensor, keys: Sequence[Key], residual: Any, out: Tensor | None
    ) -> list[tuple[Tensor, Tensor]]:
        """`choose` of every row of x, [n, d], at once. For selectors that send entries, and take
        residuals."""
        raise NotImplementedError(f"{self!r} chooses of one vector at a time")

    @property
    def adds_residual(self) -> bool:
        """Whether `choose` adds the residual itself, and leaves in `out` what it does not take."""
        return False

    @property
    def takes_motion(self) -> bool:
        """Whether a `kernels.Motion` may stand for the residual of `choose`."""
        return False

    def decode_values(self, parts: Parts, values: Tensor) -> Tensor | None:
        """What the parts decode to where `values` were selected; None if those themselves."""
        return None

    @property
    def fusion(self) -> Fusion[Any]:
        return SelectorFusion(self)

    def split(self, x: Tensor, state: State, key: Key) -> tuple[Parts, State]:
        indices, values = self.choose(x.to(scale_dtype(x.dtype)), key)
        return self.make_parts(indices, values.to(x.dtype), x.numel()), state


class Entries(Codec):
    """Sends some of the input's entries as they are, and their positions."""

    parts = ("indices", "values")
    traits = Traits(selects=True, biased=True)
    # Whether the parts are values and `encode_positions` (True) or `encode_indices` (False) of
    # their positions; None for others, such as several codes.
    counts_entries: ClassVar[bool | None] = None

    @abstractmethod
    def positions(self, parts: Parts, spec: Spec) -> Tensor:
        """Where the values belong, int64, each once."""

    @property
    def fusion(self) -> Fusion[Any]:
        return EntrySelectorFusion(self) if isinstance(self, Selector) else EntriesFusion(self)

    def join(self, parts: Parts, spec: Spec, key: Key) -> Tensor:
        counted = self.counts_entries
        joined = None if counted is None else scattered_entries(parts, spec, counted)
        if joined is not None:
            return joined
        return scatter(parts["values"], self.positions(parts, spec), spec)


class Selection(Entries):
    """Sends some of the input's entries as they are; the data decide how many."""

    counts_entries = True

    def values_spec(self, spec: Spec, parts: Parts) -> Spec:
        return Spec((num_positions(parts["indices"], "indices", spec.numel),), spec.dtype)

    def make_parts(self, indices: Tensor, values: Tensor, numel: int) -> Parts:
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

    def make_parts(self, indices: Tensor, values: Tensor, numel: int) -> Parts:
        return {"indices": encode_positions(indices, numel), "values": values < 0}

    def decode_values(self, parts: Parts, values: Tensor) -> Tensor:
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


class SelectorFusion(Fusion[Any]):
    """With feedback the corrected vector is written once, into what becomes the new residual."""

    @property
    def takes_motion(self) -> bool:
        codec: Selector = self.codec
        return codec.takes_motion and codec.traits.coder is None

    @property
    def takes_rows(self) -> bool:
        codec: Selector = self.codec
        return codec.chooses_rows

    def encode(self, x: Tensor, state: State, key: Key) -> tuple[Payload, State] | None:
        codec: Selector = self.codec
        if codec.traits.coder is not None or not kernels.fuses(x):
            return None
        indices, values = codec.choose(flat_vector(x), key)
        if not _all_finite(values):
            check_input(codec, x)
        return self.pack(indices, values, Spec.of(x)), state

    def pack(self, indices: Tensor, values: Tensor, spec: Spec) -> Payload:
        """The payload of a selection from a tensor of `spec`."""
        codec: Selector = self.codec
        return pack_parts(codec, codec.make_parts(indices, values, spec.numel), spec)

    def split_feedback(
        self, x: Tensor, residual: Residual, state: State, key: Key, out: Tensor | None = None
    ) -> tuple[Parts, Tensor, State] | None:
        codec: Selector = self.codec
        if not kernels.fuses(x, residual):
            if isinstance(residual, kernels.Motion):
                return (*self._split_motion(x, residual, key), state)
            return None
        indices, values, lost = self._choose(x, residual, key, out)
        parts = codec.make_parts(indices, values, x.numel())
        decoded = codec.decode_values(parts, values)
        if decoded is not None:
            lost.scatter_(0, indices, values - decoded)
        elif not codec.adds_residual:
            lost.index_fill_(0, indices, 0)
        return parts, lost, state

    def _choose(
        self, x: Tensor, residual: Residual, key: Key, out: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Positions and values of what is selected of x + residual, and what is left, in `out` if
        there is one. If the codec does not add the residual itself, that is all."""
        codec: Selector = self.codec
        lost = kernels.empty(x.numel(), device=x.device) if out is None else out
        if codec.adds_residual:
            indices, values = codec.choose(x, key, residual, lost)
        else:
            assert isinstance(residual, Tensor), f"{codec!r} takes no motion"
            indices, values = codec.choose(torch.add(x, residual, out=lost), key)
        if not _all_finite(values):
            check_input(codec, kernels.with_residual(x, residual))
        return indices, values, lost

    def encode_rows(
        self, x: Tensor, residual: Residual | None, keys: Sequence[Key], out: Tensor | None
    ) -> Sequence[Payload] | None:
        codec: Selector = self.codec
        if codec.traits.coder is not None or not kernels.fuses(x, residual):
            return None
        spec = Spec((x.shape[1],), x.dtype)
        chosen = codec.choose_rows(x, keys, residual, out)
        for number, (_, values) in enumerate(chosen):
            if not _all_finite(values):
                raise NonFiniteError(f"NaN or infinity in row {number} of {list(x.shape)}")
        payloads = self.pack_rows(chosen, spec, x.device)
        EntryRows(codec, spec, chosen).note(payloads)
        return payloads

    def pack_rows(
        self, chosen: Sequence[tuple[Tensor, Tensor]], spec: Spec, device: torch.device
    ) -> Sequence[Payload]:
        """The payloads of selections from several vectors of `spec`, with their bytes complete."""
        codec: Selector = self.codec
        if _codes_on_host(chosen):
            counts = [indices.numel() for indices, _ in chosen]
            vectors = (_on_host(own).split(counts) for own in zip(*chosen))
            chosen = list(zip(*vectors))
        parts = (codec.make_parts(*own, spec.numel) for own in chosen)
        context = payload_context(codec, spec)
        payloads = [
            Payload.pack({name: own[name] for name in codec.parts}, context) for own in parts
        ]
        for payload in payloads:
            _ = payload.buffer
        return moved(payloads, device) if payloads[0].buffer.device != device else payloads

    def _split_motion(self, x: Tensor, motion: kernels.Motion, key: Key) -> tuple[Parts, Tensor]:
        codec: Selector = self.codec
        check_input(codec, x)  # here, because saturating would hide infinities
        velocity, step = motion.step(x)
        total = corrected(clamp_to(step, x.dtype), motion.residual)
        check_input(codec, total)
        indices, values = codec.choose(total.to(scale_dtype(x.dtype)), key)
        parts = codec.make_parts(indices, values.to(x.dtype), x.numel())
        motion.moved.copy_(velocity)
        if motion.masks:
            motion.moved.index_fill_(0, indices, 0)
        return parts, total - codec.join(parts, Spec.of(x), key)

    def encode_feedback(
        self, x: Tensor, residual: Residual, state: State, key: Key, out: Tensor | None = None
    ) -> tuple[Payload, Tensor, State] | None:
        codec: Selector = self.codec
        if isinstance(residual, Tensor) and not kernels.fuses(x, residual):
            return None
        try:
            coder = codec.traits.coder
            if coder is not None and isinstance(residual, Tensor):
                coded = encode_feedback(codec >> coder, x, residual, (state, None), key, out)
                payload, lost, states = coded
                return payload, lost, states[0]  # that of the coder is None
            return encode_split_feedback(codec, x, residual, state, key, out)
        except NonFiniteError:
            # This one names the shape of the tensor.
            check_input(codec, kernels.with_residual(x, residual))
            raise


class EntriesFusion(Fusion[Any]):
    """Sums touch only what was selected."""

    @property
    def adds_few(self) -> bool:
        return True

    def add_joined(self, total: Tensor, parts: Parts, spec: Spec, key: Key) -> Tensor:
        codec: Entries = self.codec
        return total.index_add_(0, codec.positions(parts, spec), parts["values"].to(total.dtype))


class EntrySelectorFusion(EntriesFusion, SelectorFusion):
    """Fusion of selectors that send entries."""

    def encode_feedback(
        self, x: Tensor, residual: Residual, state: State, key: Key, out: Tensor | None = None
    ) -> tuple[Payload, Tensor, State] | None:
        codec: Any = self.codec
        is_plain = codec.counts_entries is not None and codec.traits.coder is None
        if not is_plain or not kernels.fuses(x, residual):
            return super().encode_feedback(x, residual, state, key, out)
        try:
            flat = flat_vector(x)
            indices, values, lost = self._choose(flat, flat_residual(residual), key, out)
        except NonFiniteError:
            # This one names the shape of the tensor.
            check_input(codec, kernels.with_residual(x, residual))
            raise
        if not codec.adds_residual:
            lost.index_fill_(0, indices, 0)
        lost = lost if x.dim() == 1 else lost.reshape(x.shape)
        return self.pack(indices, values, Spec.of(x)), lost, state

    def pack(self, indices: Tensor, values: Tensor, spec: Spec) -> Payload:
        counted = self.codec.counts_entries
        if counted is not None:
            payload = entries_payload(self.codec, indices, values, spec, counted)
            if payload is not None:
                return payload
        return super().pack(indices, values, spec)

    def pack_rows(
        self, chosen: Sequence[tuple[Tensor, Tensor]], spec: Spec, device: torch.device
    ) -> Sequence[Payload]:
        counted = self.codec.counts_entries
        if counted is not None and _codes_on_host(chosen):
            positions, values = (_on_host(own) for own in zip(*chosen))
            if kernels.codes_entries(values):
                counts = [indices.numel() for indices, _ in chosen]
                return entries_payloads(
                    self.codec, positions, values, counts, spec, counted, device
                )
        return super().pack_rows(chosen, spec, device)


def _codes_on_host(chosen: Sequence[tuple[Tensor, Tensor]]) -> bool:
    """The host codes a few thousand positions in less time than it takes to start the kernels."""
    return max(indices.numel() for indices, _ in chosen) <= _MOST_ON_HOST


def _on_host(vectors: Sequence[Tensor]) -> Tensor:
    """Vectors of any lengths, one after another on the CPU, by one copy."""
    whole = rows_in_memory(vectors)
    return (torch.cat(list(vectors)) if whole is None else whole.reshape(-1)).cpu()


def _all_finite(chosen: Tensor) -> bool:
    """Whether the vector that values were chosen from is finite: what is not is always chosen, so
    no extra pass looks for it."""
    known: bool | None = kernels.noted(chosen, "finite")
    return is_finite(chosen) if known is None else known
