"""Every codec and reducer trains in a user's loop, and replicas stay equal bit for bit."""

from pathlib import Path

import pytest

from integration import every_method, golden
from integration.every_method import SIZE, methods
from runtime.process.launching import launch

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[bool]]]:
    folder = tmp_path_factory.mktemp("methods")
    codes, results = launch(
        folder, SIZE, f"integration.every_method:{every_method.run.__name__}", 900
    )
    assert codes == [0] * SIZE
    return results


@pytest.fixture(scope="module")
def trajectories(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[float]]]:
    folder = tmp_path_factory.mktemp("trajectories")
    name = f"integration.every_method:{every_method.run_golden.__name__}"
    codes, results = launch(folder, golden.SIZE, name, 900)
    assert codes == [0] * golden.SIZE
    return results


@pytest.mark.parametrize("text", methods())
def test_trajectories_are_those_of_the_simulator(trajectories, text):
    for result in trajectories:
        difference, is_same = result[text]
        assert difference < 1e-6
        assert is_same


@pytest.mark.parametrize("text", methods())
def test_replicas_stay_equal(results, text):
    for result in results:
        assert result[text] == [True, True]


def test_powersgd_with_many_buckets_twenty_times(tmp_path: Path):
    name = every_method.run_powersgd.__name__
    codes, results = launch(tmp_path, SIZE, f"integration.every_method:{name}", 600)
    assert codes == [0] * SIZE
    assert results == [[True] * 20] * SIZE


def test_compiled_modules(tmp_path: Path):
    name = every_method.run_compiled.__name__
    codes, results = launch(tmp_path, SIZE, f"integration.every_method:{name}", 600)
    assert codes == [0] * SIZE
    assert results == [0.0] * SIZE
