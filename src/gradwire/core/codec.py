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
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeAlias

import torch
from torch import Tensor

from gradwire.core.checks import check_encoded as check_encoded
from gradwire.core.checks import check_tensor as check_tensor
from gradwire.core.checks import clamp_to as clamp_to
from gradwire.core.checks import corrected as corrected
from gradwire.core.checks import expect as expect
from gradwire.core.checks import expect_scale as expect_scale
from gradwire.core.checks import in_shape as in_shape
from gradwire.core.checks import is_finite as is_finite
from gradwire.core.checks import non_finite
from gradwire.core.checks import scale_dtype as scale_dtype
from gradwire.core.checks import without_graph as without_graph
from gradwire.core.guarantee import LOSSLESS as LOSSLESS
from gradwire.core.guarantee import Guarantee as Guarantee
from gradwire.core.guarantee import overlap as overlap
from gradwire.core.key import Key
from gradwire.core.metering import report_methods, reported
from gradwire.core.notation import Expression
from gradwire.core.payload import Payload
from gradwire.core.spec import Placed, Spec
from gradwire.core.symbols import pack_symbols, packed_bytes, unpack_symbols

if TYPE_CHECKING:
    from gradwire.core.fusion import Fusion

# None, a number, a tensor, or a tuple / dict of states: what a checkpoint can hold.
State: TypeAlias = Any
Parts: TypeAlias = Mapping[str, Tensor]
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


class Compression(Expression, ABC):
    """What travels: a codec, or a reducer that is more than one codec."""


class SharedStatistic(NamedTuple):
    """A short vector of what is encoded; all ranks take its maximum before they encode."""

    of: Callable[[Tensor], Tensor]
    agree: Callable[[Tensor], "Codec"]  # the codec that knows the maximum over all ranks


class PayloadMerge(NamedTuple):
    """How payloads of a MERGE codec become one."""

    merge: Callable[[Payload, Payload], Payload]
    # Of the merged payload, its spec and the number of workers: what is sent to all of them.
    finalize: Callable[[Payload, Spec, int], Payload]


@dataclass(frozen=True)
class Traits:
    """What only some codecs declare; the defaults are those of a plain codec."""

    takes: Kind = Kind.REAL  # what it encodes
    # Values are some of the input's own entries and the rest decodes to zero. Then the errors of
    # two chained stages are orthogonal and their guarantees combine.
    selects: bool = False
    selects_first: bool = False  # so does the first of the codecs that it is made of
    needs_feedback: bool = False  # selects from what `ef(...)` accumulates, and is wrong without
    biased: bool = False  # known to be biased, for a codec whose guarantee does not say so
    # Whether it drops something for good on tensors of a spec, where its guarantee is not enough.
    drops: Callable[[Spec], bool] | None = None
    coder: "Codec | None" = None  # of its symbols if the notation names none; else fixed width
    # The tensors inside a bucket, out of a state in which `init` kept them. A codec with this
    # trait is layered: `join` finds them in its spec, and no bucket is cut into shards.
    layout: Callable[[State], tuple[Placed, ...]] | None = None
    statistic: SharedStatistic | None = None
    merging: PayloadMerge | None = None  # of a MERGE codec, or a chain with one
    following: "Callable[[Codec], Codec] | None" = None  # what it is behind another in a chain
    # A hash of what both sides must have computed alike, such as tables, of 32 bits.
    fingerprint: Callable[[], int] | None = None

    @property
    def layered(self) -> bool:
        """Whether it needs the tensors inside a bucket, `Spec.layout`."""
        return self.layout is not None

    @property
    def sparse(self) -> bool:
        """Whether some elements are sent, and of others nothing."""
        return self.selects or self.selects_first


_PLAIN = Traits()


class Codec(Compression):
    """Turns a tensor into a payload and back. Authors write `split` and `join`."""

    _reports: ClassVar[bool] = True  # what it does, see core/metering.py

    @cached_property
    def _notation(self) -> str:
        """As it is written: of each object, since a codec with a `ramp` equals one without."""
        return repr(self)

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        report_methods(cls)

    # A codec overrides these with plain class attributes, a chain derives them from its stages.
    @property
    def algebra(self) -> Algebra:
        return Algebra.OPAQUE

    @property
    def leaves(self) -> Kind:
        """What `values` are; a codec that leaves NOTHING ends its chain."""
        return Kind.REAL

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the parts, in wire order."""
        return ("values",)

    @property
    def traits(self) -> Traits:
        """What only some codecs declare."""
        return _PLAIN

    @property
    def fusion(self) -> "Fusion[Any] | None":
        """Faster ways to the same payloads and tensors, where it has some: core/fusion.py."""
        return None

    def init(self, spec: Spec) -> State:
        """The state before the first step; most codecs have none."""
        return None

    def guarantee(self, spec: Spec) -> Guarantee:
        """The class of this codec on tensors of this spec.

        Unknown, unless it codes symbols: those arrive as they are if nothing else is said.
        """
        return LOSSLESS if self.traits.takes is Kind.SYMBOLS else Guarantee()

    @abstractmethod
    def split(self, x: Tensor, state: State, key: Key) -> tuple[Parts, State]:
        """The parts of a flat vector. `key` is the sender's; `key.shared()` is everybody's."""

    @abstractmethod
    def join(self, parts: Parts, spec: Spec, key: Key) -> Tensor:
        """The flat vector that the parts of `spec` describe. Trusts no part but `values`."""

    def values_spec(self, spec: Spec, parts: Parts) -> Spec:
        """What `values` must look like, given the other parts (which are not to be trusted)."""
        return spec

    def encode(self, x: Tensor, state: State, key: Key) -> tuple[Payload, State]:
        """The payload of a tensor, and the new state."""
        fusion = self.fusion
        fused = None if fusion is None else fusion.encode(x, state, key)
        if fused is not None:
            return fused
        coder = self.traits.coder
        if coder is not None:
            from gradwire.core.chain import encode_with  # both ways, as for >>

            return encode_with(coder, self, x, state, key)
        check_input(self, x)
        spec = spec_in_state(self, x, state)
        parts, state = self.split(x.detach().reshape(-1).contiguous(), state, key)
        return pack_parts(self, parts, spec), state

    def decode(self, payload: Payload, spec: Spec, key: Key) -> Tensor:
        """The tensor of `spec` in a payload of this codec; `WireError` if there is none."""
        fusion = self.fusion
        fused = None if fusion is None else fusion.decode(payload, spec, key)
        if fused is not None:
            return fused
        sent = as_sent(self)
        if sent is not self:
            return sent.decode(payload, spec, key)
        flat = spec.flat()
        return self.join(checked_parts(self, payload, flat), flat, key).reshape(spec.shape)

    def __rshift__(self, other: object) -> "Codec":
        from gradwire.core.chain import chain  # a chain is a codec: the import goes both ways

        if isinstance(other, Compression) and not isinstance(other, Codec):
            raise ValueError(
                f"{self!r} >> {other!r}: {other!r} is a way of averaging, not a codec of values, "
                "so nothing can be sent through it"
            )
        return chain(self, other) if isinstance(other, Codec) else NotImplemented


report_methods(Codec)  # what a codec inherits reports as well


@reported("encode")
def encode_values(codec: Codec, x: Tensor, state: State, key: Key) -> tuple[Payload, State]:
    """Like `codec.encode`, for values that are averaged and not sent as bytes: without a copy."""
    is_plain = codec.fusion is None and codec.traits.coder is None
    if not is_plain or codec.leaves is Kind.SYMBOLS:
        return codec.encode(x, state, key)
    check_input(codec, x)
    spec = spec_in_state(codec, x, state)
    parts, state = codec.split(x.detach().reshape(-1).contiguous(), state, key)
    return Payload.deferred(parts, payload_context(codec, spec)), state


def as_sent(codec: Codec) -> Codec:
    """The codec whose payloads `codec.encode` makes: with its default coder, if it has one."""
    coder = codec.traits.coder
    return codec if coder is None else codec >> coder


def spec_in_state(codec: Codec, x: Tensor, state: State) -> Spec:
    """The spec of x, with the tensors that a layered codec has kept in its state."""
    layout = codec.traits.layout
    return Spec(tuple(x.shape), x.dtype, tensors=() if layout is None else layout(state))


def layout_in_state(state: State) -> tuple[Placed, ...]:
    """For `Traits.layout`: the tensors that `init` kept in the state, under "tensors"."""
    return (state and state["tensors"]) or ()


def drops_for_good(codec: Codec, spec: Spec) -> bool:
    """Whether it loses something that nothing brings back, so that it wants `ef(...)` around it."""
    traits = codec.traits
    if traits.drops is not None:
        return traits.drops(spec)
    return codec.guarantee(spec).drops(traits.biased)


def payload_context(codec: Codec, spec: Spec) -> int:
    """What the checksum of every payload of this codec and tensor starts from."""
    fingerprint = codec.traits.fingerprint
    start = _context(codec._notation, spec.shape, spec.dtype)
    return start if fingerprint is None else start ^ fingerprint()


def pack_parts(codec: Codec, parts: Parts, spec: Spec) -> Payload:
    """The payload of what `split` made of a tensor of `spec`."""
    wire = {name: parts[name] for name in codec.parts}
    if codec.leaves is Kind.SYMBOLS:
        alphabet = codec.values_spec(spec.flat(), parts).alphabet
        assert alphabet is not None
        wire["values"] = pack_symbols(wire["values"], alphabet)
    return Payload.pack(wire, payload_context(codec, spec))


def unpack(codec: Codec, buffer: Tensor, spec: Spec) -> Payload:
    """The payload in received bytes; `WireError` unless this codec made it for `spec`."""
    codec = as_sent(codec)
    return Payload.unpack(buffer, codec.parts, payload_context(codec, spec))


def checked_parts(codec: Codec, payload: Payload, flat: Spec) -> dict[str, Tensor]:
    """The parts for `join`: of `values` the length, dtype and symbols are checked."""
    parts = dict(payload.parts)
    if codec.leaves is not Kind.NOTHING:
        parts["values"] = checked_values(codec, parts["values"], codec.values_spec(flat, parts))
    return parts


def checked_values(codec: Codec, values: Tensor, spec: Spec) -> Tensor:
    """The values in a payload, unpacked if they are symbols, if they are as `spec` says."""
    if codec.leaves is Kind.SYMBOLS:
        assert spec.alphabet is not None
        expect(values, "values", packed_bytes(spec.numel, spec.alphabet), torch.uint8)
        return unpack_symbols(values, spec.numel, spec.alphabet)
    return expect(values, "values", spec.numel, spec.dtype)


@reported("merge")
def merge(codec: Codec, a: Payload, b: Payload) -> Payload:
    """LINEAR payloads add; MERGE codecs have their own way."""
    if codec.algebra is Algebra.LINEAR:
        return a.replace(values=a.parts["values"] + b.parts["values"])
    merging = codec.traits.merging
    if codec.algebra is Algebra.OPAQUE or merging is None:
        raise TypeError(f"{codec!r} is {codec.algebra.name}: its payloads cannot be merged")
    return merging.merge(a, b)


def finalize(codec: Codec, merged: Payload, spec: Spec, size: int) -> Payload:
    """What `size` merged payloads come to: a MERGE codec may shorten it before it is sent."""
    merging = codec.traits.merging
    return merged if merging is None else merging.finalize(merged, spec, size)


def check_input(compression: Compression, x: Tensor) -> None:
    """Refuses tensors that cannot be encoded: other dtypes, NaN, infinity."""
    if not isinstance(compression, Codec) or compression.traits.takes is Kind.REAL:
        if getattr(x, "dtype", None) not in _FLOATS:
            check_tensor(compression, x)
            names = ", ".join(str(dtype) for dtype in _FLOATS)
            raise ValueError(f"{compression!r} encodes {names}; got a tensor of {x.dtype}")
        if not is_finite(x):
            raise non_finite(compression, x.shape)


@lru_cache(maxsize=4096)
def _context(notation: str, shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return zlib.crc32(f"{notation}|{shape}|{dtype}".encode())
