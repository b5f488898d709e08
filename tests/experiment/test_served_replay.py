"""Runs with servers of which somebody was killed, replayed."""

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from experiment.served_at_work import Play, Stage, flags, nbytes_of
from gradwire.experiment.processes.replay import order_path, replay
from gradwire.runtime.storage.text import open_json, seal_json
from listing import live_glob
from sampling import slow

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    stage = Stage()
    yield stage
    stage.close()


def start(stage: Stage, folder: Path, steps: int, *more: str, **settings: Any) -> Play:
    usual = {"workers": 3, "synchronization": "ssp(3)", "steps": steps, "eval_every": steps}
    chosen = flags(**{**usual, **settings})
    out = ("--out", str(folder), "--record-order", *more)
    return stage.run("--engine", "process", *chosen, *out)


@pytest.mark.parametrize(
    "scheduling", ["wfbp", slow("priority(1000, credit=3000)"), slow("dear(1000)")]
)
def test_gradients_left_layer_by_layer(stage, tmp_path, scheduling):
    folder = tmp_path / "run"
    settings = {"synchronization": "asp", "scheduling": scheduling, "compression": "ef(topk(0.1))"}
    with start(stage, folder, 40, model="mlp((16, 8))", **settings) as play:
        code, said = play.end()
    assert code == 0, said
    replayed = replay(folder)
    assert replayed.is_equal, replayed.differs
    model = torch.load(folder / "model.pt", weights_only=True)["params"]
    assert torch.equal(replayed.run.params, model)
    assert '"reached"' in order_path(folder, 0).read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("at", "scheduling"), [("once", "sequential"), ("work", "sequential"), ("work", "wfbp")]
)
def test_a_worker_was_killed(stage, tmp_path, at, scheduling):
    folder = tmp_path / "run"
    least = 0 if at == "once" else 5000
    with start(stage, folder, 200, "--silence", "1s", scheduling=scheduling) as play:
        play.until(lambda: nbytes_of(order_path(folder, 1)) > least, "its order")
        os.kill(play.nodes()["worker 1"], signal.SIGKILL)
        code, said = play.end()
    assert code == 0, said
    summary = open_json(folder / "summary.json")
    assert [row["rank"] for row in summary["lost"]] == [1]
    replayed = replay(folder)
    assert replayed.is_equal, replayed.differs
    assert replayed.compared.startswith("every rank but the lost (1), ")
    model = torch.load(folder / "model.pt", weights_only=True)["params"]
    assert torch.equal(replayed.run.params, model)
    assert len(replayed.run.replicas) == 2
    for name in ("distance", "test_loss", "gradients", "dropped_steps", "noted"):
        assert replayed.run.summary[name] == summary[name], name
    row = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    assert replayed.run.metrics[-1]["train_loss"] == row["train_loss"]
    # Of who was lost nobody knows how many bytes it sent, of the others all are compared.
    for rank, differs in [(1, ()), (0, ("bytes that rank 0 sent",))]:
        summary["bytes_by_link"][rank][3] += 1
        (folder / "summary.json").write_text(seal_json(summary))
        assert replay(folder).differs == differs


@pytest.mark.slow
def test_a_server_that_went_on_from_a_state_has_no_order(stage, tmp_path):
    folder = tmp_path / "run"

    def has_state() -> bool:
        """Not the first one, before which it may have heard nothing."""
        states = live_glob(folder, "servers/4-*/state-*.pt")
        return any(int(path.stem.removeprefix("state-")) > 2 for path in states)

    often = ("--checkpoint-every", "100ms", "--restarts", "1")
    with start(stage, folder, 600, *often) as play:
        play.until(has_state, "a state")
        os.kill(play.nodes()["server 1"], signal.SIGKILL)
        code, said = play.end()
    assert code == 0, said
    with pytest.raises(
        ValueError, match=r"not complete: server 1 was started again, and continued"
    ):
        replay(folder)
