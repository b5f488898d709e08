"""Each tensor of a bucket encoded by itself, all of them in one message.

    C(x) = (C_1(x_1), ..., C_L(x_L))

where x_l are the tensors (weights, biases) in the bucket and C_l is the inner codec with a state
and random draws of its own for each. If the inner one contracts by delta_l, or has the relative
variance omega_l, the whole has the worst of them: errors and norms of tensors add up.

How much is encoded together, the granularity, is a choice of every codec. Whole model or bucket
is decided by the scheduling, `sequential("model")` or `sequential("layer")`, where the latter also
sends a message per layer; per layer in one message by this: `ef(layerwise(topk(0.01)))`,
`ef21(layerwise(sign))`, `layerwise(topk(0.01) >> qsgd(bits=4))`. Dutta et al. 2020 compare whole
model and layers: the bounds for layers are no worse, in experiments either may train better.

A codec that is LINEAR stays so, its `values` are those of all tensors in a row. Of others there is
one header and one checksum for all tensors, and the lengths of what no codec can know in a byte
or two each (`_layers.py` says how). The values may be encoded further on, then all of them
together: `layerwise(topk(0.01)) >> qsgd(bits=4)`. Messages are gathered whole: shards would cut
the tensors.

Use it where one scale does not fit all layers (`sign`, `qsgd` without buckets), or to keep every
layer moving that a global `topk` would starve. It costs a call of the inner codec per tensor, 0.1
to 0.4 ms: `sign` of 25 million elements in 161 tensors takes as long as 3 copies of the vector
instead of one, 6 with feedback instead of 3. For many small tensors see `partition` and its
`min_size`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gradwire.compression._layers import (
    Whole,
    check_choice,
    covering,
    gathered,
    layer_keys,
    layer_specs,
    named,
    part_names,
    payload_of,
    pieces,
    taken_apart,
    values_left,
)
from gradwire.core.codec import (
    Algebra,
    Codec,
    Compression,
    Guarantee,
    Kind,
    Parts,
    State,
    check_tensor,
    overlap,
)
from gradwire.core.key import Key
from gradwire.core.payload import Payload
from gradwire.core.spec import Placed, Spec


@dataclass(frozen=True, repr=False)
class Layerwise(Codec):
    """Encode each tensor of a bucket by itself, all of them in one message."""

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

    layered = True
    is_composite = True

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
    def selects(self) -> bool:
        return self.codec.selects

    @property
    def needs_feedback(self) -> bool:
        return self.codec.needs_feedback

    def unfed(self, spec: Spec) -> Compression | None:
        return None if self.codec.unfed(spec) is None else self

    def fingerprint(self) -> int:
        return self.codec.fingerprint()

    def init(self, spec: Spec) -> State:
        tensors = spec.layout
        inner = tuple(self.codec.init(own) for own in layer_specs(tensors, spec.dtype))
        return {"tensors": tensors, "inner": inner}

    def kept_layout(self, state: State) -> tuple[Placed, ...]:
        return state["tensors"] if state else ()

    def guarantee(self, spec: Spec) -> Guarantee:
        specs = layer_specs(spec.layout, spec.dtype)
        each = [self.codec.guarantee(own) for own in specs if own.numel]
        if not each:
            return self.codec.guarantee(spec)
        omegas, deltas = [own.omega for own in each], [own.delta for own in each]
        return Guarantee(
            omega=None if None in omegas else max(o for o in omegas if o is not None),
            delta=None if None in deltas else min(d for d in deltas if d is not None),
            grows=not all(own.contracts for own in each),
            within=overlap(each),
        )

    def values_spec(self, spec: Spec, parts: Parts) -> Spec:
        specs = layer_specs(covering(spec.tensors, spec.numel), spec.dtype)
        left = values_left(self.codec, parts, specs)
        return Spec((sum(own.numel for own in left),), left[0].dtype)

    def split(self, x: Tensor, state: State, key: Key) -> tuple[Parts, State]:
        tensors, states = self._layers(x, state)
        messages, after = [], []
        for name, *layer in _zipped(tensors, states, key, x):
            payload, new = named(name, self.codec.encode, *layer)
            messages.append(payload.parts)
            after.append(new)
        return gathered(self.codec, messages, x.device), _new_state(state, after)

    def split_feedback(
        self, x: Tensor, residual: Tensor, state: State, key: Key
    ) -> tuple[Parts, Tensor, State]:
        tensors, states = self._layers(x, state)
        messages, after = [], []
        whole = Whole(tensors)
        for name, *layer in _zipped(tensors, states, key, x, residual):
            payload, lost, new = named(name, self.codec.encode_feedback, *layer)
            messages.append(payload.parts)
            whole.add(lost)
            after.append(new)
        parts = gathered(self.codec, messages, x.device)
        return parts, whole.vector, _new_state(state, after)

    def encode(self, x: Tensor, state: State, key: Key) -> tuple[Payload, State]:
        check_tensor(self, x)
        # The inner codec looks for what is not finite, and can tell in which tensor.
        parts, state = self.split(x.detach().reshape(-1).contiguous(), state, key)
        return self._packed(parts, Spec.of(x)), state

    def encode_feedback(
        self, x: Tensor, residual: Tensor, state: State, key: Key
    ) -> tuple[Payload, Tensor, State]:
        return self.encode_split_feedback(x, residual, state, key)

    def add_joined(self, total: Tensor, parts: Parts, spec: Spec, key: Key) -> Tensor:
        tensors = covering(spec.tensors, spec.numel)
        specs = layer_specs(tensors, spec.dtype)
        messages = taken_apart(self.codec, parts, specs)
        layers = zip(tensors, specs, layer_keys(key, tensors), messages, strict=True)
        for (_, start, stop, _), own, own_key, message in layers:
            there = total[start:stop]
            sums = self.codec.add_joined(there, message, own.flat(), own_key)
            if sums.data_ptr() != there.data_ptr():
                there.copy_(sums)
        return total

    def join(self, parts: Parts, spec: Spec, key: Key) -> Tensor:
        return self._decoded([parts], spec, [key])

    def decode_mean(self, payloads: Sequence[Payload], spec: Spec, keys: Sequence[Key]) -> Tensor:
        parts = [payload.parts for payload in payloads]
        return self._decoded(parts, spec.flat(), keys).reshape(spec.shape)

    def _decoded(self, all_parts: Sequence[Parts], spec: Spec, keys: Sequence[Key]) -> Tensor:
        """The mean over the senders, tensor by tensor."""
        tensors = covering(spec.tensors, spec.numel)
        specs = layer_specs(tensors, spec.dtype)
        received = [taken_apart(self.codec, parts, specs) for parts in all_parts]
        own_keys = [layer_keys(key, tensors) for key in keys]
        whole = Whole(tensors)
        for i, own in enumerate(specs):
            payloads = [payload_of(messages[i]) for messages in received]
            if len(payloads) == 1:
                mean = self.codec.decode(payloads[0], own, own_keys[0][i])
            else:
                mean = self.codec.decode_mean(payloads, own, [each[i] for each in own_keys])
            whole.add(mean)
        return whole.vector

    def _layers(self, x: Tensor, state: State) -> tuple[tuple[Placed, ...], Sequence[State]]:
        tensors = covering(state and state["tensors"], x.numel())
        if state and tensors == state["tensors"]:
            return tensors, state["inner"]
        # An inner stage of a chain gets other elements in each step, and works without a memory.
        return tensors, [self.codec.init(own) for own in layer_specs(tensors, x.dtype)]


def _zipped(
    tensors: tuple[Placed, ...], states: Sequence[State], key: Key, *vectors: Tensor
) -> list[tuple[Any, ...]]:
    """For each tensor its name, its piece of each vector, its state and its key."""
    names = [name for name, *_ in tensors]
    cut = [list(pieces(vector, tensors)) for vector in vectors]
    return list(zip(names, *cut, states, layer_keys(key, tensors), strict=True))


def _new_state(state: State, inner: Sequence[State]) -> State:
    if not state or len(state["inner"]) != len(inner):
        return state
    return {**state, "inner": tuple(inner)}
