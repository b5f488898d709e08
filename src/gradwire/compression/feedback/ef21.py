"""EF21: compress what is new, not what is left (Richtarik, Sokolov and Fatkhullin 2021, Alg. 2).

Every worker keeps an estimate g_i of its own gradient, which the others can follow from what
they hear; only the difference travels:

    c_i <- C(grad_i - g_i);   g_i <- g_i + c_i;   g <- g + mean of c_i;   step along g.

All begin at zero, so the first message is C(grad_i), as in the paper. The estimates approach the
gradients as those settle, so the error of C goes to zero with them: with any contraction, and
however different the workers' losses are, gradient descent keeps its linear rate on strongly
convex losses. `momentum` is EF21-SGDM (Fatkhullin, Tyurin and Richtarik 2023, Alg. 1, with
eta = 1 - momentum): what is followed is the running mean

    v_i <- momentum v_i + (1 - momentum) grad_i

of noisy gradients, beginning at the first one. Leave the momentum of the optimizer at zero then.

Where we differ: the paper's server hears everyone and sends g to all. Here everyone hears the mean
of c_i and adds it up itself. That is right only if what is heard is the mean of what was sent, so
payloads that cannot be added are gathered, whatever route the architecture prefers, and reducers
that vote or drop on the way (`signvote`, `gtopk`, `countsketch`) are refused.

With `bidirectional` it is EF21-BC (Fatkhullin et al. 2021): a server that holds m, the mean of all
g_i, sends C(m - g), and all add that to g. The owners of shards are the servers. On the scatter
route they encode the mean of c_i plus a residual, what was missing in g before; both together are
m - g. So 2(n - 1)/n payloads leave each worker instead of n - 1. The form with partial
participation is not here.

Use it as `ef21(topk(0.01))` where the workers' data differ much and gradients are exact or of
large batches; with noisy ones give it momentum, `ef21(topk(0.01), momentum=0.9)`. With codecs that
leave out little at every step, and with noise, `ef` is often as good. It holds two more vectors of
the gradient's size per worker, three with momentum.
"""

from dataclasses import dataclass
from functools import partial

from torch import Tensor

from gradwire.compression.feedback._wrapping import (
    Feedback,
    advanced,
    as_dtype,
    check_heard,
    check_scatters,
    check_shards,
    difference,
    gathering,
    scattering,
    warn_unless_settles,
)
from gradwire.core.codec import Codec, State, scale_dtype
from gradwire.core.group import Group
from gradwire.core.key import Key
from gradwire.core.reducer import Reduced, Reducer, lift
from gradwire.core.spec import Spec


@dataclass(frozen=True, repr=False)
class EF21(Feedback):
    """Send the difference to an estimate that everyone builds up alike."""

    inner: Codec | Reducer
    momentum: float = 0.0  # weight of the past in the gradient that is followed
    bidirectional: bool = False  # compress the way back too, by the owners of shards

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
    )

    def __post_init__(self) -> None:
        check_heard(self, self.inner)
        if not 0 <= self.momentum < 1:
            raise ValueError(
                f"ef21: momentum lies in 0 .. 1, without 1, got {self.momentum}. "
                "Write 0.9, or leave it out for none."
            )
        if self.bidirectional:
            check_scatters(self, self.inner, "Leave out bidirectional.")

    def init(self, spec: Spec, size: int) -> State:
        if self.bidirectional:
            assert isinstance(self.inner, Codec)
            check_shards(self, self.inner, spec, size)
        warn_unless_settles(self, self.inner, spec)
        return {
            "followed": None,  # v_i, with momentum only
            "own": None,  # g_i
            "common": None,  # g
            "inner": lift(self.inner).init(spec, size),
        }

    async def mean(
        self, x: Tensor, state: State, key: Key, group: Group, residual: Tensor | None = None
    ) -> Reduced:
        self.refuse_residual(residual)
        node, followed = group.node, None
        if self.momentum:
            followed = await node.call(_averaged, self, x, state["followed"])
            x = as_dtype(followed, x.dtype)
        new = await node.call(difference, self, x, state["own"])
        road = scattering(group) if self.bidirectional else gathering(group)
        reduced = await lift(self.inner).mean(new, state["inner"], key, road)
        own = await node.call(_moved, state["own"], reduced)
        common = await node.share(advanced, state["common"], reduced.mean)
        return Reduced(
            await node.share(as_dtype, common, x.dtype),
            partial(as_dtype, own, x.dtype),
            {"followed": followed, "own": own, "common": common, "inner": reduced.state},
        )


def _averaged(method: EF21, x: Tensor, past: Tensor | None) -> Tensor:
    x = difference(method, x, None).to(scale_dtype(x.dtype))
    # A copy: whoever gave x may write the next gradient over it.
    return x.clone() if past is None else past.to(x.device).lerp(x, 1 - method.momentum)


def _moved(estimate: Tensor | None, reduced: Reduced) -> Tensor:
    return advanced(estimate, reduced.own())
