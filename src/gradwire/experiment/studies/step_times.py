"""Virtual time of a step without training: gradients are drawn, not computed.

Virtual times depend on the sizes of tensors and payloads only, so a few steps tell what a step
takes, also of a network whose gradients would take long.
"""

from collections.abc import Iterator, Sequence

import torch

from gradwire.experiment.run.config import Config
from gradwire.experiment.run.setup import Experiment, prepare
from gradwire.experiment.simulate.simulation import simulate_prepared
from gradwire.training.gradient import Batch, GradientRequest, GradientResult


class _Drawn(Experiment):
    """An experiment whose gradients are drawn and whose model is evaluated on one batch."""

    def test_batches(self) -> Iterator[Batch]:
        yield self.plan.batch(0, 0)


def _draw(requests: Sequence[GradientRequest]) -> list[GradientResult]:
    return [
        GradientResult(
            torch.zeros(()), r.key.child("drawn").normal(r.params.numel()), dict(r.buffers)
        )
        for r in requests
    ]


def seconds_per_step(config: Config) -> dict[str, float]:
    """By bandwidth: that of the configuration, and those of its `what_if`."""
    experiment = prepare(config)
    experiment.plan.task.gradients = _draw  # type: ignore[method-assign]
    run = simulate_prepared(_Drawn(**vars(experiment)))
    times = {config.bandwidth: run.virtual_time_s, **run.summary["virtual_times_s"]}
    return {bandwidth: seconds / config.steps for bandwidth, seconds in times.items()}
