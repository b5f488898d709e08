"""Programs that other threads post, and the memory that they exchange."""

from typing import Any

import pytest

from runtime.process import posting_cases
from runtime.process.launching import launch


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    codes, results = launch(
        tmp_path_factory.mktemp("posting"), 2, "runtime.process.posting_cases:run", 120
    )
    assert codes == [0, 0]
    return results


def test_a_step_sends_what_the_memory_holds_in_that_step(ranks):
    steps = range(posting_cases.STEPS)
    assert ranks[0]["next"] == [[(10.0 * step + step) / 2] * 4 for step in steps]
    assert ranks[1]["next"] == [[10.0 * step] * 4 for step in steps]


def test_memory_that_is_written_again_is_sent_as_it_was(ranks):
    assert ranks[1]["large"] == 1.0


def test_programs_may_exchange_parts_of_one_vector(ranks):
    assert [result["both"] for result in ranks] == [list(range(8))] * 2
