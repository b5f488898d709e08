"""Members that are broken or hostile, in training on real processes over ZeroMQ.

They have joined, with all rights: what they send is well-formed to the transport. Strangers, and
members that lie to the transport, are in zeromq/test_hostile.py; the same servers on the simulator
in synchronization/test_server.py.
"""

from typing import Any

import pytest

from runtime.process.hostile_cases import CASES, HOSTILE, NUM_SERVERS, REPEATS, SERVER
from runtime.process.launching import launch

SIZE = 2 + NUM_SERVERS + 1


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder = tmp_path_factory.mktemp("hostile")
    codes, results = launch(folder, SIZE, "runtime.process.hostile_cases:run")
    assert codes == [0] * SIZE  # nobody's process ended, nor hung
    return results


def test_nonsense_changes_nothing_for_the_others(results: list[Any]) -> None:
    """Every push that makes no sense is refused and answered, and the model has the bits that it
    would have without."""
    for honest, hostile, server, other, scheduler in zip(*(one["nonsense"] for one in results)):
        assert honest == {"is_expected": True, "is_finite": True, "warnings": []}
        num_sent, num_told = hostile["counts"]
        assert num_sent == num_told > 12 * 20 + 4 * REPEATS
        assert server["is_expected"]
        assert server["refused"] == {str(HOSTILE): num_sent}
        (warning,) = server["warnings"]  # however often
        assert f"rank {HOSTILE} pushed" in warning
        assert server["members"] == [0, 1]
        assert server["kept"] == [0, 0, 0]
        assert other["is_expected"]
        assert not other["refused"]
        assert not other["warnings"] + scheduler["warnings"]
    assert len(results[0]["nonsense"]) == len(CASES)


def test_what_is_out_of_turn_or_for_nobody_is_not_kept(results: list[Any]) -> None:
    honest, hostile, *servers, scheduler = (one["rude"] for one in results)
    assert honest == {"is_expected": True, "warnings": []}
    for number, server in enumerate(servers):
        text = f"rank {HOSTILE} asks server {number} for something while it waits for an answer"
        assert text in hostile["said"]
        assert server["refused"] == {str(HOSTILE): REPEATS}
        assert server["warnings"][0].startswith(text)
        # A server with something unread would never save its state, and its workers would have to
        # keep all that they sent.
        assert server["unread"] == [0, 0]
        assert server["is_at_rest"]
    first, second = servers
    assert hostile["told"] == first["malformed"] == REPEATS  # headers that nobody knows
    assert first["dropped"] == {str(HOSTILE): 2 * REPEATS}
    assert first["warnings"][1:] == [
        f"rank {HOSTILE} sent rank {SERVER} a message that no program reads; it was dropped, and "
        "so are others"
    ]
    assert not second["dropped"]
    assert len(second["warnings"]) == 1
    assert not scheduler["warnings"]


def test_orders_that_have_no_place_in_the_job_leave_nothing_behind(results: list[Any]) -> None:
    honest, hostile, *servers, _ = (one["ordered"] for one in results)
    assert hostile["num_told"] == 12 * (REPEATS + 6)
    start = f"an order of rank {HOSTILE} is refused: "
    for why in (
        f"an exchange among ({HOSTILE},)",
        "a job on a tensor [268435456] torch.float32",
        "'tensor 7' is no tensor that this job exchanges",
        "a message of 4194304 bytes for 'model'",
    ):
        assert any(text.startswith(start + why) for text in hostile["told"]), (why, hostile["told"])
    for worker in (honest, hostile):  # who was refused trains as if it had not asked
        assert worker["is_expected"]
        assert worker["unread"] == [0, 0]
    for server, numel in zip(servers, (11, 10)):  # 21 elements in two shards
        assert server["open"] == [0, 0]
        assert server["kept"] == [["model", 8 * numel]]


def test_workers_end_with_a_word_if_a_server_answers_nonsense(results: list[Any]) -> None:
    for result in results[:SERVER]:
        assert len(result["betrayed"]) == 22
        for what, error in result["betrayed"].items():
            assert error.startswith("WireError: server 0 answered"), (what, error)
