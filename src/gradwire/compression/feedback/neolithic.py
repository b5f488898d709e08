"""NEOLITHIC: compress the remaining error again, several times per step (Huang et al. 2022).

    v_0 <- 0;   for r = 1 .. rounds:   send c_r = C(x - v_{r-1});   v_r <- v_{r-1} + c_r

Every round takes the factor 1 - delta off the squared error of a contraction C, so `rounds` of
them leave (1 - delta)^rounds, for `rounds` times the bytes. An unbiased C of variance omega leaves
omega^rounds, which is less for omega < 1 only; it stays unbiased.

On the scatter route the owner of a shard does the same with the mean: its residual after one round
is the input of the next. The error after the last round is lost, unless error feedback is put
around the whole: `ef(neolithic(topk(0.01), rounds=4))`.

Where we differ: the paper gathers a batch of `rounds` times the size before each of these steps, so
that bytes per sample do not grow; that is a choice of the batch, not of this wrapper. Only the
repeated compression, which is the paper's means to its bound, is here. Rounds are messages
one after the other, each with its own latency.

Use it where one round of a codec is too coarse and the codec has no finer setting, as with `sign`
(one bit per round). Where it has a parameter (`topk`, `qsgd`), change that first: top-k of twice
the density costs as much as two rounds, in one message.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from gradwire.compression.feedback._wrapping import check_inner, check_left, warn_unless_contracts
from gradwire.core.codec import Codec, Compression, State, corrected
from gradwire.core.group import Group
from gradwire.core.key import Key
from gradwire.core.lifted import lift
from gradwire.core.reducer import Reduced, Reducer, unfed
from gradwire.core.spec import Spec


@dataclass(frozen=True, repr=False)
class Neolithic(Reducer):
    """Compress the remaining error again, a number of times in one step."""

    inner: Codec | Reducer
    rounds: int

    paper = (
        "Huang et al. 2022, Lower bounds and nearly optimal algorithms in distributed learning "
        "with communication compression"
    )
    examples = (
        "neolithic(sign, rounds=3)",
        "ef(neolithic(topk(0.05), rounds=2))",
        "neolithic(randomk(0.2), rounds=2)",
    )

    def __post_init__(self) -> None:
        check_inner(self, self.inner)
        check_left(self, self.inner)
        if self.rounds < 1:
            raise ValueError(
                f"neolithic: rounds must be at least 1, got {self.rounds}. Try 2 or 4."
            )

    def unfed(self, spec: Spec) -> Compression | None:
        return None if unfed(self.inner, spec) is None else self

    def init(self, spec: Spec, size: int) -> State:
        warn_unless_contracts(self, self.inner, spec)
        return {"inner": lift(self.inner).init(spec, size)}

    def wrapped(self) -> Reducer:
        return lift(self.inner)

    async def mean(
        self, x: Tensor, state: State, key: Key, group: Group, residual: Tensor | None = None
    ) -> Reduced:
        node, left = group.node, x
        # Reducers report their error only if they are given a residual.
        fed = await node.call(torch.zeros_like, x) if residual is None else residual
        done: list[Reduced] = []
        inner = state["inner"]
        for number in range(self.rounds):
            own_key = key.child(f"round {number}")
            done.append(await lift(self.inner).mean(left, inner, own_key, group, fed))
            inner, lost = done[-1].state, done[-1].residual
            assert lost is not None
            if number == 0 and residual is not None:
                fed = await node.call(torch.zeros_like, x)
            left = lost
        return Reduced(
            await node.share(_sum_rounds, tuple(reduced.mean for reduced in done)),
            partial(_sum_own_rounds, done),
            {"inner": inner},
            None if residual is None else left,
        )


def _sum_rounds(pieces: Sequence[Tensor]) -> Tensor:
    total = pieces[0]
    for piece in pieces[1:]:
        total = corrected(total, piece)
    return total


def _sum_own_rounds(done: Sequence[Reduced]) -> Tensor:
    return _sum_rounds([reduced.own() for reduced in done])
