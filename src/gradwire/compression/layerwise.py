"""Encodes each tensor of a bucket separately, all of them in one message.

    C(x) = (C_1(x_1), ..., C_L(x_L))

where x_l are the tensors (weights, biases) in the bucket and C_l is the inner codec with a state
and random draws of its own for each. If the inner one contracts by delta_l, or has the relative
variance omega_l, the whole has the worst of them: errors and norms of tensors add up.

The granularity, how much is encoded together, can be chosen for every codec. The scheduling decides
between the whole model and buckets, `sequential("model")` or `sequential("layer")`; the latter also
sends a message per layer. This wrapper encodes layer by layer in one message:
`ef(layerwise(topk(0.01)))`, `ef21(layerwise(sign))`, `layerwise(topk(0.01) >> qsgd(bits=4))`. Dutta
et al. 2020 compare whole model and layers: the bounds for layers are no worse, in experiments
either may train better.

A LINEAR codec stays LINEAR: its `values` are those of all tensors, concatenated. Other codecs have
one header and one checksum for all tensors, and the lengths that receivers cannot know, in a byte
or two each (see `_layers.py`). A next stage encodes all values together: `layerwise(topk(0.01)) >>
qsgd(bits=4)`. Messages are gathered whole: shards would cut the tensors.

Use it where one scale does not fit all layers (`sign`, `qsgd` without buckets), or to update layers
of which a global `topk` would select nothing. It costs a call of the inner codec per tensor, 0.1 to
0.4 ms: `sign` of 25 million elements in 161 tensors takes as long as 3 copies of the vector instead
of one, 6 with feedback instead of 3. For many small tensors see `partition` and its `min_size`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from gradwire.compression._layers import (
    FlatVectorBuilder,
    as_payload,
    check_choice,
    encode_layers,
    join_messages,
    layer_keys,
    layer_specs,
    part_names,
    split_messages,
    tensors_covering,
    values_specs,
)
from gradwire.core.codec import (
    Algebra,
    Codec,
    Compression,
    Guarantee,
    Kind,
    Parts,
    State,
    Traits,
    check_tensor,
    drops_for_good,
    layout_in_state,
    pack_parts,
)
from gradwire.core.composite import Composite
from gradwire.core.fusion import (
    Fusion,
    Residual,
    add_joined,
    decode_mean,
    encode_split_feedback,
)
from gradwire.core.guarantee import weakest
from gradwire.core.key import Key
from gradwire.core.payload import Payload
from gradwire.core.spec import Spec


@dataclass(frozen=True, repr=False)
class Layerwise(Composite):
    """Encode each tensor of a bucket separately, all of them in one message."""

    inner: Compression  # a codec or chain

    paper = (
        "Dutta et al. 2020, On the discrepancy between the theoretical analysis and practical "
        "implementations of compressed communication for distributed deep learning"
    )
    examples = (
        "layerwise(topk(0.01))",
        "layerwise(sign)",
        "layerwise(topk(0.3) >> qsgd(bits=4))",
        "layerwise(randomk(0.3))",
        "layerwise(dq(2.0))",
    )

    def __post_init__(self) -> None:
        check_choice("layerwise", self.inner)

    @property
    def codec(self) -> Codec:
        assert isinstance(self.inner, Codec)  # as checked
        return self.inner

    @property
    def algebra(self) -> Algebra:
        return self.codec.algebra if self.codec.algebra is Algebra.LINEAR else Algebra.OPAQUE

    @property
    def leaves(self) -> Kind:
        # Symbols are packed tensor by tensor, and may be of other alphabets in each.
        return Kind.REAL if self.codec.leaves is Kind.REAL else Kind.NOTHING

    @property
    def parts(self) -> tuple[str, ...]:
        return part_names(self.codec)

    @property
    def members(self) -> tuple[Codec, ...]:
        return (self.codec,)

    @cached_property
    def traits(self) -> Traits:
        inner = self.codec.traits
        return Traits(
            selects=inner.selects,
            selects_first=inner.selects_first,
            needs_feedback=self._needs_feedback(),
            drops=self._drops,
            layout=layout_in_state,
            fingerprint=self._fingerprint,
        )

    def _drops(self, spec: Spec) -> bool:
        return drops_for_good(self.codec, spec)

    @property
    def fusion(self) -> "_LayerwiseFusion":
        return _LayerwiseFusion(self)

    def init(self, spec: Spec) -> State:
        tensors = spec.layout
        inner = tuple(self.codec.init(own) for own in layer_specs(tensors, spec.dtype))
        return {"tensors": tensors, "inner": inner}

    def guarantee(self, spec: Spec) -> Guarantee:
        specs = layer_specs(spec.layout, spec.dtype)
        each = [self.codec.guarantee(own) for own in specs if own.numel]
        if not each:
            return self.codec.guarantee(spec)
        return weakest(each)

    def values_spec(self, spec: Spec, parts: Parts) -> Spec:
        specs = layer_specs(tensors_covering(spec.tensors, spec.numel), spec.dtype)
        left = values_specs(self.codec, parts, specs)
        return Spec((sum(own.numel for own in left),), left[0].dtype)

    def split(self, x: Tensor, state: State, key: Key) -> tuple[Parts, State]:
        parts, _, state = self.split_layers(x, None, state, key)
        return parts, state

    def split_layers(
        self, x: Tensor, residual: Tensor | None, state: State, key: Key
    ) -> tuple[Parts, Tensor | None, State]:
        """The parts of a flat vector, what is lost with a residual, and the new state."""
        tensors = tensors_covering(state and state["tensors"], x.numel())
        if state and tensors == state["tensors"]:
            states = state["inner"]
        else:  # an inner stage of a chain gets other elements in each step, and keeps no state
            states = [self.codec.init(own) for own in layer_specs(tensors, x.dtype)]
        codecs = [self.codec] * len(tensors)
        messages, lost, after = encode_layers(codecs, tensors, x, residual, states, key)
        if state and len(state["inner"]) == len(after):
            state = {**state, "inner": tuple(after)}
        return join_messages(self.codec, messages, x.device), lost, state

    def join(self, parts: Parts, spec: Spec, key: Key) -> Tensor:
        return self.mean([parts], spec, [key])

    def mean(self, all_parts: Sequence[Parts], spec: Spec, keys: Sequence[Key]) -> Tensor:
        """The mean over the senders, tensor by tensor."""
        tensors = tensors_covering(spec.tensors, spec.numel)
        specs = layer_specs(tensors, spec.dtype)
        received = [split_messages(self.codec, parts, specs) for parts in all_parts]
        own_keys = [layer_keys(key, tensors) for key in keys]
        whole = FlatVectorBuilder(tensors)
        for i, own in enumerate(specs):
            payloads = [as_payload(messages[i]) for messages in received]
            if len(payloads) == 1:
                mean = self.codec.decode(payloads[0], own, own_keys[0][i])
            else:
                mean = decode_mean(self.codec, payloads, own, [each[i] for each in own_keys])
            whole.add(mean)
        return whole.vector


class _LayerwiseFusion(Fusion[Layerwise]):
    """The fused ways of the inner codec, tensor by tensor."""

    averages = True

    def encode(self, x: Tensor, state: State, key: Key) -> tuple[Payload, State]:
        check_tensor(self.codec, x)
        # The inner codec checks for NaN and infinity, and its error names the tensor.
        parts, state = self.codec.split(x.detach().reshape(-1).contiguous(), state, key)
        return pack_parts(self.codec, parts, Spec.of(x)), state

    def split_feedback(
        self, x: Tensor, residual: Residual, state: State, key: Key, out: Tensor | None = None
    ) -> tuple[Parts, Tensor, State]:
        assert isinstance(residual, Tensor), f"{self.codec!r} takes no motion"
        parts, lost, state = self.codec.split_layers(x, residual, state, key)
        assert lost is not None
        return parts, lost, state

    def encode_feedback(
        self, x: Tensor, residual: Residual, state: State, key: Key, out: Tensor | None = None
    ) -> tuple[Payload, Tensor, State]:
        return encode_split_feedback(self.codec, x, residual, state, key)

    def add_joined(self, total: Tensor, parts: Parts, spec: Spec, key: Key) -> Tensor:
        codec, tensors = self.codec.codec, tensors_covering(spec.tensors, spec.numel)
        specs = layer_specs(tensors, spec.dtype)
        messages = split_messages(codec, parts, specs)
        layers = zip(tensors, specs, layer_keys(key, tensors), messages, strict=True)
        for (_, start, stop, _), own, own_key, message in layers:
            there = total[start:stop]
            sums = add_joined(codec, there, message, own.flat(), own_key)
            if sums.data_ptr() != there.data_ptr():
                there.copy_(sums)
        return total

    def decode_mean(self, payloads: Sequence[Payload], spec: Spec, keys: Sequence[Key]) -> Tensor:
        parts = [payload.parts for payload in payloads]
        return self.codec.mean(parts, spec.flat(), keys).reshape(spec.shape)
