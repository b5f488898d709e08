"""Models that servers hold for users' loops: what workers describe is not trusted."""

import json
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from gradwire.core.errors import WireError
from gradwire.core.node import Framed, Node
from gradwire.core.wire import Failed
from gradwire.experiment.processes.loops.job import LoopJob, complete, job_of_worker
from gradwire.experiment.processes.loops.models import _read, plan_of

GOOD: dict[str, Any] = {
    "label": "1/",
    "compression": "ef(sign)",
    "synchronization": "ssp(3)",
    "architecture": "parameter_server(2)",
    "scheduling": "sequential",
    "tensors": [["weight", 0, 12, [3, 4]], ["bias", 12, 15, [3]]],
    "dtype": "torch.float32",
    "seed": 0,
    "steps_per_epoch": None,
    "step": 0,
}


def read(row: Any, rank: int = 0) -> Any:
    message = torch.frombuffer(bytearray(json.dumps(row).encode()), dtype=torch.uint8)
    return _read(rank, message, Node(2, 2), 2)


def test_a_description_is_read() -> None:
    label, plan = read(GOOD)
    assert label == "1/"
    assert plan.ability == "push_pull"
    assert [shard.numel for shard in plan.shards()] == [8, 7]
    assert plan.lr(10**6) == 1.0


@pytest.mark.parametrize(
    "change",
    [
        {"compression": "no_such(1)"},
        {"compression": "powersgd(1)"},
        {"synchronization": "bsp"},
        {"architecture": "parameter_server(3)"},
        {"architecture": "allreduce"},
        {"tensors": []},
        {"tensors": [["weight", 0, 12, [3, 4]], ["bias", 13, 16, [3]]]},
        {"tensors": [["weight", 0, 12, [3, 5]]]},
        {"tensors": [["weight", 0, 12, [-3, -4]]]},
        {"tensors": [["weight", 0, 12, ["3", 4]]]},
        {"tensors": [["weight", "0", 12, [3, 4]]]},
        {"tensors": 3},
        {"dtype": "torch.int8"},
        {"dtype": "torch.nn"},
        {"dtype": 3},
        {"label": 3},
        {"seed": "x"},
        {"steps_per_epoch": "x"},
        {"step": [1]},
    ],
    ids=str,
)
def test_other_descriptions_are_refused(change: Mapping[str, Any]) -> None:
    with pytest.raises(WireError):
        read({**GOOD, **change})


@pytest.mark.parametrize("row", [[], None, "x", 3, {}, {"label": "1/"}], ids=str)
def test_what_is_no_description_is_refused(row: Any) -> None:
    with pytest.raises(WireError):
        read(row)


def test_only_rank_0_describes_and_by_bytes() -> None:
    with pytest.raises(WireError, match="rank 1"):
        read(GOOD, rank=1)
    for message in (torch.zeros(3), Framed(Failed("wire", "x")), None):
        with pytest.raises(WireError):
            _read(0, message, Node(2, 2), 2)
    with pytest.raises(WireError):
        _read(0, torch.full((9,), 255, dtype=torch.uint8), Node(2, 2), 2)


def test_a_plan_that_continues_draws_otherwise() -> None:
    first, second = plan_of(GOOD, 2), plan_of({**GOOD, "step": 5}, 2)
    assert first.key != second.key


def test_workers_learn_their_job_from_the_environment() -> None:
    job = LoopJob(3, 2, "tcp://10.0.0.1:1234", insecure=True)
    variables: dict[str, str] = {}
    complete(variables, job, 1)
    assert job_of_worker(variables, 2) == (job, 1)
    assert (variables["RANK"], variables["WORLD_SIZE"]) == ("1", "3")
    assert (variables["MASTER_ADDR"], variables["MASTER_PORT"]) == ("10.0.0.1", "1235")
    chosen = {"MASTER_ADDR": "node7", "MASTER_PORT": "29500"}
    complete(chosen, job, 1)
    assert (chosen["MASTER_ADDR"], chosen["MASTER_PORT"]) == ("node7", "29500")
    assert "TORCHELASTIC_USE_AGENT_STORE" not in chosen


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"DMLC_WORKER_ID": ""}, "DMLC_WORKER_ID not set"),
        ({"DMLC_WORKER_ID": "3"}, "there are 3 workers"),
        ({"DMLC_NUM_SERVER": "two"}, "DMLC_NUM_SERVER must be a number"),
        ({"DMLC_NUM_WORKER": "0"}, "workers must be at least 1"),
    ],
    ids=str,
)
def test_wrong_variables(change: Mapping[str, str], expected: str) -> None:
    variables: dict[str, str] = {}
    complete(variables, LoopJob(3, 2, "tcp://127.0.0.1:1234"), 1)
    with pytest.raises((RuntimeError, ValueError), match=expected):
        job_of_worker({**variables, **change}, 2)
