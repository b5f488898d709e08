"""Schedules of real processes that decide by times: measured at the start, alike on all ranks.

Rank 0 measures the layers with hooks while the others wait. Then all exchange buckets of several
sizes as they will in the run (`training/prices.py`). Rank 0 decides, and all get its decision and
its numbers: groups of `mgwfbp` become part of the configuration, so a resumed run has the same; the
order of `priority` depends on the numbers. If steps take much longer or shorter later (`drift.py`),
all measure again. After another decision ranks move the state of compression to the new buckets.

With servers workers may come later, which could not take part: there schedules decide by what the
configuration assumes.
"""

from dataclasses import replace
from functools import partial
from typing import Any

from gradwire.core.group import Group
from gradwire.core.node import Node
from gradwire.core.profile import Price, Profile
from gradwire.core.protocols import Replica
from gradwire.experiment.processes.agreement import Agreement
from gradwire.experiment.run.record import Row
from gradwire.experiment.run.setup import Experiment, make_profile
from gradwire.runtime.process.engine import ProcessEngine
from gradwire.scheduling import SCHEDULING
from gradwire.training.layer_times import LAYER_TIMES, Flops, measure_layers, task_tensors
from gradwire.training.plan import Plan
from gradwire.training.prices import drawn_gradient, price_exchanges, priced_numels
from gradwire.training.regroup import regroup_here

_FACTOR, _REPEATS = 4, 3  # between sizes of buckets; times that each is measured


def measure_schedule(
    experiment: Experiment, engine: ProcessEngine, agreement: Agreement, recorded: str
) -> Experiment:
    """The experiment with a schedule that is decided. All ranks call it.

    `recorded`: the schedule of the same run before it was interrupted; "" if it begins.
    """
    plan = experiment.plan
    scheduling = SCHEDULING.parse(recorded) if recorded else plan.scheduling
    numels = priced_numels(plan.task.initial_params().numel(), _FACTOR)
    gradient = drawn_gradient(plan, numels)
    is_first = engine.rank == agreement.coordinator
    layers = _layer_seconds(experiment) if is_first else {}
    agreement.agree({}, lambda reports: {})  # the others have waited
    program = partial(price_exchanges, plan, numels, gradient, repeats=_REPEATS)
    prices = agreement.run_uncounted(program)

    def decide(reports: Any) -> Row:
        shares = layers["shares"]
        profile = make_profile(task_tensors(plan.task), shares, layers["seconds"], prices)
        resolved = scheduling.resolve(task_tensors(plan.task), profile)
        numbers = {
            "forward_s": profile.forward_s,
            "backward_s": profile.backward_s,
            "prices": profile.prices,
        }
        return {"scheduling": repr(resolved), "profile": numbers}

    decision = agreement.agree({}, decide)
    return with_schedule(experiment, decision["scheduling"], _profile(plan, decision["profile"]))


def _layer_seconds(experiment: Experiment) -> dict[str, Any]:
    """Times of layers: as the configuration has them, or as measured here."""
    task, batch = experiment.plan.task, experiment.plan.batch(0, 0)
    measured = measure_layers(task, batch)
    given = LAYER_TIMES.parse(experiment.config.layer_times)
    shares = measured if isinstance(given, Flops) else given.shares(task, batch)
    return {"shares": shares, "seconds": sum(measured.forward) + sum(measured.backward)}


def _profile(plan: Plan, row: Row) -> Profile:
    return Profile(
        plan.profile.layers,
        tuple(row["forward_s"]),
        tuple(row["backward_s"]),
        prices=tuple(Price(*price) for price in row["prices"]),
    )


def with_schedule(
    experiment: Experiment, scheduling: str, profile: Profile | None = None
) -> Experiment:
    """The experiment with another schedule, and perhaps another profile."""
    plan = experiment.plan
    return replace(
        experiment,
        plan=replace(
            plan,
            scheduling=SCHEDULING.parse(scheduling),
            layer_profile=profile or plan.layer_profile,
        ),
        config=replace(experiment.config, scheduling=scheduling),
    )


async def regroup_worker(node: Node, replica: Replica, old: Plan, new: Plan) -> Replica:
    """The replica of this rank for the buckets of another schedule. All ranks call it."""
    dtype = replica.params.dtype
    before, after = ([p.spec(unit.bucket, dtype) for unit in p.units()] for p in (old, new))
    group = Group(node, "regroup")
    states = await regroup_here(old.reducer, replica.exchange, before, after, group)
    return replica.having(exchange=states)
