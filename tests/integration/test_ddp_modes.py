"""The hook under DDP with a static graph, under torch.compile, and in profiles of all threads."""

from typing import Any

import pytest

from integration.ddp_modes_cases import COMPRESSIONS, SIZE, STEPS
from integration.ddp_modes_cases import run as run_cases
from runtime.process.launching import launch


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder = tmp_path_factory.mktemp("modes")
    name = f"integration.ddp_modes_cases:{run_cases.__name__}"
    codes, results = launch(folder, SIZE, name, 300)
    assert codes == [0] * SIZE
    return results


@pytest.mark.parametrize("text", COMPRESSIONS)
def test_a_static_graph(ranks, text):
    for result in ranks:
        is_same, steps, difference = result["static"][text]
        assert is_same
        assert steps == len(STEPS)
        assert (difference == 0) == (text == "identity")


@pytest.mark.parametrize("text", COMPRESSIONS)
def test_compiled_ddp(ranks, text):
    for result in ranks:
        is_same, steps, difference = result["compiled"][text]
        assert is_same
        assert steps == len(STEPS)
        assert difference == 0


def test_a_profile_of_all_threads_has_the_stages(ranks):
    for result in ranks:
        if result["ranges"] is None:
            pytest.skip("this torch has no profile_all_threads")
        names = {name.removeprefix("gradwire: ") for name in result["ranges"]}
        assert {"wait", "encode"} <= names
        assert any("decode" in name for name in names)
