"""The result of a run on any engine: rows of metrics, the summary, the model."""

import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import Tensor

import gradwire
from gradwire import kernels
from gradwire.core.notation import Expression
from gradwire.core.protocols import Replica
from gradwire.experiment.report.figures import number
from gradwire.experiment.report.notebook import run_html
from gradwire.experiment.report.score import score_name, score_part, score_row, score_value
from gradwire.experiment.run.config import Config, both_lengths
from gradwire.experiment.run.record import Row
from gradwire.experiment.run.setup import Experiment
from gradwire.experiment.run.threads import (
    use_threads as use_threads,  # exported
)
from gradwire.runtime.ledger import Ledger
from gradwire.training.flat import FlatLayout
from gradwire.training.task import Evaluation

Model = tuple[Tensor, Mapping[str, Tensor]]  # parameters, and statistics by name
Progress = Callable[[Row, int], None]  # a row of metrics, and the number of steps in all


@dataclass(frozen=True)
class Run:
    """The result of a run."""

    config: Config  # as resolved
    metrics: list[Row]
    summary: Row
    params: Tensor  # [d], what the workers agreed on last
    buffers: Mapping[str, Tensor]  # running statistics of the first worker that is there
    replicas: list[Replica]  # of all workers; on a real rank its own
    ledger: Ledger
    layout: FlatLayout | None = None  # where the parameters lie in `params`

    def state_dict(self) -> dict[str, Tensor]:
        """Trained parameters and buffers by name: `module.load_state_dict(..., strict=False)`.

        Frozen parameters, and buffers that training leaves alone, may be missing.
        """
        assert self.layout is not None
        return {**self.layout.unflatten(self.params), **self.buffers}

    @property
    def bytes_sent(self) -> int:
        """By all nodes, in the whole run."""
        return self.ledger.total_bytes

    @property
    def virtual_time_s(self) -> float:
        """Of a simulated run."""
        time_s: float = self.summary["virtual_time_s"]
        return time_s

    @property
    def training_time_s(self) -> float:
        """Measured on real processes, without evaluations and checkpoints."""
        time_s: float = self.summary["training_time_s"]
        return time_s

    @property
    def accuracy(self) -> float:
        """On the test set, at the end; under gossip the mean over the workers' models."""
        if "test_accuracy" not in self.summary:
            name = score_name(self.summary)
            raise ValueError(f"this run has no accuracy: its metric is {name}, see run.metric")
        accuracy: float = self.summary["test_accuracy"]
        return accuracy

    @property
    def metric(self) -> float | None:
        """The accuracy, or the metric of a user's own task; None: NaN or infinity."""
        return score_value(self.summary)

    def _repr_html_(self) -> str:
        """In a notebook: its figures, and the score against steps and time."""
        return run_html(self.config, self.metrics, self.summary)


def config_of(config: Config | None, settings: Mapping[str, Any], source: str) -> Config:
    """A configuration with some settings replaced; expressions may be objects."""
    if config is not None and not isinstance(config, Config):
        raise ValueError(
            f"{source} takes settings by name, such as gradwire.{source}(workers=4), or a Config; "
            f"got {config!r}"
        )
    written = {n: repr(v) if isinstance(v, Expression) else v for n, v in settings.items()}
    steps = 0 if config is None else written.get("steps", config.steps)
    if steps and "epochs" in written:
        lengths = both_lengths(f"steps = {steps}", f"epochs = {written['epochs']}")
        raise ValueError(f"{source}: {lengths} With steps = 0 epochs count.")
    return Config.from_dict({**(asdict(config) if config else {}), **written}, source)


def metrics_row(
    experiment: Experiment,
    step: int,
    models: Sequence[Model],
    losses: Sequence[float],
    **others: Any,
) -> Row:
    """One evaluation on the test set, with the other figures of this step.

    `models` has the model that the workers agreed on. Under gossip they agree on none, and it has
    those of all workers: then loss and accuracy are means, and the least and the greatest accuracy
    are given, too.
    """
    return {
        "step": step,
        "epoch": step / experiment.steps_per_epoch,
        "train_loss": number(sum(losses) / len(losses)) if losses else None,
        **_test_models(experiment, models),
        **others,
    }


def _test_models(experiment: Experiment, models: Sequence[Model]) -> Row:
    known: dict[int, Evaluation] = {}  # workers may hold the same tensor
    for params, buffers in models:
        if id(params) not in known:
            batches = experiment.test_batches()
            known[id(params)] = experiment.plan.task.evaluate(params, buffers, batches)
    tests = [known[id(params)] for params, _ in models]
    accuracies = [test.accuracy for test in tests]
    is_spread = experiment.plan.mixes and len(models) > 1
    spread = (number(min(accuracies)), number(max(accuracies))) if is_spread else ()
    return {
        "test_loss": number(_mean([test.loss for test in tests])),
        **score_row(experiment.config.metric, number(_mean(accuracies)), spread),
    }


def _mean(values: Sequence[float]) -> float:
    """The mean; of equal values exactly their value."""
    return values[0] if len(set(values)) == 1 else sum(values) / len(values)


def summary_of(
    experiment: Experiment, last: Row, ledger: Ledger, num_gradients: int, **others: Any
) -> Row:
    """The summary of a run, given its last row of metrics."""
    config, num_steps = experiment.config, experiment.plan.num_steps
    return {
        "config": asdict(config),
        "steps": num_steps,
        "steps_done": last["step"],
        "gradients": num_gradients,
        "parameters": experiment.plan.task.initial_params().numel(),
        **score_part(last),
        "test_loss": last["test_loss"],
        "distance": last["distance"],
        "dropped_steps": last["dropped_steps"],
        "bytes_sent": ledger.total_bytes,
        "bytes_per_worker_step": ledger.total_bytes / (config.workers * num_steps),
        "busiest_node_bytes": ledger.busiest_node_bytes,
        "messages_sent": ledger.total_messages,
        "bytes_by_link": ledger.link_bytes,
        "bytes_by_tensor": dict(ledger.tensor_bytes),
        **others,
        **({"evaluation_reason": reason} if (reason := experiment.evaluation_reason) else {}),
        "kernels": kernels.backend(),
        "versions": {
            "gradwire": gradwire.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }


def to_dict(replica: Replica) -> dict[str, Any]:
    """For a checkpoint; `Replica(**values)` is the replica again."""
    # Not `asdict`, which copies: replicas that share a tensor share it in the file as well.
    values = {field.name: getattr(replica, field.name) for field in fields(replica)}
    return {**values, "buffers": dict(replica.buffers)}  # only plain types can be loaded
