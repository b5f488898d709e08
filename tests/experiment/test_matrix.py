"""The matrix: single pairs refuse, what concerns all is an error, the survey's grades beside it."""

from dataclasses import replace

import pytest

from gradwire.core.errors import NonFiniteError
from gradwire.experiment.studies import matrix
from gradwire.experiment.studies.matrix import BASE, Pair, measure, pairs, survey

SMALL = replace(BASE, workers=3, steps=2, model="mlp((4,))")


def test_refusals_of_single_pairs_are_rows():
    chosen = pairs(["bsp", "asp"], ["allreduce", "gossip(hypercube)"])
    plain, asynchronous, wrong_size, never = measure(chosen, SMALL)
    assert plain["loss"] > 0
    assert "needs everyone" in asynchronous["refusal"]
    assert "power of two of workers, got 3" in wrong_size["refusal"]
    assert "wait for all neighbours" in never["refusal"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"compression": "bogus"}, "bogus"),
        ({"compression": "topk(5)"}, "topk"),
        ({"bandwidth": "abc"}, "bandwidth 'abc' is not understood"),
        ({"bandwidth": "1,2"}, "2 values for 3 nodes"),
        ({"steps": 0}, "steps must be at least 1, got 0"),
    ],
)
def test_what_concerns_all_pairs_is_an_error_before_the_first_run(changes, message, monkeypatch):
    monkeypatch.setattr(matrix, "simulate", lambda config: pytest.fail("ran"))
    chosen = pairs(["bsp", "asp"], ["allreduce", "parameter_server"])
    with pytest.raises(ValueError, match=message):
        measure(chosen, replace(SMALL, **changes))


def test_a_network_with_servers_serves_the_pairs_that_have_them():
    networks = ",".join(["100Mbit"] * 5)  # 3 workers, a server, the scheduler
    chosen = pairs(["bsp"], ["allreduce", "parameter_server"])
    refused, served = measure(chosen, replace(SMALL, bandwidth=networks))
    assert "5 values for 3 nodes" in refused["refusal"]
    assert served["loss"] > 0


def test_a_pair_that_diverges_is_not_one_that_makes_no_sense(monkeypatch):
    def diverges(config):
        raise NonFiniteError("step 1")

    monkeypatch.setattr(matrix, "simulate", diverges)
    (row,) = measure(pairs(["bsp"], ["allreduce"]), SMALL)
    assert row["failure"] == "diverged: step 1"
    assert "refusal" not in row


@pytest.mark.parametrize(
    ("synchronization", "architecture", "grades"),
    [
        ("bsp", "parameter_server(2)", ["high", "high", "high", "stable"]),
        ("ssp(2)", "parameter_server", ["normal", "high", "normal", "normal"]),
        ("asp", "parameter_server", ["low", "high", "low", "unstable"]),
        ("localsgd(4)", "parameter_server", ["normal", "low", "high", "unstable"]),
        ("bsp", "allreduce", ["high", "high", "low", "easy"]),
        ("localsgd(4)", "ring", ["normal", "low", "low", "stable"]),
        ("bsp", "gossip(ring)", ["low", "high", "low", "stable"]),
        ("asp", "gossip(ring, adpsgd)", ["low", "high", "low", "unstable"]),
        ("localsgd(4)", "gossip(ring)", ["low", "low", "low", "stable"]),
        ("bsp(backup=1)", "parameter_server", None),
        ("ssp(2)", "allreduce", None),
        ("diloco(4)", "allreduce", None),
    ],
)
def test_grades_are_those_of_the_surveys_table(synchronization, architecture, grades):
    found = survey(Pair(synchronization, architecture))
    assert (found and list(found.values())) == grades


def test_graded_pairs_have_their_grades_in_their_rows():
    graded, ungraded = measure(pairs(["bsp", "diloco(2)"], ["allreduce"]), SMALL)
    assert graded["survey"] == {
        "consistency": "high",
        "frequency": "high",
        "congestion": "low",
        "convergence": "easy",
    }
    assert "survey" not in ungraded
