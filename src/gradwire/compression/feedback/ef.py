"""Error feedback (Seide et al. 2014; Stich et al. 2018; Karimireddy et al. 2019, Alg. 1).

What compression loses now is added to what is compressed next:
p <- g + e;   send C(p);   e <- p - C(p).
So the updates applied so far plus the residuals held equal the sum of all gradients.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.core.codec import Codec, State
from gradwire.core.group import Group
from gradwire.core.key import Key
from gradwire.core.reducer import Reduced, Reducer, lift
from gradwire.core.spec import Spec


@dataclass(frozen=True, repr=False)
class EF(Reducer):
    """Remember what compression lost and add it the next time."""

    inner: Codec | Reducer

    paper = "Karimireddy et al. 2019, Error feedback fixes SignSGD and other compression schemes"
    examples = ("ef(topk(0.01))", "ef(sign)", "ef(topk(0.1) >> qsgd(bits=4))")

    def init(self, spec: Spec, size: int) -> State:
        residual = torch.zeros(spec.shape, dtype=spec.dtype)
        return {"residual": residual, "inner": lift(self.inner).init(spec, size)}

    async def mean(self, x: Tensor, state: State, key: Key, group: Group) -> Reduced:
        corrected = x + state["residual"].to(x.device)
        reduced = await lift(self.inner).mean(corrected, state["inner"], key, group)
        own = await group.node.call(reduced.own)
        residual = corrected - own
        # What was not heard is remembered here: nothing of x is left for another to remember.
        state = {"residual": residual, "inner": reduced.state}
        return Reduced(reduced.mean, lambda: x, state)
