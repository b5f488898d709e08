"""Chains: `a >> b` lets b encode what a leaves as `values`.

A chain is a codec. What it is, and what it guarantees, follows from its stages; a pair that makes
no sense is refused with the reason.
"""

import functools
import operator
from dataclasses import dataclass

from torch import Tensor

from gradwire.core.codec import (
    LOSSLESS,
    Algebra,
    Codec,
    Compression,
    Guarantee,
    Kind,
    Parts,
    State,
    overlap,
)
from gradwire.core.key import Key
from gradwire.core.payload import Payload
from gradwire.core.spec import Placed, Spec


def chain(first: Codec, second: Codec) -> Codec:
    """The stages of both in a row."""
    stages = [*_stages(first)]
    for stage in _stages(second):
        stages.append(stage.following(stages[-1]))
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
    if second.leaves is not first.takes or second.takes is not Kind.REAL:
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
class Chain(Codec):
    """Codecs in a row, each encoding the values of the one before."""

    stages: tuple[Codec, ...]

    is_composite = True

    def __post_init__(self) -> None:
        for first, second in zip(self.stages, self.stages[1:]):
            if first.leaves is Kind.NOTHING:
                raise ValueError(
                    f"{first!r} >> {second!r}: {first!r} leaves nothing to encode, so it must "
                    f"come last.{_turned(first, second)}"
                )
            if first.leaves is not second.takes:
                raise ValueError(
                    f"{first!r} >> {second!r}: {first!r} leaves {first.leaves.value}, "
                    f"{second!r} encodes {second.takes.value}.{_turned(first, second)}"
                )
            if second.shares:
                raise ValueError(
                    f"{first!r} >> {second!r}: what all ranks share must be known before anything "
                    f"is encoded, so {second!r} can only come first"
                )

    def __repr__(self) -> str:
        return " >> ".join(repr(stage) for stage in self.stages)

    def init(self, spec: Spec) -> State:
        # Inner stages see vectors whose length the data may decide; those that keep a state
        # per element cannot stand there, so only the first one is told the tensor's spec.
        inner = Spec((0,), spec.dtype)
        return tuple(s.init(spec if i == 0 else inner) for i, s in enumerate(self.stages))

    def guarantee(self, spec: Spec) -> Guarantee:
        total = self.stages[0].guarantee(spec)
        selects, settles = self.stages[0].selects, total.contracts
        for previous, stage in zip(self.stages, self.stages[1:]):
            spec = _values_spec(previous, spec)
            inner = stage.guarantee(spec)
            if inner == LOSSLESS:
                continue
            settles = settles and inner.contracts
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
            grows = omega is delta is None and not settles
            stated = omega is not None or delta is not None
            within = overlap([total, inner]) if stated else None
            total = Guarantee(omega, delta, grows, within)
            selects = selects and stage.selects
        return total

    def split(self, x: Tensor, state: State, key: Key) -> tuple[Parts, State]:
        states = state or (None,) * len(self.stages)
        spec = Spec(tuple(x.shape), x.dtype, tensors=self.kept_layout(states))
        parts, own = self.stages[0].split(x, states[0], key.child(0))
        return self._follow(parts, (own, *states[1:]), spec, key)

    def _follow(
        self, parts: Parts, states: tuple[State, ...], spec: Spec, key: Key
    ) -> tuple[dict[str, Tensor], State]:
        """What the other stages make of the first one's parts; `states` holds its new state."""
        wire: dict[str, Tensor] = {}
        after, values = [states[0]], parts.get("values")
        for i, stage in enumerate(self.stages):
            if i:
                assert values is not None
                if stage.takes is Kind.SYMBOLS:
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

    def encode_feedback(
        self, x: Tensor, residual: Tensor, state: State, key: Key
    ) -> tuple[Payload, Tensor, State]:
        """One pass over the vector where the first stage has one; the others see little of it.

        That is so if the first stage selects, since then only what was selected can get lost
        further on, or if all that follow are lossless.
        """
        first, rest = self.stages[0], self.stages[1:]
        spec = Spec((x.numel(),), x.dtype, tensors=self.kept_layout(state))
        lossless = all(stage.guarantee(spec) == LOSSLESS for stage in rest)
        if self.coder is not None or not (first.selects or lossless):
            return super().encode_feedback(x, residual, state, key)
        states = state or (None,) * len(self.stages)
        flat, kept = (each.detach().reshape(-1) for each in (x, residual))
        parts, lost, own = first.split_feedback(flat, kept, states[0], key.child(0))
        wire, state = self._follow(parts, (own, *states[1:]), spec, key)
        if not lossless:
            missed = parts["values"] - self._values(wire, spec, key, 1)
            lost = first.add_joined(lost, {**parts, "values": missed}, spec, key.child(0))
        whole = Spec(tuple(x.shape), x.dtype, tensors=spec.tensors)
        return self._packed(wire, whole), lost.reshape(x.shape), state

    def join(self, parts: Parts, spec: Spec, key: Key) -> Tensor:
        return self._values(parts, spec, key, 0)

    def add_joined(self, total: Tensor, parts: Parts, spec: Spec, key: Key) -> Tensor:
        values = self._values(parts, spec, key, 1)
        own = {**self._own(parts, 0), "values": values}
        return self.stages[0].add_joined(total, own, spec, key.child(0))

    @property
    def adds_few(self) -> bool:
        return self.stages[0].adds_few

    def _values(self, parts: Parts, spec: Spec, key: Key, first: int) -> Tensor:
        """What went into stage `first`, as far as the parts tell."""
        specs = self._specs(spec, parts)
        values = parts.get("values")
        for i, stage in reversed(list(enumerate(self.stages))[first:]):
            own = self._own(parts, i)
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
                specs.append(stage.values_spec(specs[-1], self._own(parts, i)))
        return specs

    @property
    def shares(self) -> bool:
        return self.stages[0].shares

    def statistic(self, x: Tensor) -> Tensor:
        return self.stages[0].statistic(x)

    def agreed(self, statistic: Tensor) -> Codec:
        return Chain((self.stages[0].agreed(statistic), *self.stages[1:]))

    def merge(self, a: Payload, b: Payload) -> Payload:
        if self.algebra is not Algebra.MERGE:
            return super().merge(a, b)
        return self._outer(self._last.merge(self._inner(a), self._inner(b)))

    def settle(self, merged: Payload, spec: Spec, size: int) -> Payload:
        if self.algebra is not Algebra.MERGE:
            return merged
        specs = self._specs(spec.flat(), {}, len(self.stages) - 1)
        return self._outer(self._last.settle(self._inner(merged), specs[-1], size))

    @property
    def _last(self) -> Codec:
        assert all(stage.algebra is Algebra.LINEAR for stage in self.stages[:-1]), (
            f"{self!r}: a stage that merges comes last"
        )
        return self.stages[-1]

    def _inner(self, payload: Payload) -> Payload:
        """The parts of the last stage. Those before it are LINEAR: they have none but values."""
        return Payload.pack(self._own(payload.parts, len(self.stages) - 1), payload.context)

    def _outer(self, payload: Payload) -> Payload:
        last = len(self.stages) - 1
        parts = {f"{last}.{name}": part for name, part in payload.parts.items()}
        return Payload.pack(parts, payload.context)

    def _own(self, parts: Parts, stage: int) -> dict[str, Tensor]:
        prefix = f"{stage}."
        return {n.removeprefix(prefix): p for n, p in parts.items() if n.startswith(prefix)}

    @property
    def algebra(self) -> Algebra:
        return min(stage.algebra for stage in self.stages)

    @property
    def coder(self) -> Codec | None:
        return self.stages[-1].coder

    @property
    def takes(self) -> Kind:
        return self.stages[0].takes

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

    def unfed(self, spec: Spec) -> Compression | None:
        lossy = super().unfed(spec) or self.stages[0].unfed(spec)
        return self if lossy is not None else None

    @property
    def needs_feedback(self) -> bool:
        return any(stage.needs_feedback for stage in self.stages)

    @property
    def selects(self) -> bool:
        return all(stage.selects for stage in self.stages)

    @property
    def layered(self) -> bool:
        return self.stages[0].layered  # inner stages see values, not tensors

    def kept_layout(self, state: State) -> tuple[Placed, ...]:
        return self.stages[0].kept_layout(state[0]) if state else ()

    def fingerprint(self) -> int:
        return functools.reduce(operator.xor, (stage.fingerprint() for stage in self.stages))
