"""From a configuration to a plan: looks up all names and checks all choices."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from gradwire.architecture import ARCHITECTURE
from gradwire.compression import COMPRESSION
from gradwire.compression.by_rank import at_bandwidths, check_no_bandwidths
from gradwire.compression.feedback.ef import warn_if_unfed
from gradwire.core.epochs import steps_of_epochs
from gradwire.core.key import Key
from gradwire.core.lifted import lift
from gradwire.core.profile import Price, Profile, layers_of
from gradwire.core.protocols import Ability, Bucket, ability_of
from gradwire.core.spec import Spec
from gradwire.data.dataset import Dataset
from gradwire.data.sampler import Sampler
from gradwire.experiment.costs.coding_costs import Charge, charge_of
from gradwire.experiment.costs.gradient_time import GradientTime, default_threads, measure_gradient
from gradwire.experiment.run.batches import test_batches, train_batches
from gradwire.experiment.run.config import Config
from gradwire.experiment.run.given import NOTHING, Given
from gradwire.experiment.run.momentum import place
from gradwire.experiment.run.registries import OPTIMIZERS, PARTITIONS, SCHEDULES
from gradwire.experiment.run.subject import find_subject, make_task
from gradwire.own.data import OwnData
from gradwire.runtime.network.faults import Arrive, Crash, Fault, parse_faults
from gradwire.runtime.network.network import Network, parse_duration, per_node
from gradwire.runtime.network.topology import TOPOLOGY
from gradwire.runtime.virtual.compute_time import (
    COMPUTE_TIME,
    STRAGGLERS,
    Computer,
    Fixed,
    Measured,
)
from gradwire.runtime.virtual.host import HOST, Cores, Host, Lanes
from gradwire.runtime.virtual.sharing import make_engine
from gradwire.scheduling import SCHEDULING
from gradwire.synchronization import SYNCHRONIZATION
from gradwire.training.gradient import Batch, GradientRequest
from gradwire.training.layer_times import (
    LAYER_TIMES,
    Flops,
    Hooks,
    Shares,
    layer_flops,
    task_tensors,
)
from gradwire.training.plan import Plan
from gradwire.training.prices import (
    drawn_gradient,
    price_exchanges,
    priced_limits,
    priced_numels,
)

_FLOPS = 2e10  # per second: what schedules assume of real processes that do not measure
_LANES = Lanes()
_DRAWS = 31  # of the time of a gradient, for what a schedule decides by


@dataclass(frozen=True)
class Experiment:
    """A configuration with everything looked up. `config` is the resolved one."""

    config: Config
    plan: Plan
    dataset: Dataset | OwnData
    network: Network
    what_if: dict[str, Network]
    computer: Computer
    steps_per_epoch: float
    host: Host = _LANES
    faults: tuple[Fault, ...] = ()
    heartbeat_s: float = 0.0
    charge: Charge | None = None  # of coding; None on real processes
    measured: GradientTime | None = None  # if `compute` was measured
    evaluation_reason: str = ""  # why gradients of a user's own module come one after another

    @property
    def measures_schedule(self) -> bool:
        """Whether real processes measure before they decide on the schedule."""
        return _measures_schedule(self.config, self.plan)

    def test_batches(self) -> Iterator[Batch]:
        key, size = self.plan.key.child("test"), self.config.batch_size
        return test_batches(self.dataset, self.plan.task.device, key, size)


def prepare(config: Config, given: Given = NOTHING) -> Experiment:
    """Looks everything up. The result's configuration is complete and in canonical notation.

    `given` has the Python objects for which texts in the configuration stand.
    """
    if config.engine == "process":
        check_real(config)
    compression = COMPRESSION.parse(config.compression)
    synchronization = SYNCHRONIZATION.parse(config.synchronization)
    architecture = ARCHITECTURE.parse(config.architecture)
    scheduling = SCHEDULING.parse(config.scheduling)
    optimizer = OPTIMIZERS.parse(config.optimizer)
    schedule = SCHEDULES.parse(config.schedule)
    partition = PARTITIONS.parse(config.partition)
    compute = COMPUTE_TIME.parse(config.compute)
    stragglers = STRAGGLERS.parse(config.stragglers)
    stragglers.check(config.workers)
    faults = parse_faults(config.faults, config.workers)
    others = architecture.num_others
    topology = TOPOLOGY.parse(config.topology)
    network, *other_networks = (
        topology.shape(
            replace(
                Network.parse(config.workers, bandwidth, config.latency, others),
                burst=config.burst,
            ),
            config.workers,
        )
        for bandwidth in (config.bandwidth, *config.what_if)
    )
    host = HOST.parse(config.host)
    _check_network(config, network, host)
    what_if = dict(zip(config.what_if, other_networks))
    written = compression
    if config.engine == "process":
        check_no_bandwidths(compression)
    else:
        compression = at_bandwidths(compression, network.near_bandwidths())
    speeds = _speeds(config)
    subject = find_subject(config, given)

    key = Key(config.seed)
    device = _device(config.device)
    dataset = subject.dataset if device.type == "cpu" else subject.dataset.to(device)
    sampler = Sampler(dataset, partition, config.workers, config.batch_size, key.child("data"))
    batch = train_batches(config, dataset, sampler, device, key.child("augment"))
    steps_per_epoch = sampler.steps_per_epoch / config.accumulate
    steps = config.steps or steps_of_epochs(config.epochs, steps_per_epoch)
    num_examples = steps * config.accumulate * config.workers * config.batch_size
    trial = make_task(config, subject, device, batch, num_examples)
    task = trial.task
    ability = ability_of(synchronization, architecture)
    _check_joins(config.faults, ability, config)
    mixes = ability in ("mix", "mix_async")
    placed = place(optimizer, compression, synchronization, config.momentum_at, mixes)
    spec = Spec.of(task.initial_params())
    if not (mixes or synchronization.sends_changes):
        warn_if_unfed(compression, spec)
    plan = Plan(
        task=task,
        batch=batch,
        optimizer=placed.optimizer,
        schedule=schedule,
        reducer=lift(placed.compression, steps_per_epoch),
        synchronization=synchronization,
        architecture=architecture,
        scheduling=scheduling,
        num_workers=config.workers,
        num_steps=steps,
        key=key,
        clip_norm=config.clip_norm or None,
        local_clip=placed.is_local,
        local_decay=placed.local_decay,
        nonfinite=config.nonfinite,
        steps_per_epoch=steps_per_epoch,
        num_examples=sampler.num_examples_of_workers,
        batch_size=config.batch_size,
        accumulate=config.accumulate,
    )
    simulated, measured = config.engine == "simulator", None
    charge = charge_of(config)
    if isinstance(compute, Measured) and simulated:
        measured = measure_gradient(warm_up(plan, 0), device, config.threads or 1)
        compute = Fixed(measured.seconds)
    computer = Computer(compute, stragglers, speeds, key.child("computer"))
    layer_times = LAYER_TIMES.parse(config.layer_times)
    if scheduling.overlaps:
        if simulated:
            layer_times = layer_times.resolve(task, batch(0, 0))
        # Real ranks would each measure something else: what they decide by is measured together.
        own_times = Flops() if isinstance(layer_times, Hooks) else layer_times
        flops = sum(layer_flops(task, batch(0, 0)))
        seconds = _usual_seconds(computer, config.workers) if simulated else flops / _FLOPS
        shares = own_times.shares(task, batch(0, 0))
        measures = _measures_schedule(config, plan)
        has_prices = scheduling.needs_prices and not measures
        prices = simulated_prices(plan, network, charge, host) if has_prices else ()
        profile = make_profile(task_tensors(task), shares, seconds, prices)
        if not measures:
            scheduling = scheduling.resolve(task_tensors(task), profile)
        plan = replace(plan, scheduling=scheduling, layer_profile=profile)
    texts: dict[str, Any] = dict(subject.texts)
    resolved = replace(
        config,
        optimizer=repr(optimizer),
        momentum_at=placed.where,
        schedule=repr(schedule),
        partition=repr(partition),
        steps=steps,
        compression=repr(written),
        synchronization=repr(synchronization),
        architecture=repr(architecture),
        scheduling=repr(scheduling),
        compute=repr(compute),
        layer_times=repr(layer_times),
        topology=repr(topology),
        host=repr(host),
        stragglers=repr(stragglers),
        faults=tuple(map(repr, faults)),
        eval_every=config.eval_every or max(1, -(-steps // 10)),
        evaluation=task.mode,
        threads=config.threads or default_threads(task.initial_params().numel()),
        coding_costs=str(Path(config.coding_costs).absolute()) if config.coding_costs else "",
        **texts,
    )
    return Experiment(
        resolved,
        plan,
        dataset,
        network,
        what_if,
        computer,
        steps_per_epoch,
        host,
        faults,
        parse_duration(config.heartbeat),
        charge if simulated else None,
        measured,
        trial.reason,
    )


def _usual_seconds(computer: Computer, num_workers: int) -> float:
    """What a gradient usually takes the slowest worker: each worker's median of some steps."""
    draws = range(_DRAWS)
    return max(median(computer.seconds(rank, i) for i in draws) for rank in range(num_workers))


def _measures_schedule(config: Config, plan: Plan) -> bool:
    """See processes/node/schedule.py. With servers workers may come later, and miss it.

    A run whose order is recorded decides by what a replay knows, too.
    """
    needs = config.engine == "process" and plan.scheduling.needs_prices
    return needs and plan.pauses and not (plan.layout.others or config.record_order)


def make_profile(
    tensors: Sequence[Bucket], shares: Shares, seconds: float, prices: tuple[Price, ...]
) -> Profile:
    """What schedules decide by, where a gradient takes so many seconds."""
    total = sum(shares.forward) + sum(shares.backward)
    if total <= 0:
        raise ValueError(f"times of layers must have a positive sum, got {shares}")
    factor = (seconds or 1.0) / total
    return Profile(
        layers_of(tensors),
        tuple(factor * own for own in shares.forward),
        tuple(factor * own for own in shares.backward),
        prices=prices,
    )


def simulated_prices(
    plan: Plan, network: Network, charge: Charge, host: Host = _LANES
) -> tuple[Price, ...]:
    """What exchanges cost on the simulated network."""
    numels = priced_numels(plan.task.initial_params().numel())
    engine = make_engine(
        host,
        network,
        plan.num_workers,
        has_priorities=plan.scheduling.has_priorities,
        coding=charge.time,
    )
    limits = priced_limits(numels)
    daemons = [lambda node: plan.architecture.daemon(node, {}, limits)] * len(plan.layout.others)
    program = partial(price_exchanges, plan, numels, drawn_gradient(plan, numels))
    return engine.run([program] * plan.num_workers, daemons)[0]


# Settings of the simulator, which have no meaning on real processes.
_SIMULATED = (
    "bandwidth",
    "latency",
    "topology",
    "burst",
    "host",
    "what_if",
    "compute",
    "speeds",
    "stragglers",
    "faults",
    "heartbeat",
    "coding",
    "coding_costs",
    "coding_slowdown",
)


def check_real(config: Config) -> None:
    """Refuses settings that would have no effect on real processes."""
    usual = Config()
    given = [name for name in _SIMULATED if getattr(config, name) != getattr(usual, name)]
    if given:
        raise ValueError(
            f"{', '.join(given)}: this describes what the simulator models, and engine = "
            '"process" runs on a real network. Leave it out, or take engine = "simulator".'
        )


def _check_network(config: Config, network: Network, host: Host) -> None:
    """Refuses what the models of token buckets and of shared cores leave out."""
    if config.burst and (network.fabric is not None or config.faults):
        raise ValueError(
            f"burst = {config.burst} is for network cards on a switch, without faults: leave out "
            "burst, or topology and faults"
        )
    if isinstance(host, Cores) and (config.faults or config.what_if or config.record_spans):
        raise ValueError(
            f"host = {host!r} goes with neither faults, what_if nor record_spans: leave them out, "
            'or take host = "lanes"'
        )


def _check_joins(faults: Sequence[str], ability: Ability, config: Config) -> None:
    """Refuses late joiners if the method needs all workers from beginning to end."""
    for fault in parse_faults(faults, config.workers):
        comes = isinstance(fault, Arrive) or (isinstance(fault, Crash) and fault.rejoin is not None)
        if comes and ability == "mean":
            raise ValueError(
                f"{fault!r}: {config.synchronization} on {config.architecture} needs all workers "
                "from beginning to end, so none can come (back). Take ssp, asp or bsp(backup=1) on "
                "parameter_server, or gossip."
            )


def _device(name: str) -> torch.device:
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"device {name!r} cannot be used here: {reason}. Try cpu.") from None


def _speeds(config: Config) -> tuple[float, ...]:
    values = per_node(config.speeds, config.workers, "speeds")
    try:
        speeds = tuple(float(value) for value in values)
    except ValueError:
        raise ValueError(f"speeds must be numbers, got {config.speeds!r}") from None
    if not all(0 < speed < float("inf") for speed in speeds):
        raise ValueError(f"speeds must be above 0, got {config.speeds!r}")
    return speeds


def warm_up(plan: Plan, rank: int) -> Callable[[], None]:
    """Evaluates a gradient, as the first one takes longer; returns a function that repeats it."""
    replica = plan.initial_replicas()[rank]
    inputs, targets = plan.batch(rank, 0)
    key = plan.key.private(rank)
    request = GradientRequest(replica.params, replica.buffers, inputs, targets, key)

    def evaluate() -> None:
        (result,) = plan.task.gradients([request])
        float(result.loss)  # waits for an accelerator

    evaluate()
    return evaluate
