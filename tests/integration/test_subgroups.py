"""Errors in a process group of some of the ranks name ranks of the whole job."""

import signal
from typing import Any

import pytest
import torch.distributed.fsdp as fsdp

from gradwire.core.errors import NonFiniteError, PeerLost, WireError
from gradwire.integration.communicator import _explain
from gradwire.runtime.process.engine import StuckError
from integration import subgroups_cases as cases
from integration.subgroups_cases import RANKS, SIZE
from runtime.process.launching import launch

SECONDS = 60.0  # on a loaded machine; alone it is less than one

needs_fsdp = pytest.mark.skipif(
    not hasattr(getattr(fsdp, "FSDPModule", None), "set_all_reduce_hook"),
    reason="this torch has no FSDPModule.set_all_reduce_hook (2.7 has)",
)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What rank 1 got."""
    folder = tmp_path_factory.mktemp("subgroups")
    codes, results = launch(folder, SIZE, f"{cases.__name__}:{cases.run.__name__}", 300)
    assert codes == [0, 0, 0, -signal.SIGKILL]
    return results[RANKS[0]]


@pytest.mark.parametrize("case", ["hook", "optimizer"])
def test_different_compressions(found, case):
    assert found[case]["kind"] == "DifferentSettingsError"
    text = found[case]["text"]
    assert "rank 1 has compression = ef(topk(0.1)), rank 3 ef(sign) (this is rank 1)" in text
    assert found[case]["seconds"] < SECONDS


def test_different_periods(found):
    text = found["local updates"]["text"]
    assert "rank 1 has period = 3, rank 3 5 (this is rank 1)" in text


def test_a_state_that_is_loaded_on_one_rank_only(found):
    text = found["loaded later"]["text"]
    assert "rank 1 has loaded 0 states" in text
    assert "rank 3 has loaded 1" in text


def test_nan_in_a_model(found):
    assert found["NaN"]["kind"] == "NonFiniteError"
    assert (
        "in the parameters of rank 3: nothing was averaged (this is rank 1)"
        in (found["NaN"]["text"])
    )


def test_a_killed_rank(found):
    _check_lost(found["killed"])


def _check_lost(error: dict[str, Any]) -> None:
    assert error["kind"] == "PeerLost"
    assert error["rank"] == 3
    assert error["text"].startswith("rank 3 is gone")
    assert "If rank 3 still runs, its own exchange has failed" in error["text"]
    assert any(note.startswith("rank 3: ") for note in error["notes"])
    assert error["seconds"] < SECONDS


def _run(folder: Any, case: Any) -> tuple[list[int], list[Any]]:
    return launch(folder, SIZE, f"{cases.__name__}:{case.__name__}", 300)


@needs_fsdp
def test_replicas_with_different_compressions(tmp_path):
    codes, results = _run(tmp_path, cases.replicas_differ)
    assert codes == [0] * SIZE
    for rank in RANKS:
        assert results[rank]["kind"] == "DifferentSettingsError"
        text = f"rank 1 has compression = ef(topk(0.1)), rank 3 ef(sign) (this is rank {rank})"
        assert text in results[rank]["text"]


@needs_fsdp
def test_a_killed_replica(tmp_path):
    codes, results = _run(tmp_path, cases.replica_killed)
    assert codes == [0, 0, 0, -signal.SIGKILL]
    _check_lost(results[1])  # which has the same shard


def test_ranks_in_texts():
    ranks = (4, 6)
    lost = PeerLost(1, 0.5, 0.5)
    lost.add_note("rank 1: it lost rank 0 of 2")
    assert _explain(lost, ranks) is lost
    assert lost.rank == 6
    assert str(lost).startswith("rank 6 is gone")
    assert lost.__notes__ == ["rank 6: it lost rank 4 of 2"]
    for kind in (StuckError, WireError, NonFiniteError):
        assert str(_explain(kind("rank 0 waits for rank 1"), ranks)) == "rank 4 waits for rank 6"
    own = KeyError("rank 0 of my matrix")
    own.add_note("in the program of rank 1 at 3 s")
    assert _explain(own, ranks).args == ("rank 0 of my matrix",)
    assert own.__notes__ == ["in the program of rank 6 at 3 s"]
