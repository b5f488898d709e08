"""gradwire.decentralized in plain loops, on four ranks."""

from typing import Any

import pytest

from integration import decentralized_cases as cases
from integration.decentralized_cases import METHODS, SIZE, name_of
from runtime.process.launching import launch


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder = tmp_path_factory.mktemp("decentralized")
    codes, results = launch(folder, SIZE, f"{cases.__name__}:{cases.run.__name__}", 300)
    assert codes == [0] * SIZE
    return results


@pytest.mark.parametrize("method", METHODS, ids=name_of)
def test_gossip_is_that_of_the_simulator(ranks, method):
    for result in ranks:
        difference, differs, from_mean, is_same = result["golden"][name_of(method)]
        assert difference < 1e-6
        assert differs
        assert is_same
        assert from_mean < 1e-6


def test_consensus_averages_exactly_and_training_continues(ranks):
    for result in ranks:
        assert result["consensus"] == [True, True, False, False, True]


def test_two_models_do_not_disturb_each_other(ranks):
    assert all(result["two"] for result in ranks)


def test_buffers_are_local_until_the_consensus(ranks):
    assert all(result["norms"] == [True, True] for result in ranks)


def test_stats(ranks):
    for result in ranks:
        steps, sent, start, model_nbytes, ratio = result["stats"]
        assert steps == 8
        # Four rounds have ended; the fifth has begun, as the first had at the start.
        assert 5 * model_nbytes <= sent < 5.1 * model_nbytes
        assert model_nbytes <= start < 1.1 * model_nbytes
        assert ratio == pytest.approx(8 * 1.5 * model_nbytes / sent)


def test_refusals(ranks):
    for result in ranks:
        varying, feedback, lossy = result["refused"]
        assert "Take a constant graph such as ring" in varying
        assert "Write a plain codec" in feedback
        assert "has no rule for a codec that loses something" in lossy
