"""States of local updates are loaded by another number of ranks, and nothing is lost."""

from typing import Any

import pytest

from integration import local_states_cases as cases
from integration.local_states_cases import METHODS, SIZE
from runtime.process.launching import launch


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder = tmp_path_factory.mktemp("local_states")
    codes, results = launch(folder, SIZE, f"{cases.__name__}:{cases.run.__name__}", 240)
    assert codes == [0] * SIZE
    return results


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("case", ["fewer", "more"])
def test_what_was_still_to_be_sent_stays(ranks, name, case):
    for result in ranks:
        num_steps, has_same_start, drift, size, is_same, has_changed = result[name][case]
        assert num_steps == 7
        assert has_same_start
        assert drift <= 1e-6 * size
        assert (size > 0) == (name in ("local_sgd", "diloco"))
        assert is_same
        assert has_changed


@pytest.mark.parametrize("name", METHODS)
def test_refusals_say_what_to_do(ranks, name):
    for rank, result in enumerate(ranks):
        walked, alone, turned = result[name]["refused"]
        assert "the states of 4 ranks cannot be loaded by 2: rank" in walked
        assert "call " in walked
        assert "there and save again" in walked
        assert f"states of rank {rank} of 4, this is rank {rank % 2} of 2: give" in alone
        assert "a list of those of all ranks in order" in turned
