"""Selection from a velocity that moves: native against the reference, to the bit."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gradwire import kernels
from gradwire.kernels.native import selection as native
from gradwire.kernels.reference import selection as reference

NUMELS = [0, 1, 7, 511, 512, 513, 10_001]
LARGE = 2_200_000  # results beyond the caches, and a sample for the selection
RULES = pytest.mark.parametrize(
    "rule", [(0.9, 1.0, False, True), (0.9, 0.37, True, True), (0.5, 1.0, False, False)], ids=str
)


def vector(numel: int, seed: int) -> Tensor:
    """Half of it rounded, so that there are zeros of both signs and equal magnitudes."""
    x = torch.randn(numel, generator=torch.Generator().manual_seed(seed))
    x[: numel // 2] = x[: numel // 2].round()
    return x


def motion(numel: int, rule: tuple) -> kernels.Motion:
    moved = torch.full((numel,), torch.nan)
    return kernels.Motion(vector(numel, 1), vector(numel, 2), moved, *rule)


def same_bits(a: Tensor, b: Tensor) -> bool:
    if a.is_floating_point():
        a, b = a.contiguous().view(torch.int32), b.contiguous().view(torch.int32)
    return torch.equal(a, b)


def run(module, operation: str, numel: int, rule: tuple, *arguments) -> tuple[Tensor, ...]:
    """Positions, values, what is left, and the new velocity."""
    given, lost = motion(numel, rule), torch.full((numel,), torch.nan)
    found = getattr(module, operation)(vector(numel, 0), given, *arguments, lost)
    return (*found, lost, given.moved)


@pytest.mark.usefixtures("native")
@RULES
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    ("numel", "density"),
    [*((n, d) for n in NUMELS for d in (0.0, 0.01, 0.3, 1.0)), (LARGE, 0.01), (LARGE, 0.6)],
)
def test_the_largest_equal_the_reference(numel, density, rule, threads):
    count = round(density * numel)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        c = run(native, "select_largest", numel, rule, count)
    finally:
        torch.set_num_threads(before)
    assert all(map(same_bits, c, run(reference, "select_largest", numel, rule, count)))


@pytest.mark.usefixtures("native")
@RULES
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    ("numel", "threshold"), [*((n, t) for n in NUMELS for t in (0.0, 1.0, 1e9)), (LARGE, 3.0)]
)
def test_those_above_a_threshold_equal_the_reference(numel, threshold, rule, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        c = run(native, "select_above", numel, rule, threshold, 10)
    finally:
        torch.set_num_threads(before)
    assert all(map(same_bits, c, run(reference, "select_above", numel, rule, threshold, 10)))


def test_a_case_by_hand():
    residual, velocity = torch.tensor([0.0, 2.0, -1.0]), torch.tensor([2.0, 2.0, 4.0])
    given = kernels.Motion(residual, velocity, torch.empty(3), 0.5, 2.0, False, True)
    lost = torch.empty(3)
    x = torch.tensor([1.0, 0.5, -1.5])
    # u = (1 + 2, 1 + 1, 2 - 3), total = (3, 4, -2)
    indices, values = kernels.select_largest(x, given, 1, lost)
    assert (indices.tolist(), values.tolist()) == ([1], [4.0])
    assert (lost.tolist(), given.moved.tolist()) == ([3, 0, -2], [3, 0, -1])
    given.unmask(x, indices)
    assert given.moved.tolist() == [3, 2, -1]
    nesterov = replace(given, nesterov=True)  # steps 2 x + u / 2 = (3.5, 2, -3.5)
    assert nesterov.total(x).tolist() == [3.5, 4.0, -4.5]


def test_shards_share_the_memory_of_the_whole():
    whole = kernels.Motion(torch.ones(5), torch.ones(5), torch.zeros(5), 0.5, 1.0, False, True)
    lost = []
    for shard, x in zip(whole.shards(2), torch.ones(5).tensor_split(2)):
        lost.append(torch.empty(len(x)))
        kernels.select_largest(x, shard, 1, lost[-1])
    assert whole.moved.tolist() == [0, 1.5, 1.5, 0, 1.5]
    assert torch.cat(lost).tolist() == [0, 2.5, 2.5, 0, 2.5]


@pytest.mark.usefixtures("native")
def test_results_need_memory_of_their_own():
    given = motion(4, (0.9, 1.0, False, True))
    x, lost = torch.ones(4), torch.empty(4)
    for bad, out in (
        (given, None),
        (given, given.moved),
        (replace(given, moved=given.velocity), lost),
        (replace(given, moved=x), lost),
        (replace(given, moved=torch.empty(8)[::2]), lost),
        (replace(given, velocity=torch.ones(3)), lost),
    ):
        with pytest.raises(ValueError, match="select_largest"):
            kernels.select_largest(x, bad, 1, out)
