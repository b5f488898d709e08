"""Runs a few steps to record a timeline of them."""

from dataclasses import replace

from gradwire.experiment.run.config import Config
from gradwire.experiment.run.setup import prepare
from gradwire.experiment.simulate.simulation import simulate_prepared
from gradwire.runtime.spans import SpanLog
from gradwire.synchronization import SYNCHRONIZATION

# Workers that do not wait for one another make different progress: fast ones continue until slow
# ones have done the steps that are shown, unless they are faster by more than this.
_MORE_STEPS = 4


def few_steps(config: Config, num_steps: int) -> Config:
    """The configuration of a run that is as long as its timeline, evaluated once."""
    pauses = SYNCHRONIZATION.parse(config.synchronization).pauses
    steps = num_steps if pauses else _MORE_STEPS * num_steps
    return replace(config, steps=steps, eval_every=steps, what_if=(), record_spans=False)


def record_simulated(config: Config, num_steps: int) -> SpanLog:
    """The spans of so many steps of each worker on the simulator."""
    experiment = prepare(few_steps(config, num_steps))
    log = SpanLog(config.workers, experiment.network.size)
    simulate_prepared(experiment, spans=log)
    return log
