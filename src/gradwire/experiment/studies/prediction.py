"""Probes real ranks, lets the simulator predict their step time, and compares.

All ranks call `probe`. It measures the network (`probe.py`), then what a gradient takes and by how
much coding is slower when all ranks code at once. Ranks that share a machine compete for its cores:
there it measures what gradients, coding and messages take of the processor (`processor.py`), and
finds the network for which the simulator needs as long (`network_fit.py`). From these settings
alone the simulator runs each method for a few steps; the same methods then run for real.
"""

import hashlib
import socket
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.compression.quantization.sign import Sign
from gradwire.core.key import Key
from gradwire.core.node import Node
from gradwire.core.protocols import Replica
from gradwire.core.spec import Spec
from gradwire.experiment.processes.headers import HEADERS
from gradwire.experiment.processes.launch.signals import Signals
from gradwire.experiment.processes.node.run import NodeRun
from gradwire.experiment.processes.node.types import RunFolder
from gradwire.experiment.processes.ranks import rank_of
from gradwire.experiment.report.comparison import format_seconds
from gradwire.experiment.run.config import Config
from gradwire.experiment.run.machine import default_threads, layout_of, own_device
from gradwire.experiment.run.outcome import Run, use_threads
from gradwire.experiment.run.setup import prepare, warm_up
from gradwire.experiment.simulate.simulation import simulate
from gradwire.experiment.studies.network_fit import calibrate, settings_on_cores
from gradwire.experiment.studies.probe import (
    Machine,
    NetworkMeasurement,
    Work,
    measure_machine,
    measure_network,
    num_skipped,
    settings_of,
)
from gradwire.experiment.studies.processor import Processor, Works, measure_processor
from gradwire.runtime.process.engine import ProcessEngine
from gradwire.runtime.process.gloo import GlooTransport
from gradwire.training.backward import PendingGradient
from gradwire.training.plan import Plan
from gradwire.training.worker import TrainingWorker

_TIMEOUT_S = 300.0  # in which nothing happens in a real run


@dataclass(frozen=True)
class Prediction:
    """One method: seconds per step. Of the real run the same steps count for all of them."""

    compression: str
    measured_s: float
    predicted_s: float
    compute_s: float  # of the measured: in gradients, mean of the ranks
    coding_s: float  # and in coding and updates

    @property
    def error(self) -> float:
        """Of the prediction, relative to what was measured."""
        return self.predicted_s / self.measured_s - 1


@dataclass(frozen=True)
class Probed:
    network: NetworkMeasurement
    machine: Machine
    settings: dict[str, Any]  # for the simulator
    predictions: list[Prediction]
    processor: Processor | None = None  # if all ranks share a machine

    @property
    def parts_of_compute(self) -> str:
        """What the setting `compute` is made of."""
        if self.processor is not None:
            return "a gradient, in seconds of a core"
        gradient = format_seconds(max(self.machine.compute_s))
        overhead = format_seconds(self.machine.overhead_s)
        return f"a gradient ({gradient}) and the overhead of a step ({overhead}) together"

    def to_dict(self) -> dict[str, Any]:
        """For JSON: with what follows from the fields."""
        predictions = [{**asdict(one), "error": one.error} for one in self.predictions]
        return {**asdict(self), "predictions": predictions}

    def to_toml(self) -> str:
        """A file for `gradwire run --config`."""
        config = replace(Config(), **self.settings)
        lines = config.to_toml().splitlines(keepends=True)
        chosen = [line for line in lines if line.split(" = ")[0] in self.settings]
        return (
            "# Measured between real ranks by `gradwire probe`. Use it as\n"
            '#     gradwire run --config FILE --compression "ef(topk(0.01))" ...\n'
            f"# compute is {self.parts_of_compute}.\n"
        ) + "".join(chosen)


def probe(
    config: Config, compressions: Sequence[str], steps: int, say: Callable[[str], None]
) -> Probed:
    """Probes and predicts. All ranks of a process group call it with the same settings."""
    if dist.get_world_size() != (size := layout_of(config).size):
        raise ValueError(
            f"workers = {config.workers} on {config.architecture} makes {size} ranks, "
            f"but there are {dist.get_world_size()}"
        )
    threads = config.threads or default_threads(config.workers)
    skipped = num_skipped(steps) if compressions else steps
    base = replace(config, engine="process", steps=steps, eval_every=skipped, threads=threads)
    base = replace(base, record_order=False, record_spans=False)  # there is no folder
    with use_threads(threads):
        plan = prepare(base).plan
        transport = GlooTransport(headers=HEADERS, device=own_device(base))
        task = plan.task
        engine = ProcessEngine(
            transport, evaluate=task.gradients, evaluate_layers=task.gradient_by_layer
        )
        say("the network")
        nbytes = 4 * plan.task.initial_params().numel() // config.workers
        network = engine.run(partial(measure_network, long_nbytes=nbytes))
        say("gradients and coding")
        work = _gradient(plan, engine.rank), _coding(plan)
        machine = engine.run(lambda node: measure_machine(node, *work))
        assert network is not None
        assert machine is not None
        settings, processor = settings_of(network, machine), None
        if threads == 1 and _share_a_machine():
            say("the processor")
            works = works_of(plan, engine.rank)
            processor = engine.run(partial(measure_processor, works=works))
            assert processor is not None
            found = calibrate(processor, size)
            settings = settings_on_cores(processor, found, size, plan.scheduling.overlaps)
        transport.close()
    settings["threads"] = threads
    predictions = []
    for compression in compressions:
        say(compression)
        chosen = replace(base, compression=compression)
        with use_threads(threads):
            run, spent = _run(chosen)
        first, last = run.metrics[0], run.metrics[-1]
        counted = last["step"] - first["step"]
        measured = (last["time_s"] - first["time_s"]) / counted
        compute, coding = (spent / counted).tolist()
        predicted = 0.0
        if engine.rank == 0:  # the others wait for it in the next run
            values = {**asdict(chosen), **settings, "engine": "simulator", "native": False}
            predicted = simulate(Config.from_dict(values)).virtual_time_s / steps
        predictions.append(Prediction(compression, measured, predicted, compute, coding))
    return Probed(network, machine, settings, predictions, processor)


def _share_a_machine() -> bool:
    """Whether all ranks of the process group run on one machine."""
    digest = hashlib.blake2b(socket.gethostname().encode(), digest_size=7).digest()
    own = torch.tensor([int.from_bytes(digest, "big")])
    all_ranks = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(all_ranks, own)
    return all(other.equal(own) for other in all_ranks)


class _Counting(NodeRun):
    """A rank that reports what it spent since the first row of metrics; earlier steps do not
    count."""

    before = torch.zeros(2, dtype=torch.float64)

    def step_finished(self, rank: int, step: int, replica: Replica, now: float) -> None:
        super().step_finished(rank, step, replica, now)
        if step + 1 == self.config.eval_every:
            self.before = self._total_s()

    def spent_since(self) -> Tensor:
        """Seconds in gradients, and in coding and updates: means of all ranks, which all call."""
        seconds = self._total_s() - self.before
        dist.all_reduce(seconds)
        return seconds / self.engine.size

    def _total_s(self) -> Tensor:
        coding_s = sum(self.engine.call_s.values())
        return torch.tensor([self.engine.compute_s, coding_s], dtype=torch.float64)


def _run(config: Config) -> tuple[Run, Tensor]:
    """A real run without records, and what was spent in the steps that count."""
    never = 0.0  # a checkpoint: there is no folder
    with rank_of(_Counting, config, RunFolder(None), never, _TIMEOUT_S, signals=Signals()) as node:
        run = node.run()
    return run, node.spent_since()


def _gradient(plan: Plan, rank: int) -> Work:
    """The work of a step until the gradient is there, as a worker does it."""
    warm_up(plan, rank)
    replica, steps = plan.initial_replicas()[rank], count()
    worker: TrainingWorker | None = None

    async def work(node: Node) -> None:
        nonlocal worker
        worker = worker or TrainingWorker(plan, node)
        await worker.gradient(replica, next(steps))

    return work


def _coding(plan: Plan, share: float = 1.0) -> Work:
    """Work like that of codecs, on a vector like the gradient or like a share of it."""
    params = plan.task.initial_params()
    numel = max(1, round(share * params.numel()))
    x = torch.randn(numel, generator=torch.Generator().manual_seed(0)).to(params)
    codec, spec, key = Sign(), Spec.of(x), Key(0)

    def coded() -> None:
        payload, _ = codec.encode(x, codec.init(spec), key)
        codec.decode(payload, spec, key).add_(x)

    async def work(node: Node) -> None:
        await node.call(coded)

    return work


def works_of(plan: Plan, rank: int) -> Works:
    """What a worker of this plan computes in a step. Coding is that of a bucket."""
    warm_up(plan, rank)
    replica, steps, layers = plan.initial_replicas()[rank], count(), plan.profile.layers

    async def gradient(node: Node) -> None:
        await PendingGradient(TrainingWorker(plan, node), replica, next(steps)).whole()

    async def by_layer(node: Node, on_layer: Callable[[], None]) -> None:
        backward = PendingGradient(TrainingWorker(plan, node), replica, next(steps))
        for layer in reversed(layers):
            await backward.ready(layer)
            on_layer()

    return Works(gradient, by_layer, _coding(plan, 1 / len(layers)))
