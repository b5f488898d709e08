"""Every rank gets a clear error within seconds, and nothing hangs."""

import signal
from pathlib import Path
from typing import Any

import pytest

from integration import failure_cases
from integration.failure_cases import SIZE
from runtime.process.launching import launch
from sampling import slow

SECONDS = 60.0  # on a loaded machine; alone it is less than one


def run(folder: Path, case: Any) -> tuple[list[int], list[Any]]:
    return launch(folder, SIZE, f"integration.failure_cases:{case.__name__}", 300)


def test_different_compressions(tmp_path):
    codes, results = run(tmp_path, failure_cases.different_compressions)
    assert codes == [0] * SIZE
    for rank, (name, text, seconds) in enumerate(results):
        assert name == "DifferentSettingsError"
        assert "rank 0 has compression = ef(topk(0.1)), rank 1 ef(sign)" in text
        assert f"this is rank {rank}" in text
        assert seconds < SECONDS


def test_different_models(tmp_path):
    codes, results = run(tmp_path, failure_cases.different_models)
    assert codes == [0] * SIZE
    for name, text, seconds in results:
        assert name == "DifferentSettingsError"
        assert "parameters" in text
        assert seconds < SECONDS


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (
            failure_cases.different_first_layers,
            "rank 0 has parameters = ['0.weight', [5, 4], 'torch.float32'], rank 2 ['0.weight', "
            "[5, 3], 'torch.float32']",
        ),
        (
            failure_cases.more_layers,
            "rank 0 has parameters = ['layer 1.weight', [4, 4], 'torch.float32'], rank 1 "
            "['layer 2.weight', [4, 4], 'torch.float32']",
        ),
        (
            failure_cases.another_order_of_hook,
            "rank 0 has parameters = ['a.weight', [12, 12], 'torch.float32'], rank 1 ['b.weight', "
            "[12, 12], 'torch.float32']",
        ),
        (
            failure_cases.another_order_of_optimizer,
            "rank 0 has parameters = ['a.weight', [12, 12], 'torch.float32'], rank 1 ['b.weight', "
            "[12, 12], 'torch.float32']",
        ),
        (failure_cases.different_operations, "rank 0 has op = average, rank 1 sum"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_different_hooks_and_optimizers(tmp_path, case, expected):
    codes, results = run(tmp_path, case)
    assert codes == [0] * SIZE
    for name, text, seconds in results:
        assert name == "DifferentSettingsError"
        assert expected in text
        assert seconds < SECONDS


def test_one_hook_for_two_models(tmp_path):
    codes, results = run(tmp_path, failure_cases.one_hook_for_two_models)
    assert codes == [0] * SIZE
    for name, text, seconds in results:
        assert name == "RuntimeError"
        assert "Call gradwire.ddp_comm_hook once for each" in text
        assert seconds < SECONDS


def test_models_of_different_length_are_not_broadcast(tmp_path):
    codes, results = run(tmp_path, failure_cases.fewer_parameters)
    assert codes == [0] * SIZE
    for name, text, _ in results:
        assert name == "ValueError"
        assert "rank 2 has 4 tensors, rank 0 has 6" in text


def test_a_killed_rank_is_named(tmp_path):
    codes, results = run(tmp_path, failure_cases.killed)
    assert codes == [0, 7, 0]
    for rank in (0, 2):
        name, text, seconds = results[rank]
        assert name == "PeerLost"
        assert "rank 1" in text
        assert seconds < SECONDS


@pytest.mark.parametrize(
    "case",
    [
        failure_cases.killed_before_all_reduces_of_optimizer,
        failure_cases.killed_within_all_reduces_of_hook,
        slow(failure_cases.killed_before_all_reduces_of_hook),
        slow(failure_cases.killed_within_all_reduces_of_optimizer),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_rank_killed_under_identity_is_named(tmp_path, case):
    """Means are gloo's own all-reduces then."""
    codes, results = run(tmp_path, case)
    assert codes == [0, -signal.SIGKILL, 0]
    for rank in (0, 2):
        name, text, seconds = results[rank]
        assert name == "PeerLost"
        assert "rank 1" in text
        assert seconds < SECONDS


@pytest.mark.parametrize("case", [failure_cases.raised])
def test_a_rank_that_raises_and_leaves_is_named(tmp_path, case):
    codes, results = run(tmp_path, case)
    assert codes == [0, 0, 0]
    for rank in (0, 2):
        name, text, seconds = results[rank]
        assert name == "PeerLost"
        assert "rank 1" in text
        assert seconds < SECONDS


def test_a_rank_whose_compressor_raises_lives_on(tmp_path):
    name = f"integration.failure_cases:{failure_cases.compressor_raises.__name__}"
    codes, (others, own) = launch(tmp_path, 2, name, 300)
    assert codes == [0, 0]
    for use in ("hook", "optimizer"):
        kind, text, seconds = own[use]
        assert kind == "ArithmeticError"
        assert text.startswith("something is wrong here")
        assert seconds < SECONDS
        kind, text, seconds = others[use]
        assert kind == "PeerLost"
        assert text.startswith("rank 1 is gone")
        assert "If rank 1 still runs, its own exchange has failed" in text
        assert "where a compressor raises: its output has the error" in text
        assert seconds < SECONDS
