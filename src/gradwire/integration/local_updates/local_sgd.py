"""Local SGD (Stich 2019) in a user's own loop.

    with gradwire.local_sgd(model, optimizer, period=8, compression="ef(topk(0.01))"):
        for inputs, targets in loader:
            ...
            optimizer.step()

Every `period` steps all ranks replace their models by the average:  x_i <- x_0 + mean_j(x_j - x_0).
It is `localsgd(period)` of the simulator.
"""

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from gradwire.core.codec import Compression
from gradwire.integration.local_updates.context import Tensors, check_period
from gradwire.integration.local_updates.rounds import AveragingRounds
from gradwire.integration.settings import Settings

Momentum = Literal["local", "average", "reset"]


class LocalSGDUpdates(AveragingRounds):
    """Averages models every `period` steps."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        period: int,
        momentum: Momentum,
        settings: Settings,
        **options: Any,
    ) -> None:
        self.period, self.momentum = period, momentum
        described = {"method": "local_sgd", "period": period, "momentum": momentum}
        super().__init__(
            model,
            optimizer,
            settings,
            described,
            num_parts=1,
            by_tensor=False,
            **options,
        )
        self.begin()

    def after_step(self) -> None:
        super().after_step()
        if self.num_steps % self.period == 0:
            self.finish_round(self.start_round(0))

    def apply(self, part: int, means: Sequence[Tensor], mixing: float | None = None) -> None:
        for bucket, anchor, mean in zip(self.buckets, self.anchors, means):
            anchor.add_(mean)
            self.write(bucket, anchor)
        if self.momentum == "reset":
            self.optimizer.state.clear()

    def extras(self) -> Tensors:
        """The vectors of the optimizer's state, if they are averaged."""
        if self.momentum != "average":
            return {}
        return {name: value.detach().clone() for name, value in self._vectors().items()}

    @torch.no_grad()
    def take_extras(self, averages: Tensors) -> None:
        if self.momentum == "average":
            for name, value in self._vectors().items():
                if name in averages:
                    value.copy_(averages[name])

    def _vectors(self) -> Tensors:
        """What the optimizer keeps per element of parameters, by name."""
        found = {}
        for bucket in self.buckets:
            for (name, *_), parameter in zip(bucket.layout, bucket.parameters):
                for key, value in self.optimizer.state.get(parameter, {}).items():
                    if isinstance(value, Tensor) and value.shape == parameter.shape:
                        found[f"optimizer {name} {key}"] = value
        return found


def local_sgd(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    period: int = 8,
    compression: str | Compression = "identity",
    momentum: Momentum = "local",
    architecture: str = "allreduce",
    process_group: dist.ProcessGroup | None = None,
    seed: int = 0,
    steps_per_epoch: float | None = None,
    timeout_s: float = 300.0,
    native: bool = True,
) -> LocalSGDUpdates:
    """Averages the model over all ranks every `period` steps of the optimizer.

    `momentum`: what becomes of the optimizer's state at an average. Each rank keeps its own
    ("local"), it is averaged too, uncompressed ("average"), or it begins anew ("reset"). Other
    settings are those of `ddp_comm_hook`.
    """
    check_period("local_sgd", period)
    if momentum not in ("local", "average", "reset"):
        raise ValueError(f'momentum is "local", "average" or "reset", got {momentum!r}')
    settings = Settings.parse(compression, architecture, seed, steps_per_epoch)
    return LocalSGDUpdates(
        model,
        optimizer,
        period,
        momentum,
        settings,
        process_group=process_group,
        timeout_s=timeout_s,
        native=native,
    )
