"""Real processes and real signals."""

from pathlib import Path

from runtime.process.launching import launch
from runtime.process.zeromq import cases


def test_killed_suspended_and_begun_again(tmp_path: Path) -> None:
    codes, results = launch(tmp_path, 4, "runtime.process.zeromq.cases:run", 90)
    assert codes == [0, 0, 0, 0]

    killed = [result["killed"] for result in results]
    assert killed[1]["code"] == -9
    for rank in (0, 2, 3):
        assert (killed[rank]["lost"], killed[rank]["joined"]) == (1, 1)
        assert killed[rank]["after_s"] < 2 * cases.HEARTBEAT_S
        assert killed[rank]["incarnation"] == killed[1]["incarnation"] > 0

    suspended = [result["suspended"] for result in results]
    assert [suspended[rank] for rank in (0, 2, 3)] == [1, 1, 1]
    assert "rank 1 is not in the job any more" in suspended[1]

    again = [result["begun_again"] for result in results]
    assert again[2]["codes"] == [-9, -9]
    assert again[2]["incarnations"][0] > 0
    for rank in (0, 1):
        assert again[rank]["total"] == again[rank]["expected"]
