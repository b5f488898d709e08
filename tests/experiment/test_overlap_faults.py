"""Real processes in the middle of an overlapped step: killed, interrupted, failing, resumed."""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import gradwire
from experiment.overlap_faults import STEP
from experiment.processes_at_work import is_saved
from experiment.served_at_work import SETTINGS, Play, Stage, flags
from gradwire.runtime.storage.text import open_json
from sampling import slow

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc"),
    pytest.mark.filterwarnings("ignore:.*momentum multiplies what feedback holds back"),
]

# They cut the first tensor and merge the small ones. Of `priority` and `dear` pieces of the model
# are under way between two steps.
WFBP, FUSION, PRIORITY, DEAR = (
    "wfbp",
    "fusion(2000, first=500)",
    "priority(1000, credit=3000)",
    "dear(1000)",
)
EVAL_EVERY = 3
SAVED = STEP - STEP % EVAL_EVERY  # the last checkpoint before the fault
COMMON: dict[str, Any] = {
    "model": "mlp((16, 8))",
    "workers": 3,
    "steps": 15,
    "eval_every": EVAL_EVERY,
    "compression": "ef(topk(0.1))",
    "optimizer": "sgd(0.05, momentum=0.9)",
    "momentum_at": "after",
}
SERVERS = "parameter_server(2)"
# Why the others stop if rank 1 fails: it says so, to all of them.
LEFT = re.compile(r"1 was lost \((it was told to stop, or failed|\w+ \d reports it, and left)")


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    stage = Stage()
    yield stage
    stage.close()


def start(stage: Stage, folder: Path, fault: str, *more: str, **settings: Any) -> Play:
    is_native = settings.pop("native", False)
    chosen = flags(**{**COMMON, "architecture": "allreduce", **settings})
    given = ("--engine", "process", *chosen, "--out", str(folder), *more)
    given += ("--native",) * is_native
    return stage.run(*given, before=f"experiment.overlap_faults:{fault}")


def check_resumed(stage: Stage, folder: Path, **settings: Any) -> None:
    """It is resumed from the checkpoint, and ends in the bits of a run without interruption."""
    with stage.run("--resume", str(folder)) as play:
        code, said = play.end()
    assert code == 0, said
    chosen = {**SETTINGS, **COMMON, "architecture": "allreduce", **settings}
    whole = gradwire.simulate(**chosen, compute="fixed(0.001)")
    assert is_saved(folder, whole.params)
    found = json.loads((folder / "summary.json").read_text())
    assert found["bytes_by_link"] == whole.summary["bytes_by_link"]
    assert len(found["resumed"]) == 1


ALL_REDUCE = [(schedule, {}) for schedule in (WFBP, DEAR, FUSION, PRIORITY)]
SERVED = [slow(schedule, {"architecture": SERVERS}) for schedule in (WFBP, FUSION, PRIORITY, DEAR)]
NATIVE = [slow(schedule, {"native": True, "compression": "identity"}) for schedule in (WFBP, DEAR)]


@pytest.mark.parametrize(
    ("scheduling", "more"), [*ALL_REDUCE[:2], *(slow(*case) for case in ALL_REDUCE[2:]), *SERVED]
)
def test_a_rank_that_is_killed_is_named_and_the_run_can_be_resumed(
    stage, tmp_path, scheduling, more
):
    folder, settings = tmp_path / "run", {"scheduling": scheduling, **more}
    limits = ("--silence", "1s") if more else ()
    with start(stage, folder, "kill", *limits, **settings) as play:
        code, said = play.end()
    assert code == 3, said
    name = "worker 1" if more else "rank 1"
    *_, error, cause = said.splitlines()
    assert f"{name} was lost (" in error
    assert f"Resume from step {SAVED}: gradwire run --resume {folder}" in error
    assert cause == f"{name} was killed by SIGKILL"
    assert "Traceback" not in said
    assert f"{name} was lost (" in open_json(folder / "summary.json")["stopped"]
    check_resumed(stage, folder, **settings)


@pytest.mark.parametrize(
    ("scheduling", "more"), [*ALL_REDUCE[3:], *(slow(*case) for case in ALL_REDUCE[:3]), *SERVED]
)
def test_ctrl_c_leaves_a_checkpoint(stage, tmp_path, scheduling, more):
    """Also where pieces of the model are under way: the segment ends when all have arrived."""
    folder, settings = tmp_path / "run", {"scheduling": scheduling, **more}
    with start(stage, folder, "interrupt", **settings) as play:
        code, said = play.end()
    assert code == 130, said
    assert f"stopped by SIGINT. Resume from step {SAVED + EVAL_EVERY}: gradwire run" in said
    assert "Traceback" not in said
    check_resumed(stage, folder, **settings)


@pytest.mark.parametrize(
    ("scheduling", "more"),
    [(WFBP, {}), slow(PRIORITY, {}), slow(FUSION, {}), slow(DEAR, {}), *NATIVE, *SERVED],
)
def test_a_gradient_that_is_not_finite_stops_all(stage, tmp_path, scheduling, more):
    folder = tmp_path / "run"
    with start(stage, folder, "spoil", scheduling=scheduling, **more) as play:
        code, said = play.end()
    assert code == 2, said
    assert f"error: nan in the gradient of {SPOILT[scheduling]} on rank 1 in step {STEP}." in said
    assert 'with scheduling "sequential"' in said
    assert "Traceback" not in said
    assert LEFT.search(open_json(folder / "summary.json")["stopped"])


@pytest.mark.slow
@pytest.mark.parametrize(("scheduling", "more"), [*ALL_REDUCE, *NATIVE])
def test_a_second_ctrl_c_ends_a_rank_at_once(stage, tmp_path, scheduling, more):
    folder, settings = tmp_path / "run", {"scheduling": scheduling, **more}
    with start(stage, folder, "interrupt_twice", **settings) as play:
        code, said = play.end()
    assert code == 130, said
    assert "stopped by SIGINT" in said
    assert "Traceback" not in said
    if not more:
        check_resumed(stage, folder, **settings)


# The tensor with the last value of the bucket in the middle.
SPOILT = {WFBP: "3.bias", FUSION: "3.weight", PRIORITY: "1.weight", DEAR: "5.bias"}


@pytest.mark.parametrize(
    ("scheduling", "more"),
    [(DEAR, {}), slow(WFBP, {}), slow(FUSION, {}), slow(PRIORITY, {}), *NATIVE, *SERVED],
)
def test_a_program_that_fails_within_a_backward_pass_stops_all(stage, tmp_path, scheduling, more):
    folder = tmp_path / "run"
    with start(stage, folder, "fail", scheduling=scheduling, **more) as play:
        code, said = play.end()
    assert code == 1, said
    assert said.count("ArithmeticError: the program of a bucket failed") == 1
    assert LEFT.search(open_json(folder / "summary.json")["stopped"])


@pytest.mark.slow
@pytest.mark.parametrize("scheduling", [WFBP, DEAR])
def test_a_rank_that_is_killed_between_native_means_is_named(stage, tmp_path, scheduling):
    folder, settings = tmp_path / "run", {"scheduling": scheduling, "compression": "identity"}
    with start(stage, folder, "kill", "--native", **settings) as play:
        code, said = play.end()
    assert code == 3, said
    assert "rank 1 was lost (" in said
    assert "Traceback" not in said
    with stage.run("--resume", str(folder)) as play:
        code, said = play.end()
    assert code == 0, said
    assert "native" in (folder / "config.toml").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("scheduling", [WFBP, PRIORITY])
def test_servers_go_on_without_a_worker_that_was_killed_in_a_step(stage, tmp_path, scheduling):
    folder = tmp_path / "run"
    settings = {"synchronization": "asp", "architecture": SERVERS, "optimizer": "sgd(0.05)"}
    limits = ("--silence", "1s")
    with start(stage, folder, "kill", *limits, scheduling=scheduling, **settings) as play:
        code, said = play.end()
    assert code == 0, said
    assert "worker 1 was lost after" in said
    assert "Traceback" not in said
    found = json.loads((folder / "summary.json").read_text())
    assert [row["rank"] for row in found["lost"]] == [1]
    # Two workers did all steps; of the third servers had all pushes before the fault, and none of
    # which a part is missing.
    assert found["gradients"] == 2 * COMMON["steps"] + STEP
    assert torch.isfinite(torch.load(folder / "model.pt", weights_only=True)["params"]).all()
