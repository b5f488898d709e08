"""Every rank gets a clear error within seconds, and nothing hangs."""

from pathlib import Path
from typing import Any

import pytest

from integration import failure_cases
from integration.failure_cases import SIZE
from runtime.process.launching import launch

SECONDS = 60.0  # on a loaded machine; alone it is less than one


def run(folder: Path, case: Any) -> tuple[list[int], list[Any]]:
    return launch(folder, SIZE, f"integration.failure_cases:{case.__name__}", 300)


def test_different_compressions(tmp_path):
    codes, results = run(tmp_path, failure_cases.different_compressions)
    assert codes == [0] * SIZE
    for rank, (name, text, seconds) in enumerate(results):
        assert name == "DifferentSettingsError"
        assert "rank 0 has compression = ef(topk(0.1)), rank 1 ef(sign)" in text
        assert f"this is rank {rank}" in text
        assert seconds < SECONDS


def test_different_models(tmp_path):
    codes, results = run(tmp_path, failure_cases.different_models)
    assert codes == [0] * SIZE
    for name, text, seconds in results:
        assert name == "DifferentSettingsError"
        assert "tensors" in text
        assert seconds < SECONDS


def test_models_of_different_length_are_not_broadcast(tmp_path):
    codes, results = run(tmp_path, failure_cases.fewer_parameters)
    assert codes == [0] * SIZE
    for name, text, _ in results:
        assert name == "ValueError"
        assert "rank 2 has 4 tensors, rank 0 has 6" in text


def test_a_killed_rank_is_named(tmp_path):
    codes, results = run(tmp_path, failure_cases.killed)
    assert codes == [0, 7, 0]
    for rank in (0, 2):
        name, text, seconds = results[rank]
        assert name == "PeerLost"
        assert "rank 1" in text
        assert seconds < SECONDS


@pytest.mark.parametrize("case", [failure_cases.raised])
def test_a_rank_that_raises_and_leaves_is_named(tmp_path, case):
    codes, results = run(tmp_path, case)
    assert codes == [0, 0, 0]
    for rank in (0, 2):
        name, text, seconds = results[rank]
        assert name == "PeerLost"
        assert "rank 1" in text
        assert seconds < SECONDS
