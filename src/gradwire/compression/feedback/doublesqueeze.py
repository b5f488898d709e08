"""DoubleSqueeze: error feedback on the way to the server and on the way back (Tang et al. 2019).

    worker i:   v_i <- g_i + e_i;              send C(v_i);   e_i <- v_i - C(v_i)
    server:     v <- mean of C(v_i) + e;       send C(v);     e <- v - C(v);   all apply C(v)

So the applied updates, plus the mean of the workers' residuals, plus the server's residual, equal
the sum of all mean gradients. Both directions are compressed: each node sends 2(n - 1)/n payloads,
where gathering takes n - 1.

Where we differ: there is no one server. The vector is cut into n shards, and each worker is the
server of one; every shard is compressed on its own. This is what `ef(inner)` does on the scatter
route; here it takes that route always, also for short vectors and where the architecture prefers
another. The exchange is direct between all pairs, also on a ring. Payloads that add or merge on the
way need no server that reencodes, so such codecs are refused: `ef` around them is the same with
less work.

Use it as `doublesqueeze(sign)` or `doublesqueeze(topk(0.01))` with many workers, where the answers
cost as many bytes as the messages to the server. With few workers, `ef` chooses the route by the
size of the vector and loses less. It holds 1 + 1/n vectors of the gradient's size per worker.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradwire.compression.feedback._wrapping import (
    Feedback,
    check_inner,
    check_scatters,
    check_shards,
    on_scatter_route,
)
from gradwire.core.codec import Codec, State
from gradwire.core.group import Group
from gradwire.core.key import Key
from gradwire.core.lifted import lift
from gradwire.core.memory import Role, Roles
from gradwire.core.reducer import Reduced
from gradwire.core.spec import Spec


@dataclass(frozen=True, repr=False)
class DoubleSqueeze(Feedback):
    """Error feedback at the workers and at the server, with both ways compressed."""

    inner: Codec

    paper = (
        "Tang et al. 2019, DoubleSqueeze: Parallel stochastic gradient descent with double-pass "
        "error-compensated compression"
    )
    examples = (
        "doublesqueeze(sign)",
        "doublesqueeze(topk(0.05))",
        "doublesqueeze(topk(0.1) >> qsgd(bits=8))",
    )
    memory: ClassVar[Roles] = {"residual": Role.LEFT}

    def __post_init__(self) -> None:
        check_inner(self, self.inner)
        check_scatters(self, self.inner, f"Write ef({self.inner!r}).")

    def init(self, spec: Spec, size: int) -> State:
        check_shards(self, self.inner, spec, size)
        residual = torch.zeros(spec.shape, dtype=spec.dtype)
        return {"residual": residual, "inner": lift(self.inner).init(spec, size)}

    async def mean(
        self, x: Tensor, state: State, key: Key, group: Group, residual: Tensor | None = None
    ) -> Reduced:
        self.refuse_residual(residual)
        inner, route = lift(self.inner), on_scatter_route(group)
        reduced = await inner.mean(x, state["inner"], key, route, state["residual"])
        return Reduced(
            reduced.mean, reduced.own, {"residual": reduced.residual, "inner": reduced.state}
        )
