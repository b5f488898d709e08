"""EF21: compress the change of the gradient (Richtarik, Sokolov and Fatkhullin 2021, Alg. 2).

Every worker keeps an estimate g_i of its own gradient, which the others can compute from the
messages that they receive. Only the difference is sent:

    c_i <- C(grad_i - g_i);   g_i <- g_i + c_i;   g <- g + mean of c_i;   step along g.

All estimates begin at zero, so the first message is C(grad_i), as in the paper. As the gradients
converge, the estimates approach them and the error of C goes to zero. With any contraction, and
however different the workers' losses are, gradient descent keeps its linear rate on strongly convex
losses (their Theorem 2). `momentum` is EF21-SGDM (Fatkhullin, Tyurin and Richtarik 2023, with
eta = 1 - momentum): the estimates follow the running mean

    v_i <- momentum v_i + (1 - momentum) grad_i

of noisy gradients, beginning at the first one. Leave the momentum of the optimizer at zero then.

Where we differ: the paper's server receives every c_i and sends g to all. Here every worker
receives the mean of c_i and adds it to g itself. This is correct only if it receives the exact mean
of the decoded messages. So payloads that cannot be added are gathered, whatever route the
architecture prefers, and reducers that vote or drop elements on the way (`signvote`, `gtopk`,
`countsketch`) are refused.

With `bidirectional` it is EF21-BC (Fatkhullin et al. 2021, "EF21 with bells & whistles", Alg. 5): a
server that holds m, the mean of all g_i, sends C(m - g), and every worker adds it to g. The owners
of shards act as servers: on the scatter route they encode the mean of c_i plus a residual, the part
of m that g lacked before; the sum is m - g. Each worker sends 2(n - 1)/n payloads instead of n - 1.

With `participation` p it is EF21-PP (the same paper, Alg. 4): in each step a worker takes part with
probability p, drawn from its key; c_i is zero for the others, whose g_i stays. The mean of c_i is
over all n, so g stays the mean of all g_i. It takes about 1/p times the steps, each with p times
the bytes. Here a worker that does not take part sends one byte to say so. It still computes its
gradient, which enters v_i if there is momentum (our combination; the paper treats each separately).
With `bidirectional` it is refused: an absent worker would leave a shard without a server.

Fatkhullin et al. 2021 also have heavy-ball momentum after aggregation (EF21-HB): an optimizer with
momentum and `momentum_at="after"`. On digits (4 workers, the best of three rates, three seeds) it
reached 53% with top-k of 0.1%, 94% with 1% and with `qsgd(bits=2)`; momentum before compression,
which is the default, 88%, 97% and 98%.

Use it as `ef21(topk(0.01))` where the workers' data differ much and gradients are exact or of
large batches; with noisy ones give it momentum, `ef21(topk(0.01), momentum=0.9)`. With codecs that
leave out little at every step, and with noise, `ef` is often as good. It holds two more vectors of
the gradient's size per worker, three with momentum.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

from torch import Tensor

from gradwire.compression.feedback._wrapping import (
    Feedback,
    advance,
    advance_own,
    as_dtype,
    check_alone,
    check_means,
    check_scatters,
    check_shards,
    difference,
    on_gather_route,
    on_scatter_route,
    warn_unless_contracts,
)
from gradwire.core.codec import Codec, State, scale_dtype
from gradwire.core.group import Group
from gradwire.core.key import Key
from gradwire.core.lifted import Lifted, lift
from gradwire.core.memory import MeanOf, Memory, Role, Roles, replaced
from gradwire.core.reducer import Reduced, Reducer
from gradwire.core.spec import Spec


@dataclass(frozen=True, repr=False)
class EF21(Feedback):
    """Send the difference between the gradient and an estimate that all workers can compute."""

    inner: Codec | Reducer
    momentum: float = 0.0  # weight of the past in the running mean of gradients
    bidirectional: bool = False  # the owners of shards compress the mean, too
    participation: float = 1.0  # the probability with which a worker takes part in a step

    paper = (
        "Richtarik, Sokolov and Fatkhullin 2021, EF21: A new, simpler, theoretically better, and "
        "practically faster error feedback"
    )
    examples = (
        "ef21(topk(0.01))",
        "ef21(sign)",
        "ef21(topk(0.1) >> qsgd(bits=4), momentum=0.9)",
        "ef21(randomk(0.1))",
        "ef21(topk(0.1), bidirectional=True)",
        "ef21(topk(0.1), participation=0.5)",
    )
    memory: ClassVar[Roles] = {
        "followed": Role.OWN,
        "own": Role.OWN,
        "common": MeanOf("own"),
    }

    def __post_init__(self) -> None:
        check_means(self, self.inner)
        if not 0 <= self.momentum < 1:
            raise ValueError(
                f"ef21: momentum lies in 0 .. 1, without 1, got {self.momentum}. "
                "Write 0.9, or leave it out for none."
            )
        if self.bidirectional:
            check_scatters(self, self.inner, "Leave out bidirectional.")
        if not 0 < self.participation <= 1:
            raise ValueError(
                f"ef21: participation lies in 0 .. 1, without 0, got {self.participation}. "
                "Write 0.5 for half of the workers on average; 1 is all of them."
            )
        if self.participation < 1:
            check_alone(self, self.inner, "Leave out participation.")
            if self.bidirectional:
                raise ValueError(
                    f"ef21({self.inner!r}, bidirectional=True, participation="
                    f"{self.participation}): workers are the servers of shards here, and must all "
                    "be there to average them. Leave out one of the two."
                )

    @property
    def momentum_lives(self) -> Literal["before", "after", "inside"]:
        return "inside" if self.momentum else "before"

    def init(self, spec: Spec, size: int) -> State:
        if self.bidirectional:
            assert isinstance(self.inner, Codec)
            check_shards(self, self.inner, spec, size)
        warn_unless_contracts(self, self.inner, spec)
        return {
            "followed": None,  # v_i, with momentum only
            "own": None,  # g_i
            "common": None,  # g
            "inner": lift(self.inner).init(spec, size),
        }

    def remembered(self, states: Sequence[State], spec: Spec) -> dict[str, Memory]:
        found = super().remembered(states, spec)
        # With `bidirectional`, servers hold the difference between the mean of all `own` and
        # `common`. The new state contains that mean, so that the new servers begin with an empty
        # residual.
        server = found.pop("inner.server", None)
        if server is not None:
            common = found["common"]
            found["common"] = replaced(common, (common.vectors[0] + server.vectors[0],))
        return found

    async def mean(
        self, x: Tensor, state: State, key: Key, group: Group, residual: Tensor | None = None
    ) -> Reduced:
        self.refuse_residual(residual)
        node, followed = group.node, None
        if self.momentum:
            followed = await node.call(_update_average, self, x, state["followed"])
            x = as_dtype(followed, x.dtype)
        new = await node.call(difference, self, x, state["own"])
        if self.participation < 1:
            assert isinstance(self.inner, Codec)
            has_news = _takes_part(key, self.participation)
            reduced = await Lifted(self.inner).mean_of_some(
                new, has_news, state["inner"], key, group
            )
        else:
            routed = on_scatter_route(group) if self.bidirectional else on_gather_route(group)
            reduced = await lift(self.inner).mean(new, state["inner"], key, routed)
        own = await node.call(advance_own, state["own"], reduced)
        common = await node.share(advance, state["common"], reduced.mean)
        return Reduced(
            await node.share(as_dtype, common, x.dtype),
            partial(as_dtype, own, x.dtype),
            {"followed": followed, "own": own, "common": common, "inner": reduced.state},
        )


def _update_average(method: EF21, x: Tensor, past: Tensor | None) -> Tensor:
    x = difference(method, x, None).to(scale_dtype(x.dtype))
    # A copy: the caller may write the next gradient over x.
    return x.clone() if past is None else past.to(x.device).lerp(x, 1 - method.momentum)


def _takes_part(key: Key, probability: float) -> bool:
    # Workers take part or not, with all their buckets: the draw names none.
    draw = Key(key.seed, key.step, key.rank).child("takes part")
    return float(draw.uniform(1)) < probability
