"""The residual that is lost with a worker that crashes."""

import torch

from gradwire.core.memory import Role
from gradwire.core.protocols import Replica
from gradwire.experiment.run.record import Row
from gradwire.training.plan import Plan


def lost_with(plan: Plan, replica: Replica) -> Row:
    """The mass that only this worker held: gradients that were computed and never sent.

    `residual_norm` is the norm of the residual, `residual_sum` the sum of its entries: the sum of
    all updates is smaller by this than the sum of all gradients.
    """
    squares, total = 0.0, 0.0
    for unit, state in zip(plan.units(), replica.exchange):
        spec = plan.spec(unit.bucket, replica.params.dtype)
        for memory in plan.reducer.remembered([state], spec).values():
            if memory.role is Role.LEFT:
                vector = memory.vectors[0].double()
                squares += float(torch.dot(vector, vector))
                total += float(vector.sum())
    if (owed := plan.architecture.owed(replica)) is not None:
        squares += float(owed.double().square().sum())
        total += float(owed.double().sum())
    return {"residual_norm": squares**0.5, "residual_sum": total}


def describe_loss(lost: Row) -> str:
    """The message for one loss."""
    if "residual_norm" not in lost:  # on real processes the residual is not known
        back = f"; back at {lost['back_s']:.1f} s" if "back_s" in lost else ""
        return f"after {lost['time_s']:.1f} s: {lost['why']}{back}"
    owed = (
        f"with what it had still to send, of norm {lost['residual_norm']:.3g}"
        if lost["residual_norm"]
        else "and owed nothing"
    )
    return f"Worker {lost['rank']} crashed at {lost['time_s']:.6g} s {owed}"
