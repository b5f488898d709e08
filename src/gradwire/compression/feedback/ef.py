"""Error feedback (Seide et al. 2014; Stich et al. 2018; Karimireddy et al. 2019).

The error of one step is added to the input of the next: p <- g + e;   send C(p);   e <- p - C(p).
Here g is the gradient and the optimizer comes after; in Karimireddy et al. it is the learning rate
times the gradient, which is the same for a constant rate. So the updates applied so far plus the
residuals held equal the sum of all gradients.

Use it around every biased codec: `ef(topk(0.01))`, `ef(sign)`, `ef(drive(unbiased=False))`. Leave
it out around unbiased ones of large variance (`terngrad`, `wangni`, `atomo`, `qsgd(1)`), whose
residual may grow; it holds one more vector of the gradient's size per worker.
"""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from gradwire.compression.feedback._wrapping import (
    Forward,
    Result,
    SenderFeedback,
    check_inner,
    warn_unless_contracts,
)
from gradwire.core.codec import Codec, Compression, State
from gradwire.core.errors import UnfedWarning
from gradwire.core.lifted import lift
from gradwire.core.memory import Role, Roles
from gradwire.core.node import Node
from gradwire.core.reducer import Reducer, unfed
from gradwire.core.spec import Spec


def with_feedback(compression: Compression, spec: Spec) -> Compression:
    """The compression with `ef(...)` around every part that would otherwise lose its error."""
    part = unfed(compression, spec)
    if part is None:
        return compression
    if part == compression:
        assert isinstance(compression, Codec | Reducer)
        return EF(compression)

    def inside(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: inside(item) for name, item in value.items()}
        return with_feedback(value, spec) if isinstance(value, Compression) else value

    changed = {f.name: inside(getattr(compression, f.name)) for f in fields(compression)}  # type: ignore[arg-type]
    return replace(compression, **changed)  # type: ignore[type-var]


def warn_if_unfed(compression: Compression, spec: Spec, stacklevel: int = 2) -> None:
    """Warns if a part of the gradients would be lost for good."""
    part = unfed(compression, spec)
    if part is not None:
        warnings.warn(
            f"{part!r} is biased, and nothing feeds back what it drops: a part of the gradients "
            f"is lost for good. Write {with_feedback(compression, spec)!r}.",
            UnfedWarning,
            stacklevel=stacklevel + 1,
        )


@dataclass(frozen=True, repr=False)
class EF(SenderFeedback):
    """Keep the compression error of a step and add it to the input of the next."""

    inner: Codec | Reducer

    def __post_init__(self) -> None:
        check_inner(self, self.inner)

    paper = (
        "Karimireddy et al. 2019, Error feedback fixes SignSGD and other gradient compression "
        "schemes"
    )
    examples = ("ef(topk(0.01))", "ef(sign)", "ef(topk(0.1) >> qsgd(bits=4))")
    memory: ClassVar[Roles] = {"residual": Role.LEFT}

    def init(self, spec: Spec, size: int) -> State:
        warn_unless_contracts(self, self.inner, spec, f"{self.inner!r} alone")
        residual = torch.zeros(spec.shape, dtype=spec.dtype)
        return {"residual": residual, "inner": lift(self.inner).init(spec, size)}

    @property
    def checks_input(self) -> bool:
        return self.wrapped().checks_input

    async def exchange(
        self, x: Tensor, state: State, node: Node, size: int, forward: Forward[Result]
    ) -> Result:
        result = await forward(x, state["inner"], state["residual"])
        state = {"residual": result.residual, "inner": result.state}
        return result.keeping(state)
