"""Figures of a run, from its workers and servers."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from gradwire.core.protocols import Replica
from gradwire.experiment.run.record import Row
from gradwire.training.plan import Plan
from gradwire.training.server import Noted, TrainingServer


def number(value: float) -> float | None:
    """None instead of NaN and infinity, which JSON does not have."""
    return value if math.isfinite(value) else None


def distance_of(models: list[Tensor]) -> float:
    """How far apart the models are: the root mean square distance to their mean."""
    if all(model is models[0] for model in models):
        return 0.0
    stacked = torch.stack(models).double()
    return float((stacked - stacked.mean(dim=0)).square().sum(dim=1).mean().sqrt())


def noted(servers: Sequence[TrainingServer]) -> Row:
    """What servers noted, such as the staleness of gradients: mean and maximum of each."""
    return taken_together([server.notes for server in servers])


def taken_together(notes: Sequence[Mapping[str, Noted]]) -> Row:
    """Mean and maximum of each, given every server's notes."""
    found: dict[str, list[Noted]] = {}
    for one in notes:
        for name, figures in one.items():
            found.setdefault(name, []).append(figures)
    return {
        name: {
            "mean": sum(total for total, _, _ in figures) / sum(count for _, count, _ in figures),
            "max": max(most for _, _, most in figures),
        }
        for name, figures in found.items()
    }


def counted(plan: Plan, replicas: Sequence[Replica]) -> Row:
    """What algorithms count with each worker, such as uploads and staleness: mean and maximum."""
    memories = [replica.memory for replica in replicas]
    rules = (plan.synchronization, plan.architecture)
    return taken_together([rule.counts(memories) for rule in rules])
