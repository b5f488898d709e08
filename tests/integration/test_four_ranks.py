"""Hook and optimizer on four ranks, where means take other routes than between two."""

from typing import Any

import pytest

from integration.four_ranks_cases import METHODS, SIZE, WIDTH
from integration.four_ranks_cases import run as run_cases
from runtime.process.launching import launch

USES = ("hook", "optimizer")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder = tmp_path_factory.mktemp("four")
    name = f"integration.four_ranks_cases:{run_cases.__name__}"
    codes, results = launch(folder, SIZE, name, 300)
    assert codes == [0] * SIZE
    return results


@pytest.mark.parametrize("text", METHODS)
@pytest.mark.parametrize("use", USES)
def test_replicas_stay_equal(ranks, use, text):
    assert all(result[text][use][0] for result in ranks)


@pytest.mark.parametrize("use", USES)
def test_identity_and_fp16_are_near_plain_ddp(ranks, use):
    for result in ranks:
        assert result["identity"][use][1] < 1e-6
        assert 0 < result["fp16"][use][1] < 1e-3


@pytest.mark.parametrize("use", USES)
def test_large_buckets_are_scattered(ranks, use):
    """Gathering sends the signs to three others, scattering 2 * 3/4 of them."""
    signs_nbytes = WIDTH**2 / 8
    for result in ranks:
        assert 1.5 * signs_nbytes < result["ef(sign)"][use][2] < 2.5 * signs_nbytes
