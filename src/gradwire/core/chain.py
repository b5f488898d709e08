"""Chains: `a >> b` lets b encode what a leaves as `values`.

A chain is a codec. What it is, and what it guarantees, follows from its stages; a pair that makes
no sense is refused with the reason.
"""

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from gradwire.core.codec import (
    LOSSLESS,
    Algebra,
    Codec,
    Guarantee,
    Kind,
    Parts,
    PayloadMerge,
    SharedStatistic,
    State,
    Traits,
    drops_for_good,
    finalize,
    merge,
    overlap,
    pack_parts,
    spec_in_state,
)
from gradwire.core.coder import Coder
from gradwire.core.composite import Composite
from gradwire.core.fusion import Fusion, Residual, add_joined, flat_residual, split_feedback
from gradwire.core.key import Key
from gradwire.core.payload import Payload
from gradwire.core.spec import Placed, Spec


def chain(first: Codec, second: Codec) -> Codec:
    """The stages of both in a row."""
    stages = [*_stages(first)]
    for stage in _stages(second):
        following = stage.traits.following
        stages.append(stage if following is None else following(stages[-1]))
    return Chain(tuple(stages))


def encode_with(
    coder: Codec, codec: Codec, x: Tensor, state: State, key: Key
) -> tuple[Payload, State]:
    """What `codec >> coder` makes of x; the state stays that of `codec`, as coders have none."""
    chained = isinstance(codec, Chain)
    states = (state or (None,) * len(_stages(codec))) if chained else (state,)
    payload, states = chain(codec, coder).encode(x, (*states, None), key)
    return payload, states[:-1] if chained else states[0]


def _turned(first: Codec, second: Codec) -> str:
    """The other way round as a suggestion, if it makes sense."""
    if second.leaves is not first.traits.takes or second.traits.takes is not Kind.REAL:
        return ""
    return f" Write {second!r} >> {first!r}."


def _values_spec(stage: Codec, spec: Spec) -> Spec:
    """What a stage leaves, or as many values as there are elements if the data decide."""
    try:
        return stage.values_spec(spec.flat(), {})
    except KeyError:
        return spec.flat()


def _stages(codec: Codec) -> tuple[Codec, ...]:
    return codec.stages if isinstance(codec, Chain) else (codec,)


@dataclass(frozen=True, repr=False)
class Chain(Composite):
    """Codecs in a row, each encoding the values of the one before."""

    stages: tuple[Codec, ...]

    def __post_init__(self) -> None:
        for first, second in zip(self.stages, self.stages[1:]):
            if first.leaves is Kind.NOTHING:
                raise ValueError(
                    f"{first!r} >> {second!r}: {first!r} leaves nothing to encode, so it must "
                    f"come last.{_turned(first, second)}"
                )
            takes = second.traits.takes
            if first.leaves is not takes:
                raise ValueError(
                    f"{first!r} >> {second!r}: {first!r} leaves {first.leaves.value}, "
                    f"{second!r} encodes {takes.value}.{_turned(first, second)}"
                )
            if second.traits.statistic is not None:
                raise ValueError(
                    f"{first!r} >> {second!r}: what all ranks share must be known before anything "
                    f"is encoded, so {second!r} can only come first"
                )

    def __repr__(self) -> str:
        return " >> ".join(repr(stage) for stage in self.stages)

    def init(self, spec: Spec) -> State:
        # Inner stages see vectors whose length the data may decide; those that keep a state
        # per element cannot stand there, so only the first one gets the tensor's spec.
        inner = Spec((0,), spec.dtype)
        return tuple(s.init(spec if i == 0 else inner) for i, s in enumerate(self.stages))

    def guarantee(self, spec: Spec) -> Guarantee:
        total = self.stages[0].guarantee(spec)
        selects, contracts = self.stages[0].traits.selects, total.contracts
        for previous, stage in zip(self.stages, self.stages[1:]):
            spec = _values_spec(previous, spec)
            inner = stage.guarantee(spec)
            if inner == LOSSLESS:
                continue
            contracts = contracts and inner.contracts
            omega = delta = None
            # A stage with a range must be given elements of the tensor, not multiples of them.
            is_known = selects or inner.within is None
            if total.omega is not None and inner.omega is not None and is_known:
                omega = (1 + total.omega) * (1 + inner.omega) - 1
            if selects and total.delta is not None:
                # |x|^2 - |v|^2 is lost by selecting v, (1 - inner) |v|^2 by coding it.
                if inner.delta is not None:
                    delta = total.delta * inner.delta
                elif inner.omega is not None and inner.omega < 1:
                    delta = total.delta * (1 - inner.omega)
            # In no class, and one stage alone would let errors grow: so may all of them.
            grows = omega is delta is None and not contracts
            stated = omega is not None or delta is not None
            within = overlap([total, inner]) if stated else None
            total = Guarantee(omega, delta, grows, within)
            selects = selects and stage.traits.selects
        return total

    def split(self, x: Tensor, state: State, key: Key) -> tuple[Parts, State]:
        states = state or (None,) * len(self.stages)
        spec = spec_in_state(self, x, states)
        parts, own = self.stages[0].split(x, states[0], key.child(0))
        return self.follow(parts, (own, *states[1:]), spec, key)

    def follow(
        self, parts: Parts, states: tuple[State, ...], spec: Spec, key: Key
    ) -> tuple[dict[str, Tensor], State]:
        """What the other stages make of the first one's parts; `states` holds its new state."""
        wire: dict[str, Tensor] = {}
        after, values = [states[0]], parts.get("values")
        for i, stage in enumerate(self.stages):
            if i:
                assert values is not None
                if isinstance(stage, Coder):
                    alphabet = self._specs(spec, wire, i)[-1].alphabet
                    assert alphabet is not None
                    parts, new = stage.split_symbols(values, alphabet, states[i], key.child(i))
                else:
                    parts, new = stage.split(values, states[i], key.child(i))
                after.append(new)
            wire.update({f"{i}.{name}": part for name, part in parts.items() if name != "values"})
            values = parts.get("values")
        if values is not None:
            wire["values"] = values
        return wire, tuple(after)

    def join(self, parts: Parts, spec: Spec, key: Key) -> Tensor:
        return self.values_before(parts, spec, key, 0)

    def values_before(self, parts: Parts, spec: Spec, key: Key, first: int) -> Tensor:
        """What went into stage `first`, decoded from the parts."""
        specs = self._specs(spec, parts)
        values = parts.get("values")
        for i, stage in reversed(list(enumerate(self.stages))[first:]):
            own = self.parts_of(parts, i)
            if values is not None:
                own["values"] = values
            values = stage.join(own, specs[i], key.child(i))
        assert values is not None
        return values

    def values_spec(self, spec: Spec, parts: Parts) -> Spec:
        return self._specs(spec, parts)[-1]

    def _specs(self, spec: Spec, parts: Parts, count: int | None = None) -> list[Spec]:
        """What goes into each of the first `count` stages, and what the last of them leaves."""
        specs = [spec]
        for i, stage in enumerate(self.stages[:count]):
            if stage.leaves is not Kind.NOTHING:
                specs.append(stage.values_spec(specs[-1], self.parts_of(parts, i)))
        return specs

    @property
    def members(self) -> tuple[Codec, ...]:
        return self.stages

    @property
    def fusion(self) -> "_ChainFusion":
        return _ChainFusion(self)

    @cached_property
    def traits(self) -> Traits:
        first = self.stages[0].traits
        merges = any(stage.traits.merging is not None for stage in self.stages)
        return Traits(
            takes=first.takes,
            selects=all(stage.traits.selects for stage in self.stages),
            selects_first=first.sparse,
            needs_feedback=self._needs_feedback(),
            drops=self._drops,
            coder=self.stages[-1].traits.coder,
            layout=self._layout if first.layered else None,  # inner stages see no tensors
            statistic=first.statistic and SharedStatistic(first.statistic.of, self._agree),
            merging=PayloadMerge(self._merge, self._finalize) if merges else None,
            fingerprint=self._fingerprint,
        )

    def _drops(self, spec: Spec) -> bool:
        return self.guarantee(spec).drops() or drops_for_good(self.stages[0], spec)

    def _layout(self, state: State) -> tuple[Placed, ...]:
        layout = self.stages[0].traits.layout
        return layout(state[0]) if state and layout is not None else ()

    def _agree(self, statistic: Tensor) -> Codec:
        shared = self.stages[0].traits.statistic
        assert shared is not None
        return Chain((shared.agree(statistic), *self.stages[1:]))

    def _merge(self, a: Payload, b: Payload) -> Payload:
        return self._outer(merge(self._last, self._inner(a), self._inner(b)))

    def _finalize(self, merged: Payload, spec: Spec, size: int) -> Payload:
        specs = self._specs(spec.flat(), {}, len(self.stages) - 1)
        return self._outer(finalize(self._last, self._inner(merged), specs[-1], size))

    @property
    def _last(self) -> Codec:
        assert all(stage.algebra is Algebra.LINEAR for stage in self.stages[:-1]), (
            f"{self!r}: a stage that merges comes last"
        )
        return self.stages[-1]

    def _inner(self, payload: Payload) -> Payload:
        """The parts of the last stage. Those before it are LINEAR: they have none but values."""
        return Payload.pack(self.parts_of(payload.parts, len(self.stages) - 1), payload.context)

    def _outer(self, payload: Payload) -> Payload:
        last = len(self.stages) - 1
        parts = {f"{last}.{name}": part for name, part in payload.parts.items()}
        return Payload.pack(parts, payload.context)

    def parts_of(self, parts: Parts, stage: int) -> dict[str, Tensor]:
        prefix = f"{stage}."
        return {n.removeprefix(prefix): p for n, p in parts.items() if n.startswith(prefix)}

    @property
    def algebra(self) -> Algebra:
        return min(stage.algebra for stage in self.stages)

    @property
    def leaves(self) -> Kind:
        return self.stages[-1].leaves

    @property
    def parts(self) -> tuple[str, ...]:
        names = [
            f"{i}.{name}"
            for i, stage in enumerate(self.stages)
            for name in stage.parts
            if name != "values"
        ]
        return (*names, "values") if self.leaves is not Kind.NOTHING else tuple(names)


class _ChainFusion(Fusion[Chain]):
    """One pass over the vector where the first stage has one; the others see little of it."""

    @property
    def adds_few(self) -> bool:
        fusion = self.codec.stages[0].fusion
        return fusion is not None and fusion.adds_few

    @property
    def takes_motion(self) -> bool:
        fusion = self.codec.stages[0].fusion
        return fusion is not None and fusion.takes_motion and self.codec.traits.coder is None

    def encode_feedback(
        self, x: Tensor, residual: Residual, state: State, key: Key, out: Tensor | None = None
    ) -> tuple[Payload, Tensor, State] | None:
        """Serves where the first stage selects, since then only what was selected can get lost
        further on, or where all that follow are lossless.
        """
        codec = self.codec
        first, rest = codec.stages[0], codec.stages[1:]
        whole = spec_in_state(codec, x, state)
        spec = Spec((x.numel(),), x.dtype, tensors=whole.tensors)
        lossless = all(stage.guarantee(spec) == LOSSLESS for stage in rest)
        if codec.traits.coder is not None or not (first.traits.selects or lossless):
            return None
        states = state or (None,) * len(codec.stages)
        flat = x.detach().reshape(-1)
        parts, lost, own = split_feedback(
            first, flat, flat_residual(residual), states[0], key.child(0), out
        )
        wire, state = codec.follow(parts, (own, *states[1:]), spec, key)
        if not lossless:
            missed = parts["values"] - codec.values_before(wire, spec, key, 1)
            lost = add_joined(first, lost, {**parts, "values": missed}, spec, key.child(0))
        return pack_parts(codec, wire, whole), lost.reshape(x.shape), state

    def add_joined(self, total: Tensor, parts: Parts, spec: Spec, key: Key) -> Tensor:
        codec = self.codec
        values = codec.values_before(parts, spec, key, 1)
        own = {**codec.parts_of(parts, 0), "values": values}
        return add_joined(codec.stages[0], total, own, spec, key.child(0))
