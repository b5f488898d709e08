"""Codecs: tensors to packed payloads and back; `a >> b` lets b encode a's values.

A codec is a frozen dataclass of hyper-parameters. What changes from step to step is a `State`
that `init` makes and `encode` takes and hands back, so one codec serves any number of workers.

An author writes two pure functions on flat vectors: `split` takes a vector apart into named
parts, one of which may be called `values`, and `join` puts them together again. Packing is done
here: real values travel as they are, symbols of an alphabet of m at ceil(log2 m) bits each.
What one codec leaves as `values` another may encode instead: that is what `>>` does.
"""

import enum
import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.core.errors import NonFiniteError, WireError
from gradwire.core.group import is_half, mean_in_order
from gradwire.core.key import Key
from gradwire.core.metering import report_methods
from gradwire.core.notation import Expression
from gradwire.core.payload import Payload
from gradwire.core.spec import Placed, Spec
from gradwire.core.symbols import pack_symbols, packed_bytes, unpack_symbols

# None, a number, a tensor, or a tuple / dict of states: what a checkpoint can hold.
State: TypeAlias = Any
Parts: TypeAlias = Mapping[str, Tensor]
# Of the squared norm: codecs that keep as much, such as fp8, are used without feedback.
_NEARLY_ALL = 0.9
_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


class Algebra(enum.IntEnum):
    """What can be done with payloads without decoding them; the order is by how much."""

    OPAQUE = 0  # nothing: decode, then average
    MERGE = 1  # two payloads merge into one (a majority vote), in any order
    LINEAR = 2  # payloads add: decode(a + b) = decode(a) + decode(b), up to rounding


class Kind(enum.Enum):
    """What a codec takes or leaves."""

    REAL = "real numbers"
    SYMBOLS = "symbols of a finite alphabet"
    NOTHING = "nothing to encode"


@dataclass(frozen=True, slots=True)
class Guarantee:
    """The class of a codec C as theory has it; None where it does not belong to the class.

    omega: E C(x) = x and E|C(x) - x|^2 <= omega |x|^2     (unbiased, relative variance)
    delta: E|C(x) - x|^2 <= (1 - delta) |x|^2              (contraction)

    It holds if every element is zero or has a magnitude in `within`. Without that it holds in the
    whole normal range of the tensor's dtype, as far as what is decoded lies in that range too:
    rounding up at random, or a factor of d/k, may lead beyond its upper end, where C(x) saturates.
    """

    omega: float | None = None
    delta: float | None = None
    grows: bool = False  # in neither class, and known to let errors grow that are fed back
    within: tuple[float, float] | None = None  # the smallest and the largest magnitude

    @property
    def contracts(self) -> bool:
        """Whether errors fed back die out, as far as theory tells; unknown counts as yes."""
        if self.delta is not None:
            return True
        return not self.grows and (self.omega is None or self.omega < 1)


LOSSLESS = Guarantee(omega=0.0, delta=1.0)


def overlap(guarantees: Sequence[Guarantee]) -> tuple[float, float] | None:
    """The magnitudes for which all of them hold, as `Guarantee.within`."""
    ranges = [each.within for each in guarantees if each.within is not None]
    if not ranges:
        return None
    return max(low for low, _ in ranges), min(high for _, high in ranges)


class Compression(Expression, ABC):
    """What travels: a codec, or a reducer that is more than one codec."""

    def unfed(self, spec: Spec) -> "Compression | None":
        """The part of it that drops something for good, and wants `ef(...)` around it; or None."""
        return None


class Codec(Compression):
    """Turns a tensor into a payload and back."""

    # Made of other codecs: those report what they do, see core/metering.py.
    is_composite: ClassVar[bool] = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        report_methods(cls)

    # A codec overrides these with plain class attributes, a chain derives them from its stages.
    @property
    def algebra(self) -> Algebra:
        return Algebra.OPAQUE

    @property
    def takes(self) -> Kind:
        return Kind.REAL

    @property
    def leaves(self) -> Kind:
        """What `values` are; a codec that leaves NOTHING ends its chain."""
        return Kind.REAL

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the parts, in wire order."""
        return ("values",)

    @property
    def selects(self) -> bool:
        """Whether values are some of the input's own entries and the rest decodes to zero.

        Then the errors of two chained stages are orthogonal and their guarantees combine.
        """
        return False

    @property
    def layered(self) -> bool:
        """Whether it needs the tensors inside a bucket, `Spec.layout`.

        Then `init` keeps them for `split`, `join` finds them in its spec, and no bucket is cut
        into shards.
        """
        return False

    def kept_layout(self, state: State) -> tuple[Placed, ...]:
        """What `init` of a layered codec kept: decoding needs the same."""
        return ()

    @property
    def needs_feedback(self) -> bool:
        """Whether it selects from what `ef(...)` accumulates, and is wrong without."""
        return False

    @property
    def biased(self) -> bool:
        """Whether it is known to be biased, for a codec whose guarantee does not tell."""
        return False

    def unfed(self, spec: Spec) -> "Compression | None":
        guarantee = self.guarantee(spec)
        if guarantee.omega is not None:
            return None
        loses = self.biased if guarantee.delta is None else guarantee.delta < _NEARLY_ALL
        return self if loses else None

    @property
    def coder(self) -> "Codec | None":
        """The coder of symbols that follows if the notation names none; usually fixed width."""
        return None

    @property
    def shares(self) -> bool:
        """Whether all ranks take the maximum of their `statistic` before they encode."""
        return False

    def statistic(self, x: Tensor) -> Tensor:
        """A short vector of what is encoded, for a codec that `shares`."""
        raise TypeError(f"{self!r} shares no statistic")

    def agreed(self, statistic: Tensor) -> "Codec":
        """This codec, knowing the maximum of everyone's `statistic`."""
        return self

    def following(self, first: "Codec") -> "Codec":
        """This codec as it is behind `first` in a chain; most are the same everywhere."""
        return self

    def init(self, spec: Spec) -> State:
        """The state before the first step; most codecs have none."""
        return None

    def guarantee(self, spec: Spec) -> Guarantee:
        """The class of this codec on tensors of this spec.

        Unknown, unless it codes symbols: those arrive as they are if nothing else is said.
        """
        return LOSSLESS if self.takes is Kind.SYMBOLS else Guarantee()

    @abstractmethod
    def split(self, x: Tensor, state: State, key: Key) -> tuple[Parts, State]:
        """The parts of a flat vector. `key` is the sender's; `key.shared()` is everybody's."""

    def split_feedback(
        self, x: Tensor, residual: Tensor, state: State, key: Key
    ) -> tuple[Parts, Tensor, State]:
        """`split` of x + residual, and what of it is lost if the parts arrive as they are.

        For the first stage of a chain; codecs with a fused kernel do it in one pass.
        """
        total = corrected(x, residual)
        check_input(self, total)
        spec = Spec(tuple(x.shape), x.dtype, tensors=self.kept_layout(state))
        parts, state = self.split(total.contiguous(), state, key)
        return parts, total - self.join(parts, spec, key), state

    def split_symbols(
        self, symbols: Tensor, alphabet: int, state: State, key: Key
    ) -> tuple[Parts, State]:
        """`split` for a coder of symbols, which a chain tells the alphabet."""
        return self.split(symbols, state, key)

    @abstractmethod
    def join(self, parts: Parts, spec: Spec, key: Key) -> Tensor:
        """The flat vector that the parts of `spec` describe. Trusts no part but `values`."""

    def add_joined(self, total: Tensor, parts: Parts, spec: Spec, key: Key) -> Tensor:
        """`total` plus what the parts of `spec` describe; may change `total`, which may be wider.

        Codecs that select touch only what was selected (`adds_few`).
        """
        return total.add_(self.join(parts, spec, key))

    @property
    def adds_few(self) -> bool:
        """Whether `add_joined` is much less work than `join`."""
        return False

    def values_spec(self, spec: Spec, parts: Parts) -> Spec:
        """What `values` must look like, given the other parts (which are not to be trusted)."""
        return spec

    def encode(self, x: Tensor, state: State, key: Key) -> tuple[Payload, State]:
        if self.coder is not None:
            from gradwire.core.chain import encode_with  # both ways, as for >>

            return encode_with(self.coder, self, x, state, key)
        check_input(self, x)
        spec = Spec(tuple(x.shape), x.dtype, tensors=self.kept_layout(state))
        parts, state = self.split(x.detach().reshape(-1).contiguous(), state, key)
        return self._packed(parts, spec), state

    def encode_feedback(
        self, x: Tensor, residual: Tensor, state: State, key: Key
    ) -> tuple[Payload, Tensor, State]:
        """Encodes x + residual; also returns what of it is lost, the new residual.

        Codecs with a fused kernel do all of it in one pass over memory.
        """
        total = corrected(x, residual)
        spec = Spec(tuple(x.shape), x.dtype, tensors=self.kept_layout(state))
        payload, state = self.encode(total, state, key)
        return payload, total - self.decode(payload, spec, key), state

    def encode_split_feedback(
        self, x: Tensor, residual: Tensor, state: State, key: Key
    ) -> tuple[Payload, Tensor, State]:
        """`encode_feedback` for codecs whose `split_feedback` does all of it."""
        flat, kept = (each.detach().reshape(-1).contiguous() for each in (x, residual))
        parts, lost, state = self.split_feedback(flat, kept, state, key)
        return self._packed(parts, Spec.of(x)), lost.reshape(x.shape), state

    def decode(self, payload: Payload, spec: Spec, key: Key) -> Tensor:
        """The tensor of `spec` in a payload of this codec; `WireError` if there is none."""
        if self.coder is not None:
            return (self >> self.coder).decode(payload, spec, key)
        flat = spec.flat()
        return self.join(self._checked_parts(payload, flat), flat, key).reshape(spec.shape)

    def decode_mean(self, payloads: Sequence[Payload], spec: Spec, keys: Sequence[Key]) -> Tensor:
        """The mean of what payloads decode to, each with its sender's key, added in order.

        Codecs with a fused kernel do all of it in one pass over memory.
        """
        if self.adds_few and self.coder is None and len(payloads) > 1:
            return self._sum(payloads, spec, keys).div_(len(payloads)).to(spec.dtype)
        decoded = (self.decode(payload, spec, key) for payload, key in zip(payloads, keys))
        return mean_in_order(decoded, len(payloads))

    def _sum(self, payloads: Sequence[Payload], spec: Spec, keys: Sequence[Key]) -> Tensor:
        flat, device = spec.flat(), payloads[0].parts[self.parts[0]].device
        total = kernels.empty(spec.numel, scale_dtype(spec.dtype), device).zero_()
        for payload, key in zip(payloads, keys):
            total = self.add_joined(total, self._checked_parts(payload, flat), flat, key)
        return total.reshape(spec.shape)

    def unpack(self, buffer: Tensor, spec: Spec) -> Payload:
        """The payload in received bytes; `WireError` unless this codec made it for `spec`."""
        if self.coder is not None:
            return (self >> self.coder).unpack(buffer, spec)
        return Payload.unpack(buffer, self.parts, self.context(spec))

    def merge(self, a: Payload, b: Payload) -> Payload:
        """LINEAR payloads add; MERGE codecs say how."""
        if self.algebra is not Algebra.LINEAR:
            raise TypeError(f"{self!r} is {self.algebra.name}: its payloads cannot be merged")
        return a.replace(values=a.parts["values"] + b.parts["values"])

    def settle(self, merged: Payload, spec: Spec, size: int) -> Payload:
        """What `size` merged payloads come to: a MERGE codec may shorten it before it goes out."""
        return merged

    def context(self, spec: Spec) -> int:
        """What the checksum of every payload of this codec and tensor starts from."""
        return _context(repr(self), spec) ^ self.fingerprint()

    def fingerprint(self) -> int:
        """A hash of what both sides must have computed alike, 32 bits; most compute nothing."""
        return 0

    def __rshift__(self, other: object) -> "Codec":
        from gradwire.core.chain import chain  # a chain is a codec: the import goes both ways

        if isinstance(other, Compression) and not isinstance(other, Codec):
            raise ValueError(
                f"{self!r} >> {other!r}: {other!r} is a way of averaging, not a codec of values, "
                "so nothing can be sent through it"
            )
        return chain(self, other) if isinstance(other, Codec) else NotImplemented

    def _packed(self, parts: Parts, spec: Spec) -> Payload:
        wire = {name: parts[name] for name in self.parts}
        if self.leaves is Kind.SYMBOLS:
            alphabet = self.values_spec(spec.flat(), parts).alphabet
            assert alphabet is not None
            wire["values"] = pack_symbols(wire["values"], alphabet)
        return Payload.pack(wire, self.context(spec))

    def _checked_parts(self, payload: Payload, flat: Spec) -> dict[str, Tensor]:
        parts = dict(payload.parts)
        if self.leaves is not Kind.NOTHING:
            parts["values"] = self._checked_values(parts["values"], self.values_spec(flat, parts))
        return parts

    def _checked_values(self, values: Tensor, spec: Spec) -> Tensor:
        if self.leaves is Kind.SYMBOLS:
            assert spec.alphabet is not None
            expect(values, "values", packed_bytes(spec.numel, spec.alphabet), torch.uint8)
            return unpack_symbols(values, spec.numel, spec.alphabet)
        return expect(values, "values", spec.numel, spec.dtype)


# What a codec inherits reports as well. A mean is made of other operations, unless it is fused.
report_methods(Codec, but=("decode_mean",))


def check_input(compression: Compression, x: Tensor) -> None:
    """Refuses what nobody can encode: other dtypes, NaN, infinity."""
    if not isinstance(compression, Codec) or compression.takes is Kind.REAL:
        if getattr(x, "dtype", None) not in _FLOATS:
            check_tensor(compression, x)
            names = ", ".join(str(dtype) for dtype in _FLOATS)
            raise ValueError(f"{compression!r} encodes {names}; got a tensor of {x.dtype}")
        if not is_finite(x):
            raise NonFiniteError(
                f"NaN or infinity in a tensor of shape {list(x.shape)} given to {compression!r}"
            )


def check_tensor(compression: Compression, x: object) -> None:
    """Refuses what is no tensor, such as an array of numpy."""
    if not isinstance(x, Tensor):
        kind = f"{type(x).__module__}.{type(x).__qualname__}".removeprefix("builtins.")
        convert = "from_numpy" if kind.startswith("numpy.") else "tensor"
        raise ValueError(
            f"{compression!r} encodes torch tensors, got {kind}. Convert it: torch.{convert}(x)."
        )


def corrected(x: Tensor, residual: Tensor | None) -> Tensor:
    """x + residual, without its graph; 16-bit sums saturate, for infinity would stay for good."""
    x = x.detach()
    if residual is None:
        return x
    residual = residual.to(x.device)
    if not is_half(x):
        return x + residual
    largest = torch.finfo(x.dtype).max
    return (x.float() + residual.float()).clamp(-largest, largest).to(x.dtype)


def is_finite(x: Tensor) -> bool:
    """Whether every element is finite."""
    # One cheap pass: a sum is finite if all terms are, unless it overflows; then look closely.
    return bool(torch.isfinite(x.sum())) or bool(torch.isfinite(x).all())


def expect(part: Tensor, name: str, numel: int, dtype: torch.dtype) -> Tensor:
    """The part, if it has the length and dtype it must have."""
    if part.numel() != numel or part.dtype != dtype:
        raise WireError(
            f"{name}: {part.numel()} x {part.dtype}, expected {numel} x {dtype}: "
            "the payload belongs to another tensor or codec"
        )
    return part


def expect_scale(part: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
    """A vector of scales: the right length, finite and not negative."""
    expect(part, "scale", numel, dtype)
    if not bool(((part >= 0) & torch.isfinite(part)).all()):
        raise WireError("scale: negative or not finite")
    return part


def scale_dtype(dtype: torch.dtype) -> torch.dtype:
    """Scales and norms travel as float32, as float64 where the tensor is float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def clamp_to(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x as `dtype`; what lies beyond its range becomes its largest value, not infinity."""
    largest = torch.finfo(dtype).max
    return x.clamp(-largest, largest).to(dtype)


@lru_cache(maxsize=4096)
def _context(codec: str, spec: Spec) -> int:
    return zlib.crc32(f"{codec}|{spec.shape}|{spec.dtype}".encode())
