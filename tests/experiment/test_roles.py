"""What nodes keep from one job of a run to the next."""

import torch

from gradwire.experiment.run.config import Config
from gradwire.experiment.run.roles import OtherRole
from gradwire.experiment.run.setup import prepare


def test_a_server_forgets_who_was_lost_in_a_job_that_ended() -> None:
    """Its checkpoint may be of the moment after a worker was lost; in the next job it is back."""
    plan = prepare(
        Config(workers=2, steps=1, architecture="parameter_server(2)", model="mlp((4,))")
    ).plan
    role = OtherRole(plan, 2)
    exchange = ("all", 0, (0, 1))
    role.memory = {"lost": {0: None}, "kept": {exchange: torch.ones(2)}}
    begun = OtherRole(plan, 2)
    begun.restore({"memory": dict(role.memory)})
    assert set(begun.memory) == {"kept"}
    replayed = OtherRole(plan, 2)  # the same job, and its journal says who comes back
    replayed.restore({"memory": dict(role.memory)}, is_replayed=True)
    assert replayed.memory == role.memory
