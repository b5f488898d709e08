"""Experiments on real processes that recorded their order, and `gradwire run --replay`."""

import json
import shutil
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from experiment.replay_ranks import SIZE
from gradwire.cli import main
from gradwire.core.errors import GradwireWarning
from gradwire.experiment.processes.replay import digest_of, make_recorder, order_path, replay
from gradwire.experiment.run.config import Config
from gradwire.experiment.run.record import read_config, write_config
from gradwire.experiment.run.setup import prepare
from gradwire.runtime.replay.order import OrderError, load
from gradwire.runtime.storage.text import LineSeal, open_json, seal_json
from runtime.process.launching import launch

NAMES = ["gossip", "delayed", "overlapped", "resumed"]


def sealed(*lines: str) -> str:
    seal = LineSeal()
    return "".join(map(seal.seal, lines))


def opened(line: str) -> str:
    return line.rpartition("\t")[0]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    folder = tmp_path_factory.mktemp("recorded")
    codes, results = launch(folder, SIZE, "experiment.replay_ranks:run", 180)
    assert codes == [0] * SIZE
    return folder, results


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(NAMES)), ids=NAMES)
def test_a_replay_ends_in_the_same_bits(number: int, ran: tuple[Path, list[Any]]) -> None:
    folder, results = ran[0] / NAMES[number], ran[1]
    replayed = replay(folder)
    assert replayed.differs == ()
    assert replayed.is_equal
    assert replayed.run.accuracy == results[0][number]
    model = torch.load(folder / "model.pt", weights_only=True)
    assert torch.equal(model["params"], replayed.run.params)
    summary = json.loads((folder / "summary.json").read_text())
    assert replayed.run.bytes_sent == summary["bytes_sent"]
    assert replayed.run.summary["noted"] == summary["noted"]


def test_a_resumed_run_has_one_order(ran: tuple[Path, list[Any]]) -> None:
    steps = [run.steps for run in load(order_path(ran[0] / "resumed", 0)).runs]
    assert steps[0][0] == 0
    assert steps[-1][1] == 12
    assert all(before[1] == after[0] for before, after in pairwise(steps))


def test_the_command(
    ran: tuple[Path, list[Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["run", "--replay", str(ran[0] / "gossip")])
    said = " ".join(capsys.readouterr().out.split())
    assert "as it was yes: every rank, bit by bit, and the bytes on every link" in said
    other = tmp_path / "other"
    shutil.copytree(ran[0] / "gossip", other)
    path = order_path(other, 1)
    *lines, result = path.read_text().splitlines()
    assert "result" in result
    path.write_text(sealed(*map(opened, lines), '["result","something else"]'))
    with pytest.raises(SystemExit) as left:
        main(["run", "--replay", str(other)])
    assert left.value.code == 1
    assert "no: rank 1" in capsys.readouterr().out


@pytest.fixture
def copied(ran: tuple[Path, list[Any]], tmp_path: Path) -> Path:
    return Path(shutil.copytree(ran[0] / "gossip", tmp_path / "copied"))


def test_what_cannot_be_replayed(copied: Path) -> None:
    config = copied / "config.toml"
    text = config.read_text()
    write_config(config, replace(read_config(config), seed=1))
    with pytest.raises(OrderError, match="another configuration: seed = 0 there, seed = 1 here"):
        replay(copied)
    config.write_text(text)
    path = order_path(copied, 2)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-2]))
    with pytest.raises(OrderError, match="ends in the middle of a run"):
        replay(copied)
    path.write_text("".join(lines[:3] + lines[4:]))
    with pytest.raises(OrderError, match=r"order-2\.jsonl, line 4: .* is damaged"):
        replay(copied)
    path.unlink()
    with pytest.raises(OrderError, match="cannot be read"):
        replay(copied)
    order_path(copied, 0).unlink()
    with pytest.raises(ValueError, match="holds no recorded order"):
        replay(copied)
    (copied / "summary.json").write_text('{"stopped": "somebody left"}')
    with pytest.raises(ValueError, match=r"summary\.json has no checksum"):
        replay(copied)
    (copied / "summary.json").write_text(seal_json({"stopped": "somebody left"}))
    with pytest.raises(ValueError, match=r"stopped before its end.*: somebody left"):
        replay(copied)
    (copied / "summary.json").unlink()
    with pytest.raises(ValueError, match="has not come to its end"):
        replay(copied)


def test_an_order_that_is_not_complete_is_no_longer_recorded(copied: Path) -> None:
    experiment = prepare(Config.from_toml(copied / "config.toml"))
    with pytest.warns(GradwireWarning, match="no longer recorded: .* up to step 0, not 7"):
        assert make_recorder(copied, experiment, 0, 7) is None
    # The first reason is the one that counts.
    with pytest.warns(GradwireWarning, match="up to step 0, not 7"):
        assert make_recorder(copied, experiment, 0, 9) is None
    with pytest.raises(ValueError, match=r"not complete: .* up to step 0, not 7"):
        replay(copied)


def test_a_server_that_begins_with_a_state_has_no_order(copied: Path) -> None:
    config = Config.from_toml(copied / "config.toml")
    experiment = prepare(replace(config, architecture="parameter_server(2)"))
    with pytest.warns(GradwireWarning, match="no longer recorded: server 1 was started again"):
        assert make_recorder(copied, experiment, SIZE + 1, 0, is_in_segment=True) is None


def test_a_run_that_goes_on_from_what_servers_had_is_not_replayed(copied: Path) -> None:
    path = copied / "summary.json"
    path.write_text(seal_json({**open_json(path), "resumed_from_servers": True}))
    with pytest.raises(ValueError, match="the state of the servers of another job"):
        replay(copied)


def test_a_simulated_run_has_no_order() -> None:
    with pytest.raises(ValueError, match="record_order is for real processes"):
        Config(record_order=True)


def test_digests() -> None:
    @dataclass
    class Pair:
        a: Any
        b: Any

    x = torch.arange(3.0)
    states = [
        None,
        0,
        False,
        0.0,
        "0",
        x,
        x.double(),
        x.view(1, 3),
        torch.empty(0),
        torch.tensor(1.0),
        {"x": x},
        {"y": x},
        [x, x],
        [[x], x],
        Pair(1, 2),
        Pair(2, 1),
        {1, 2},
    ]
    assert len({digest_of(state) for state in states}) == len(states)
    assert digest_of({"a": x, "b": [1, {3, 4}]}) == digest_of({"b": (1, {4, 3}), "a": x.clone()})
    assert digest_of(torch.ones(2, 3).T) == digest_of(torch.ones(3, 2))
    with pytest.raises(TypeError, match="does not hold object"):
        digest_of(object())
