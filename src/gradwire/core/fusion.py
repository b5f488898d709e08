"""Fusion: one pass over memory for several operations of a codec.

A codec may provide a `Fusion`. It gives the same payloads and tensors as the codec's `split` and
`join`, in less time. Callers need not know of it: `Codec.encode`, `Codec.decode` and the functions
here take the fused way where there is one, and otherwise compose the operation of others.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, Generic, TypeVar

from torch import Tensor

from gradwire import kernels
from gradwire.core.codec import (
    Codec,
    Parts,
    State,
    check_input,
    checked_parts,
    clamp_to,
    corrected,
    pack_parts,
    scale_dtype,
    spec_in_state,
)
from gradwire.core.group import mean_in_order
from gradwire.core.key import Key
from gradwire.core.metering import VECTOR, report, reported, tensor_nbytes
from gradwire.core.payload import Payload
from gradwire.core.spec import Spec

C = TypeVar("C", bound=Codec)
Residual = kernels.Residual


class Fusion(Generic[C]):
    """The fused operations of a codec. Each returns None where it does not serve its arguments.

    `out` is memory for the result, for callers that want it in one place with others. An operation
    may leave it alone, and return another tensor.
    """

    averages: ClassVar[bool] = False  # has a `decode_mean`

    def __init__(self, codec: C) -> None:
        self.codec = codec

    @property
    def adds_few(self) -> bool:
        """Whether `add_joined` is much less work than `join`, as for codecs that select."""
        return False

    @property
    def takes_motion(self) -> bool:
        """Whether a `kernels.Motion` may stand for the residual: momentum in the same pass."""
        return False

    @property
    def takes_rows(self) -> bool:
        """Whether there is an `encode_rows`, though not for all arguments."""
        return False

    def encode(self, x: Tensor, state: State, key: Key) -> tuple[Payload, State] | None:
        """See `Codec.encode`."""
        return None

    def decode(
        self, payload: Payload, spec: Spec, key: Key, out: Tensor | None = None
    ) -> Tensor | None:
        """See `Codec.decode`."""
        return None

    def split_feedback(
        self, x: Tensor, residual: Residual, state: State, key: Key, out: Tensor | None = None
    ) -> tuple[Parts, Tensor, State] | None:
        """See the function `split_feedback`."""
        return None

    def encode_feedback(
        self, x: Tensor, residual: Residual, state: State, key: Key, out: Tensor | None = None
    ) -> tuple[Payload, Tensor, State] | None:
        """See the function `encode_feedback`."""
        return None

    def encode_rows(
        self, x: Tensor, residual: Residual | None, keys: Sequence[Key], out: Tensor | None
    ) -> Sequence[Payload] | None:
        """Payloads of the rows of x, [n, d], each as `encode` makes it, or with a residual as
        `encode_feedback` does; `out` then gets what is lost. They are complete: all are sent. For
        codecs without state. Vectors of the residual are [n, d], too."""
        return None

    def decode_mean(
        self, payloads: Sequence[Payload], spec: Spec, keys: Sequence[Key]
    ) -> Tensor | None:
        """See the function `decode_mean`."""
        return None

    def add_joined(self, total: Tensor, parts: Parts, spec: Spec, key: Key) -> Tensor | None:
        """See the function `add_joined`."""
        return None


class SaturatingFeedback(Fusion[C]):
    """For codecs that may decode to far more than x: differences beyond the range saturate."""

    def encode_feedback(
        self, x: Tensor, residual: Residual, state: State, key: Key, out: Tensor | None = None
    ) -> tuple[Payload, Tensor, State]:
        payload, lost, state = _encode_feedback(self.codec, x, residual, state, key)
        return payload, clamp_to(lost, lost.dtype), state


@reported("encode_feedback")
def encode_feedback(
    codec: Codec,
    x: Tensor,
    residual: Residual,
    state: State,
    key: Key,
    out: Tensor | None = None,
) -> tuple[Payload, Tensor, State]:
    """Encodes x + residual; also returns what is lost of it, the new residual."""
    fusion = codec.fusion
    fused = None if fusion is None else fusion.encode_feedback(x, residual, state, key, out)
    return _encode_feedback(codec, x, residual, state, key) if fused is None else fused


def _encode_feedback(
    codec: Codec, x: Tensor, residual: Residual, state: State, key: Key
) -> tuple[Payload, Tensor, State]:
    assert isinstance(residual, Tensor), f"{codec!r} takes no motion"
    total = corrected(x, residual)
    spec = spec_in_state(codec, x, state)
    payload, state = codec.encode(total, state, key)
    return payload, total - codec.decode(payload, spec, key), state


@reported("split_feedback")
def split_feedback(
    codec: Codec,
    x: Tensor,
    residual: Residual,
    state: State,
    key: Key,
    out: Tensor | None = None,
) -> tuple[Parts, Tensor, State]:
    """`split` of x + residual, and what of it is lost if the parts arrive as they are.

    For flat vectors, such as the first stage of a chain gets.
    """
    fusion = codec.fusion
    fused = None if fusion is None else fusion.split_feedback(x, residual, state, key, out)
    if fused is not None:
        return fused
    assert isinstance(residual, Tensor), f"{codec!r} takes no motion"
    total = corrected(x, residual)
    check_input(codec, total)
    spec = spec_in_state(codec, x, state)
    parts, state = codec.split(total.contiguous(), state, key)
    return parts, total - codec.join(parts, spec, key), state


def encode_split_feedback(
    codec: Codec,
    x: Tensor,
    residual: Residual,
    state: State,
    key: Key,
    out: Tensor | None = None,
) -> tuple[Payload, Tensor, State]:
    """`encode_feedback` for fusions whose `split_feedback` does all of it."""
    flat = flat_vector(x)
    parts, lost, state = split_feedback(codec, flat, flat_residual(residual), state, key, out)
    return pack_parts(codec, parts, Spec.of(x)), lost.reshape(x.shape), state


def flat_vector(x: Tensor) -> Tensor:
    """As a contiguous vector, without its graph; x itself where it is one."""
    if x.dim() == 1 and not x.requires_grad and x.is_contiguous():
        return x
    return x.detach().reshape(-1).contiguous()


def flat_residual(residual: Residual) -> Residual:
    """As a contiguous vector."""
    return residual.flat() if isinstance(residual, kernels.Motion) else flat_vector(residual)


@reported("decode")
def decode_into(codec: Codec, payload: Payload, spec: Spec, key: Key, out: Tensor) -> Tensor:
    """`codec.decode` into a flat vector of the dtype of `spec`, which it returns."""
    fusion = codec.fusion
    decoded = None if fusion is None else fusion.decode(payload, spec, key, out)
    if decoded is None and fusion is not None and fusion.adds_few and codec.traits.coder is None:
        flat = spec.flat()
        report(VECTOR, tensor_nbytes(out))
        parts = checked_parts(codec, payload, flat)
        decoded = fusion.add_joined(out.zero_(), parts, flat, key)
    if decoded is None:
        decoded = codec.decode(payload, spec, key)
    return moved_into(out, decoded.reshape(-1))


def moved_into(out: Tensor, x: Tensor) -> Tensor:
    """x in the memory of `out`, where it may be already."""
    return out if x.data_ptr() == out.data_ptr() else out.copy_(x)


def decode_mean(
    codec: Codec, payloads: Sequence[Payload], spec: Spec, keys: Sequence[Key]
) -> Tensor:
    """The mean of what payloads decode to, each with its sender's key, added in order."""
    fusion = codec.fusion
    if fusion is not None and fusion.averages:
        return _fused_mean(codec, payloads, spec, keys)
    return _mean(codec, payloads, spec, keys)


@reported("decode_mean")  # only this one: a mean that is not fused is made of other operations
def _fused_mean(
    codec: Codec, payloads: Sequence[Payload], spec: Spec, keys: Sequence[Key]
) -> Tensor:
    fusion = codec.fusion
    mean = None if fusion is None else fusion.decode_mean(payloads, spec, keys)
    return _mean(codec, payloads, spec, keys) if mean is None else mean


def _mean(codec: Codec, payloads: Sequence[Payload], spec: Spec, keys: Sequence[Key]) -> Tensor:
    fusion, count = codec.fusion, len(payloads)
    if fusion is not None and fusion.adds_few and codec.traits.coder is None and count > 1:
        flat, device = spec.flat(), payloads[0].parts[codec.parts[0]].device
        total = kernels.empty(spec.numel, scale_dtype(spec.dtype), device).zero_()
        for payload, key in zip(payloads, keys):
            total = add_joined(codec, total, checked_parts(codec, payload, flat), flat, key)
        return total.reshape(spec.shape).div_(count).to(spec.dtype)
    decoded = (codec.decode(payload, spec, key) for payload, key in zip(payloads, keys))
    return mean_in_order(decoded, count)


@reported("add_joined")
def add_joined(codec: Codec, total: Tensor, parts: Parts, spec: Spec, key: Key) -> Tensor:
    """`total` plus what the parts of `spec` describe; may change `total`, which may be wider."""
    fusion = codec.fusion
    fused = None if fusion is None else fusion.add_joined(total, parts, spec, key)
    return total.add_(codec.join(parts, spec, key)) if fused is None else fused


def takes_motion(codec: Any) -> bool:
    """Whether a compression is a codec that takes a `kernels.Motion` for a residual."""
    fusion = codec.fusion if isinstance(codec, Codec) else None
    return fusion is not None and fusion.takes_motion
