"""Under local updates, too, every rank gets a clear error within seconds, and nothing hangs."""

from typing import Any

import pytest

from integration import local_updates_failures as cases
from integration.local_updates_failures import DIFFERENT, SIZE
from runtime.process.launching import launch

SECONDS = 60.0  # on a loaded machine; alone it is less than one


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder = tmp_path_factory.mktemp("failures")
    codes, results = launch(folder, SIZE, f"{cases.__name__}:{cases.run.__name__}", 300)
    assert codes == [0, 7, 0]
    return [results[0], results[2]]  # those that are left


@pytest.mark.parametrize("name", DIFFERENT)
def test_different_settings(ranks, name):
    for result in ranks:
        kind, text, seconds = result["different"][name]
        assert kind == "DifferentSettingsError"
        assert f"rank 0 has {name} = " in text
        assert seconds < SECONDS


@pytest.mark.parametrize("name", ["local_sgd", "delayed", "decentralized", "closing"])
def test_a_killed_rank_is_named(ranks, name):
    for result in ranks:
        kind, text, seconds = result["killed"][name]
        assert kind == "PeerLost"
        assert "rank 1 " in text
        assert seconds < SECONDS
