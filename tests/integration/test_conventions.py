"""Scripts in the conventions of Horovod and BytePS, and every operation that these have."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gradwire
from integration.convention_cases import RESUMED, SIZE
from integration.convention_cases import run as run_cases
from integration.test_examples import run
from runtime.process.launching import launch

HERE = Path(__file__).parent


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        ("horovod_style.py", []),
        ("horovod_style.py", ["--fp16-allreduce", "--gradient-predivide-factor", "2"]),
        ("horovod_style.py", ["--batches-per-allreduce", "3", "--base-lr", "0.02"]),
        ("byteps_style.py", []),
        ("byteps_style.py", ["--fp16-pushpull"]),
    ],
)
def test_scripts_run_with_the_import_changed(script, arguments, tmp_path):
    printed = run(HERE / script, SIZE, tmp_path, arguments)
    accuracies = [float(found) for found in re.findall(r"accuracy ([\d.]+)%", printed)]
    assert len(accuracies) == 4  # of one rank, after every epoch
    assert accuracies[-1] > 80
    if script == "horovod_style.py":
        assert "replicas equal: True" in printed
    else:
        assert "360 images" in printed


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder = tmp_path_factory.mktemp("conventions")
    codes, results = launch(folder, SIZE, f"integration.convention_cases:{run_cases.__name__}", 300)
    assert codes == [0] * SIZE
    return results


def test_reductions(ranks):
    for result in ranks:
        assert result["reductions"] == {
            "default": [1.5, 10.0],
            "average=False": [3.0, 20.0],
            "op=Sum": [3.0, 20.0],
            "scaled": [18.0, 120.0],
            "integers": [1, 2],
            "own": [1.5, 10.0],
            "fp16": ["torch.float32", True],
            "push_pull": [1.5, 10.0],
            "push_pull sum": [3.0, 20.0],
            "untouched": True,
        }
        assert result["in place"] == [True, 0.5, True, 1.0]


def test_handles(ranks):
    for result in ranks:
        assert result["handles"] == [[0.5, 1.0, 0.5, 2.0], 0.5, True, True, 1.0]


def test_gathers_and_broadcasts(ranks):
    for result in ranks:
        assert result["gathered"] == [[0.0, 0.0], [1.0, 1.0], [1.0, 1.0]]
        assert result["broadcast"] == [1.0, True, 1.0, 1.0]
        assert result["models"]
        assert result["object"] == [3, [0.5, None], [0, 1, 2]]


def test_sums_of_gradients(ranks):
    assert all(result["sum"] == [True, True, True] for result in ranks)


@pytest.mark.parametrize("text", RESUMED)
def test_checkpoints_of_rank_0_alone(ranks, text):
    """All begin without what compression keeps, and in the same step."""
    for rank, result in enumerate(ranks):
        is_equal, warned, step = result["resumed"][text]
        assert is_equal
        assert warned == (rank == 0 and text != "fp16")  # which keeps nothing
        assert step == 6


def test_what_is_not_offered_says_what_is(ranks):
    for result in ranks:
        refused = result["refused"]
        assert "take Average" in refused["adasum"]
        assert "give op or average, not both" in refused["both"]
        assert "op is Average or Sum, got 'max'" in refused["unknown"]
        assert "Compression.fp16" in refused["compression"]
        assert "a tensor without any" in refused["scalar"]
        assert "neither a tensor nor a plain value" in refused["object"]  # on all ranks


def test_places(ranks):
    assert [result["places"][2:] for result in ranks] == [[0, 1]] * SIZE


def _optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"op": gradwire.Adasum}, "op=Adasum is not offered: take Average"),
        ({"op": "max"}, "op is Average or Sum, got 'max'"),
        ({"gradient_predivide_factor": 0.0}, "is positive"),
        ({"gradient_predivide_factor": 2.0, "op": gradwire.Sum}, "for op=Average"),
    ],
)
def test_reductions_of_gradients_that_are_refused(options, match):
    with pytest.raises(ValueError, match=match):
        gradwire.DistributedOptimizer(_optimizer(), **options)


def test_before_init_it_says_what_to_call():
    for function in (gradwire.rank, gradwire.size, gradwire.barrier):
        with pytest.raises(RuntimeError, match=r"call gradwire.init\(\) first"):
            function()
    assert not gradwire.is_initialized()


def test_names_of_horovod_that_tell_what_is_there():
    assert gradwire.gloo_built()
    assert not gradwire.mpi_built()
    assert not gradwire.mpi_threads_supported()
    assert gradwire.nccl_built() in (True, False)
    assert gradwire.SyncBatchNorm is nn.SyncBatchNorm
