"""What nodes keep from one job of a run to the next."""

import torch

from gradwire.experiment.processes.node.parts import OtherPart
from gradwire.experiment.run.config import Config
from gradwire.experiment.run.setup import prepare


def test_a_server_forgets_who_was_lost_in_a_job_that_ended() -> None:
    """Its checkpoint may be of the moment after a worker was lost; in the next job it is back."""
    plan = prepare(
        Config(workers=2, steps=1, architecture="parameter_server(2)", model="mlp((4,))")
    ).plan
    part = OtherPart(plan, 0)
    exchange = ("all", 0, (0, 1))
    part.keep = {"lost": {0: None}, "kept": {exchange: torch.ones(2)}}
    begun = OtherPart(plan, 0)
    begun.restore({"keep": dict(part.keep)})
    assert set(begun.keep) == {"kept"}
    replayed = OtherPart(plan, 0)  # the same job, and its journal says who comes back
    replayed.restore({"keep": dict(part.keep)}, is_replayed=True)
    assert replayed.keep == part.keep
