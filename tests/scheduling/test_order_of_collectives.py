"""All ranks exchange buckets in one order, whatever order gradients come in, also natively."""

from pathlib import Path
from typing import Any

import pytest

from runtime.process.launching import launch
from scheduling.order_cases import NATIVE, SCHEDULES, SIZE, STEPS


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder: Path = tmp_path_factory.mktemp("orders")
    codes, results = launch(folder, SIZE, "scheduling.order_cases:run", 180)
    assert codes == [0] * SIZE
    return results


def test_layers_came_differently_on_each_rank(ranks: list[Any]) -> None:
    first, at_once, slow = (result["arrived"] for result in ranks)
    assert set(at_once) == {0}
    for arrived in (first, slow):
        assert {0, 1} < set(arrived)
    assert first != slow


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_models_are_those_of_the_simulator(schedule: str, ranks: list[Any]) -> None:
    assert [result[f"{schedule}, native False"] for result in ranks] == [0.0] * SIZE


@pytest.mark.parametrize("schedule", NATIVE)
def test_native_means_add_in_another_order_only(schedule: str, ranks: list[Any]) -> None:
    assert all(result[f"{schedule}, native True"] < 1e-6 for result in ranks)


def test_native_means_were_formed_of_all_buckets(ranks: list[Any]) -> None:
    (counts,) = {tuple(result["num_native"]) for result in ranks}  # the same on all ranks
    *without, wfbp, priority = counts
    assert without == [0] * len(SCHEDULES)
    assert wfbp == 12 * STEPS  # each tensor of six layers
    assert priority > wfbp  # large tensors are cut
