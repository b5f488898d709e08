"""Gossip where ranks run out of data: those that are done serve the others, on 2 and 4 ranks."""

from typing import Any

import pytest

from integration import uneven_cases as cases
from integration.uneven_cases import METHODS, NUM_STEPS, name_of
from runtime.process.launching import launch


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request: Any, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder = tmp_path_factory.mktemp("uneven")
    codes, results = launch(folder, request.param, f"{cases.__name__}:{cases.run.__name__}", 240)
    assert codes == [0] * request.param
    return results


@pytest.mark.parametrize("method", METHODS, ids=name_of)
def test_ranks_that_are_done_take_part_without_steps(ranks, method):
    for rank, result in enumerate(ranks):
        difference, steps, means = result[name_of(method)]
        assert difference < 1e-6
        assert steps == [NUM_STEPS[rank], max(NUM_STEPS)]
        assert means == [True, True, True]
