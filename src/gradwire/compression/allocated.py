"""Encodes each tensor with one of several codecs, chosen within a budget of bytes.

With the size R_l(c) of tensor l under choice c, in bytes, and its squared error D_l(c):

    minimise   sum of D_l(c_l)   subject to   sum of R_l(c_l) <= target_bytes.

Both are measured by encoding each tensor with each choice; nothing is assumed of the codecs. On
the lower convex hulls of the points (R_l, D_l) the solution for every budget is found by taking
the steps from point to point of all tensors in the order of what they save per byte (Shoham and
Gersho 1988, "Efficient bit allocation for an arbitrary set of quantizers"): then all tensors have
the same slope, as in water-filling. What is left of the budget after the last step that fits goes
to the best single changes that do, also to choices inside a hull. So the error is the least
possible, up to that of one step.

L-GreCo (Markov et al. 2024) solves the same trade the other way round, fewest bytes for an error,
by dynamic programming on a grid of errors, and for the parameters of one method; Accordion (Agarwal
et al. 2021) switches between two rates by the norms of gradients. Here choices may be any codecs
or chains: `allocated(30000, choices=(topk(0.001), topk(0.01) >> fp16, qsgd(bits=4)))`.

The allocation is made every `every` training steps, at the first, and whenever a message would
exceed the budget; in between each tensor keeps its choice. The choices travel: ceil(log2) bits for
each tensor. `target_bytes` are those of one payload: per worker, step and bucket. They are never
exceeded. If even the cheapest choices for all tensors take more, that is an error: add a cheaper
choice. A step that measures encodes and decodes with every choice (25 million elements in 161
tensors with three choices: as long as 34 copies of the vector), the others what the choices cost.

What a random codec loses depends on its draws, and so does whether it is chosen: even if all
choices are unbiased the whole is not, and no guarantee is stated.

Use it as `ef(allocated(...))` where layers need different codecs and the rules shall not be written
by hand. To write the rules, take `partition`; for top-k alone, `adaptive_density`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.compression._allocation import choose_allocation
from gradwire.compression._layers import (
    FlatVectorBuilder,
    as_payload,
    check_choice,
    encode_layers,
    encode_named,
    join_messages,
    layer_keys,
    layer_specs,
    part_names,
    split_messages,
    split_tensors,
    tensors_covering,
)
from gradwire.core.binary import write_varints
from gradwire.core.codec import (
    Codec,
    Compression,
    Guarantee,
    Kind,
    Parts,
    State,
    Traits,
    check_tensor,
    clamp_to,
    corrected,
    expect,
    layout_in_state,
    pack_parts,
    scale_dtype,
)
from gradwire.core.composite import Composite
from gradwire.core.errors import WireError
from gradwire.core.fusion import Fusion, Residual
from gradwire.core.key import Key
from gradwire.core.payload import Payload
from gradwire.core.spec import Spec
from gradwire.core.symbols import pack_symbols, packed_bytes, unpack_symbols

_MAX_CHOICES = 16  # a payload has at most 255 parts


@dataclass(frozen=True, repr=False)
class Allocated(Composite):
    """Encode each tensor with one of several codecs, chosen within a budget of bytes."""

    target_bytes: int  # of a payload: per worker, step and bucket
    choices: tuple[Compression, ...]  # codecs or chains
    every: int = 20  # training steps between two allocations

    paper = "Shoham and Gersho 1988, Efficient bit allocation for an arbitrary set of quantizers"
    examples = (
        "allocated(500000, choices=(topk(0.01), topk(0.1) >> fp16, qsgd(bits=4)))",
        "allocated(2000, choices=(topk(0.01), topk(0.1) >> fp16, qsgd(bits=4)))",
        "allocated(1000, choices=(sign, fp16), every=1)",
        "allocated(500, choices=(randomk(0.05), dq(2.0)))",
    )

    leaves = Kind.NOTHING

    def __post_init__(self) -> None:
        if not isinstance(self.choices, tuple) or not 2 <= len(self.choices) <= _MAX_CHOICES:
            raise ValueError(
                f"allocated takes 2 .. {_MAX_CHOICES} choices, got {self.choices!r}. Write "
                "allocated(30000, choices=(topk(0.001), topk(0.01), qsgd(bits=4)))."
            )
        for choice in self.choices:
            check_choice("allocated", choice)
        if len(set(self.choices)) < len(self.choices):
            raise ValueError(f"allocated: a choice is there twice in {self.choices!r}")
        if self.target_bytes < 1:
            raise ValueError(f"allocated: target_bytes must be positive, got {self.target_bytes}")
        if self.every < 1:
            raise ValueError(
                f"allocated: every is a number of training steps, 1 or more; got {self.every}"
            )

    @property
    def members(self) -> tuple[Codec, ...]:
        return tuple(choice for choice in self.choices if isinstance(choice, Codec))  # all are

    @property
    def parts(self) -> tuple[str, ...]:
        each = (f"{i}.{n}" for i, codec in enumerate(self.members) for n in part_names(codec))
        return ("choice", *each)

    @cached_property
    def traits(self) -> Traits:
        return Traits(
            needs_feedback=self._needs_feedback(),
            biased=True,
            layout=layout_in_state,
            fingerprint=self._fingerprint,
        )

    @property
    def fusion(self) -> "_AllocatedFusion":
        return _AllocatedFusion(self)

    def guarantee(self, spec: Spec) -> Guarantee:
        specs = [own for own in layer_specs(spec.layout, spec.dtype) if own.numel]
        contracts = all(codec.guarantee(own).contracts for codec in self.members for own in specs)
        return Guarantee(grows=not contracts)

    def init(self, spec: Spec) -> State:
        specs = layer_specs(spec.layout, spec.dtype)
        inner = tuple(tuple(codec.init(own) for codec in self.members) for own in specs)
        return {"tensors": spec.layout, "inner": inner, "plan": None, "planned": 0}

    def split(self, x: Tensor, state: State, key: Key) -> tuple[Parts, State]:
        payload, _, state = self.encoded(x, None, Spec.of(x), state, key)
        return payload.parts, state

    def join(self, parts: Parts, spec: Spec, key: Key) -> Tensor:
        tensors = tensors_covering(spec.tensors, spec.numel)
        specs = layer_specs(tensors, spec.dtype)
        plan = self._plan(parts["choice"], len(tensors))
        messages: list[Parts] = [{}] * len(tensors)
        for number, codec in enumerate(self.members):
            names = part_names(codec)
            own = {name: parts[f"{number}.{name}"] for name in names}
            mine = [layer for layer, choice in enumerate(plan) if choice == number]
            if not mine:
                for name in names:
                    expect(own[name], f"{number}.{name}", 0, torch.uint8)
                continue
            apart = split_messages(codec, own, [specs[layer] for layer in mine])
            for layer, own_message in zip(mine, apart, strict=True):
                messages[layer] = own_message
        whole = FlatVectorBuilder(tensors)
        layers = zip(plan, messages, specs, layer_keys(key, tensors), strict=True)
        for choice, message, own_spec, own_key in layers:
            whole.add(self.members[choice].decode(as_payload(message), own_spec, own_key))
        return whole.vector

    def _plan(self, choice: Tensor, num_layers: int) -> list[int]:
        alphabet = len(self.choices)
        expect(choice, "choice", packed_bytes(num_layers, alphabet), torch.uint8)
        plan = unpack_symbols(choice, num_layers, alphabet).tolist()
        if any(number >= alphabet for number in plan):
            raise WireError(f"choice: {max(plan)}, expected 0 .. {alphabet - 1}")
        return [int(number) for number in plan]

    def encoded(
        self, x: Tensor, residual: Tensor | None, spec: Spec, state: State, key: Key
    ) -> tuple[Payload, Tensor | None, State]:
        """The payload of a tensor of `spec`, what is lost with a residual, and the new state."""
        tensors = tensors_covering(state and state["tensors"], x.numel())
        is_known = bool(state) and tensors == state["tensors"]
        # An inner stage of a chain gets other elements in each step, and remembers nothing.
        before = state if is_known else self.init(Spec((x.numel(),), x.dtype, tensors=tensors))
        done = None
        if before["plan"] is not None and key.step - before["planned"] < self.every:
            done = self._encode_as_planned(x, residual, spec, before, key)
        payload, lost, after = done or self._encode_allocated(x, residual, spec, before, key)
        return payload, lost, after if is_known else state

    def _encode_as_planned(
        self, x: Tensor, residual: Tensor | None, spec: Spec, state: State, key: Key
    ) -> tuple[Payload, Tensor | None, State] | None:
        """Encodes each tensor with its present choice; None if the payload exceeds the budget."""
        tensors, plan = state["tensors"], state["plan"]
        codecs = [self.members[choice] for choice in plan]
        states = [inner[choice] for inner, choice in zip(state["inner"], plan, strict=True)]
        messages, lost, new = encode_layers(codecs, tensors, x, residual, states, key)
        payload = self._payload(plan, messages, spec, x.device)
        if payload.nbytes > self.target_bytes:
            return None
        return payload, lost, {**state, "inner": _with_choices(state["inner"], plan, new)}

    def _encode_allocated(
        self, x: Tensor, residual: Tensor | None, spec: Spec, state: State, key: Key
    ) -> tuple[Payload, Tensor | None, State]:
        """Encodes each tensor with each choice; the best allocation is sent."""
        tensors = state["tensors"]
        keys = layer_keys(key, tensors)
        total = corrected(x, residual)
        specs = layer_specs(tensors, x.dtype)
        table = [
            [
                _measure_choice(codec, tensors[layer][0], piece, specs[layer], own, keys[layer])
                for codec, own in zip(self.members, state["inner"][layer], strict=True)
            ]
            for layer, piece in enumerate(split_tensors(total, tensors))
        ]
        plan, payload = self._best_allocation(table, spec, x.device)
        chosen = [row[choice] for row, choice in zip(table, plan, strict=True)]
        after = _with_choices(state["inner"], plan, [own.state for own in chosen])
        state = {**state, "inner": after, "plan": tuple(plan), "planned": key.step}
        if residual is None:
            return payload, None, state
        whole = FlatVectorBuilder(tensors)
        for layer, piece in enumerate(split_tensors(total, tensors)):
            codec, parts = self.members[plan[layer]], chosen[layer].parts
            decoded = codec.decode(as_payload(parts), specs[layer], keys[layer])
            whole.add(clamp_to(piece - decoded, x.dtype))
        return payload, whole.vector, state

    def _best_allocation(
        self, table: "Sequence[Sequence[_MeasuredChoice]]", spec: Spec, device: torch.device
    ) -> tuple[list[int], Payload]:
        """The allocation whose payload fits. Sizes add up but for some bytes of the header."""
        sizes = [[own.size_bytes for own in row] for row in table]
        errors = [[own.error for own in row] for row in table]

        def packed(plan: Sequence[int]) -> Payload:
            messages = [row[choice].parts for row, choice in zip(table, plan, strict=True)]
            return self._payload(plan, messages, spec, device)

        cheapest = [min(range(len(row)), key=row.__getitem__) for row in sizes]
        payload = packed(cheapest)
        if payload.nbytes > self.target_bytes:
            raise ValueError(
                f"{self!r}: the cheapest choices for {len(table)} tensors of {list(spec.shape)} "
                f"take {payload.nbytes} bytes. Raise target_bytes or add a cheaper choice, such "
                "as topk(0.001)."
            )
        least = sum(row[choice] for row, choice in zip(sizes, cheapest, strict=True))
        budget = self.target_bytes - (payload.nbytes - least)
        while budget >= least:
            plan = choose_allocation(sizes, errors, budget)
            other = packed(plan)
            if other.nbytes <= self.target_bytes:
                return plan, other
            budget -= other.nbytes - self.target_bytes
        return cheapest, payload

    def _payload(
        self, plan: Sequence[int], messages: Sequence[Parts], spec: Spec, device: torch.device
    ) -> Payload:
        choices = torch.tensor(plan, dtype=torch.int64)
        parts = {"choice": pack_symbols(choices, len(self.choices)).to(device)}
        for number, codec in enumerate(self.members):
            own = [message for message, c in zip(messages, plan, strict=True) if c == number]
            for name, part in join_messages(codec, own, device).items():
                parts[f"{number}.{name}"] = part
        return pack_parts(self, parts, spec)


class _AllocatedFusion(Fusion[Allocated]):
    """The fused ways of the codecs, tensor by tensor."""

    def encode(self, x: Tensor, state: State, key: Key) -> tuple[Payload, State]:
        check_tensor(self.codec, x)
        flat = x.detach().reshape(-1).contiguous()
        payload, _, state = self.codec.encoded(flat, None, Spec.of(x), state, key)
        return payload, state

    def encode_feedback(
        self, x: Tensor, residual: Residual, state: State, key: Key, out: Tensor | None = None
    ) -> tuple[Payload, Tensor, State]:
        assert isinstance(residual, Tensor), f"{self.codec!r} takes no motion"
        flat, kept = (each.detach().reshape(-1).contiguous() for each in (x, residual))
        payload, lost, state = self.codec.encoded(flat, kept, Spec.of(x), state, key)
        assert lost is not None
        return payload, lost.reshape(x.shape), state


def _with_choices(
    inner: Sequence[tuple[State, ...]], plan: Sequence[int], new: Sequence[State]
) -> tuple[tuple[State, ...], ...]:
    """The states of all tensors, [layer][choice], with new ones where the plan chose."""
    return tuple(
        (*states[:choice], own, *states[choice + 1 :])
        for states, choice, own in zip(inner, plan, new, strict=True)
    )


class _MeasuredChoice(NamedTuple):
    """A tensor under one choice."""

    parts: Parts
    state: State
    size_bytes: int
    error: float  # squared


def _measure_choice(
    codec: Codec, name: str, x: Tensor, spec: Spec, state: State, key: Key
) -> _MeasuredChoice:
    payload, state = encode_named(name, codec.encode, x, state, key)
    decoded = codec.decode(payload, spec, key)
    wide = scale_dtype(x.dtype)
    _, error = kernels.moments(x.to(wide) - decoded.to(wide))
    sides = [part.numel() for part_name, part in payload.parts.items() if part_name != "values"]
    size_bytes = sum(part.nbytes for part in payload.parts.values()) + len(write_varints(sides))
    return _MeasuredChoice(payload.parts, state, size_bytes, error)
