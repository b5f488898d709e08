"""DiLoCo (Douillard et al. 2023) and its streaming form (2025) in a user's own loop.

    with gradwire.diloco(model, inner, period=50, compression="ef(topk(0.03) >> fp16)"):
        ...                     # inner.step() as ever

Every rank takes `period` steps of the inner optimizer from the common model y. The mean of y - x_i
over all ranks is a gradient, with which an outer optimizer takes a step on y; then x_i <- y.
`fragments` are synchronised at different steps, and an exchange may take `delay` steps, as in
`synchronization/diloco.py`, whose rules these are. The outer optimizer may be any of torch; it
sees a copy of the parameters, and takes the same step on every rank.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from gradwire.core.codec import Compression
from gradwire.integration.local_updates.context import Saved, check_period
from gradwire.integration.local_updates.rounds import AveragingRounds, Round
from gradwire.integration.settings import Settings
from gradwire.synchronization.diloco import DiLoCo

OuterOptimizer = Callable[[list[nn.Parameter]], Optimizer]


class _Pending(NamedTuple):
    due: int  # the step at whose end the result is used
    future: "Future[Round]"


class DiLoCoUpdates(AveragingRounds):
    """Mean changes of the model are gradients of an outer optimizer (`outer`)."""

    def __init__(
        self,
        model: nn.Module,
        inner: Optimizer,
        outer: OuterOptimizer,
        rule: DiLoCo,
        settings: Settings,
        **options: Any,
    ) -> None:
        self._rule = rule
        super().__init__(
            model,
            inner,
            settings,
            {"method": repr(rule)},
            num_parts=rule.fragments,
            by_tensor=rule.fragments > 1,
            **options,
        )
        self._pending: dict[int, _Pending] = {}
        if rule.fragments > len(self.buckets):
            raise ValueError(
                f"fragments={rule.fragments}, but the model has {len(self.buckets)} tensors: "
                "take at most so many"
            )
        # The outer optimizer changes the anchors: its parameters are views of them.
        self._outer_parameters = [
            [nn.Parameter(anchor[start:stop].view(shape)) for _, start, stop, shape in b.layout]
            for anchor, b in zip(self.anchors, self.buckets)
        ]
        self.outer = outer([p for own in self._outer_parameters for p in own])
        if not isinstance(self.outer, Optimizer):
            raise ValueError(f"outer makes a torch optimizer, got {self.outer!r}")
        described = {"outer optimizer": str(self.outer)}
        self.wait(self.post(lambda node: self.check_same(node, described)))
        self.begin()

    def after_step(self) -> None:
        super().after_step()
        step = self.num_steps - 1
        for part, pending in list(self._pending.items()):
            if pending.due <= step:
                self._finish_pending(part)
        for part in range(self._rule.fragments):
            if self._rule.ends_round(part, step):
                future = self.start_round(part)
                if self._rule.delay:
                    self._pending[part] = _Pending(step + self._rule.delay, future)
                else:
                    self.finish_round(future)

    def leave(self, *, is_final: bool) -> bool:
        for part in list(self._pending):
            self._finish_pending(part, 0.0)
        are_final = super().leave(is_final=is_final)
        for bucket, anchor in zip(self.buckets, self.anchors):  # with mixing they differ
            self.write(bucket, anchor)
        return are_final

    def _finish_pending(self, part: int, mixing: float | None = None) -> None:
        self.finish_round(self._pending.pop(part).future, mixing)
        self._since[part] = 0  # as in the simulator: what was walked meanwhile is no round

    def apply(self, part: int, means: Sequence[Tensor], mixing: float | None = None) -> None:
        chosen = self.buckets_of(part)
        for i, mean in zip(chosen, means):
            for parameter, (_, start, stop, shape) in zip(
                self._outer_parameters[i], self.buckets[i].layout
            ):
                parameter.grad = mean[start:stop].view(shape).neg()
        self.outer.step()  # parameters without a gradient stay
        self.outer.zero_grad(set_to_none=True)
        mixing = self._rule.mixing if mixing is None else mixing
        for i in chosen:
            bucket, anchor = self.buckets[i], self.anchors[i]
            self.write(bucket, torch.lerp(anchor, self.flat(bucket), mixing) if mixing else anchor)

    def state_dict(self) -> dict[str, Any]:
        pending = [
            {"part": part, "due": own.due, **self.wait(own.future)._asdict()}
            for part, own in self._pending.items()
        ]
        return {**super().state_dict(), "outer": self.outer.state_dict(), "pending": pending}

    def load_state_dict(self, saved: Saved) -> None:
        super().load_state_dict(saved)
        first = self._rows(saved)[0]  # what follows is the same on all ranks
        self.outer.load_state_dict(first["outer"])
        self._pending = {}
        for row in first["pending"]:
            future: Future[Round] = Future()
            future.set_result(Round(**{name: row[name] for name in Round._fields}))
            self._pending[row["part"]] = _Pending(row["due"], future)


def diloco(
    model: nn.Module,
    inner: Optimizer,
    *,
    outer: OuterOptimizer | None = None,
    period: int = 50,
    fragments: int = 1,
    delay: int = 0,
    mixing: float = 0.0,
    compression: str | Compression = "identity",
    architecture: str = "allreduce",
    process_group: dist.ProcessGroup | None = None,
    seed: int = 0,
    steps_per_epoch: float | None = None,
    timeout_s: float = 300.0,
    native: bool = True,
) -> DiLoCoUpdates:
    """Every `period` steps of the inner optimizer, an outer one takes a step on the mean change.

    `outer`: a function that makes the outer optimizer of a list of parameters; None: SGD with the
    paper's settings, `lambda p: torch.optim.SGD(p, lr=0.7, momentum=0.9, nesterov=True)`.
    `fragments`: tensors are dealt to so many in turn, each of which is exchanged at other steps.
    `delay`: steps that an exchange may take while training continues; `mixing`: the weight of the
    local parameters when its result is used. Other settings are those of `ddp_comm_hook`.
    """
    check_period("diloco", period)
    if outer is None:
        outer = _paper_outer
    elif isinstance(outer, Optimizer) or not callable(outer):
        raise ValueError(
            "outer is a function that makes an optimizer of a copy of the parameters, such as "
            f"lambda parameters: torch.optim.SGD(parameters, lr=0.7); got {type(outer).__name__}"
        )
    rule = DiLoCo(period, fragments=fragments, delay=delay, mixing=mixing)
    settings = Settings.parse(compression, architecture, seed, steps_per_epoch)
    return DiLoCoUpdates(
        model,
        inner,
        outer,
        rule,
        settings,
        process_group=process_group,
        timeout_s=timeout_s,
        native=native,
    )


def _paper_outer(parameters: list[nn.Parameter]) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)
