"""Selection in Triton beyond the cases of triton_cases/: samples that mislead, ties among many
candidates, velocities, rows, and what is noted of the results."""

from functools import partial

import pytest
import torch

from gradwire import kernels
from gradwire.kernels.reference import gaps as reference_gaps
from gradwire.kernels.reference import selection as reference
from kernels.triton_cases import same_bits, vector

pytest.importorskip("triton", reason="Triton is not installed")

NUMEL = 9001


@pytest.fixture
def triton(monkeypatch):
    """The module, with one program for at most 1024 elements."""
    from gradwire.kernels.triton import _stages, selection

    monkeypatch.setattr(_stages, "FEW", 1024)
    monkeypatch.setenv("GRADWIRE_KERNELS", "triton")
    return selection


def misleading(of_sample, others):
    """A vector of one number where samples are taken, and of another elsewhere."""
    x = torch.full((NUMEL,), others)
    distance = NUMEL // (4096 // 8)
    for first in range(0, 512 * distance, distance):
        x[first : first + 8] = of_sample
    return x


@pytest.mark.parametrize(
    "x",
    [
        misleading(2.0, 1.0),  # too few reach the threshold
        misleading(1.0, 2.0),  # too many
        torch.zeros(NUMEL),
        torch.full((NUMEL,), torch.nan),
        torch.arange(NUMEL) // 7 % 3 - 1.0,
    ],
    ids=["few", "many", "zeros", "nan", "ties"],
)
@pytest.mark.parametrize("count", [900, NUMEL])
def test_any_vector(triton, x, count):
    left, expected_left = torch.full((2, NUMEL), torch.nan)
    found = triton.select_largest(x, None, count, left)
    expected = reference.select_largest(x, None, count, expected_left)
    assert all(map(same_bits, (*found, left), (*expected, expected_left)))


@pytest.mark.parametrize("operation", ["largest", "sampled"])
@pytest.mark.parametrize("equal", [1, 300, 2000])
def test_candidates_that_share_a_bin(triton, monkeypatch, operation, equal):
    """Of more than are listed the digits are counted; then the least is one of them."""
    calls = []
    monkeypatch.setattr(triton.stages, "_LISTED", 512)
    monkeypatch.setattr(
        triton.stages, "_keep_many", partial(counted, calls, triton.stages._keep_many)
    )
    x = vector(NUMEL)
    places = torch.randperm(NUMEL, generator=torch.Generator().manual_seed(1))
    x[places[:equal]] = 3.0
    x[places[:equal:2]] = -3.0
    left, expected_left = torch.full((2, NUMEL), torch.nan)
    if operation == "largest":
        arguments = (x, None, 900)
    else:
        arguments = (x, None, 3000, 400, 7, (1, 2, 3), 900)
    found = getattr(triton, f"select_{operation}")(*arguments, left)
    expected = getattr(reference, f"select_{operation}")(*arguments, expected_left)
    assert all(map(same_bits, (*found, left), (*expected, expected_left)))
    assert len(calls) == (equal == 2000)
    numel, measured = kernels.noted(found[0], "gaps")
    assert measured[:3] == reference_gaps.measure_gaps(found[0], numel)


@pytest.mark.parametrize("numel", [0, 1, 1000, NUMEL])
@pytest.mark.parametrize(
    "rule", [(0.9, 1.0, False, True), (0.9, 0.37, True, True), (0.5, 1.0, False, False)], ids=str
)
@pytest.mark.parametrize(
    ("operation", "arguments"),
    [("select_largest", lambda n: (n // 9,)), ("select_above", lambda n: (1.5, 10))],
    ids=["largest", "above"],
)
def test_velocity(triton, numel, rule, operation, arguments):
    results = []
    for module in (triton, reference):
        motion = kernels.Motion(
            vector(numel, 1), vector(numel, 2), torch.full((numel,), torch.nan), *rule
        )
        left = torch.full((numel,), torch.nan)
        run = getattr(module, operation)
        results.append([*run(vector(numel), motion, *arguments(numel), left), left, motion.moved])
    assert all(map(same_bits, *results))


@pytest.mark.parametrize("numel", [500, 5000])
@pytest.mark.parametrize("feedback", ["none", "residual", "motion"])
def test_rows_are_selections_of_their_own(triton, numel, feedback):
    assert_rows_are_apart(
        numel, feedback, kernels.select_largest_rows, reference.select_largest, 50
    )


@pytest.mark.parametrize("sample", [300, 2000])
@pytest.mark.parametrize("feedback", ["none", "residual", "motion"])
def test_sampled_rows_are_selections_of_their_own(triton, sample, feedback):
    keys = [(r, (4, 5, r)) for r in range(3)]

    def one(x, residual, size, rank, key, most, out):
        return reference.select_sampled(x, residual, size, rank, *key, most, out)

    run, numbers = kernels.select_sampled_rows, (sample, sample // 9)
    assert_rows_are_apart(5000, feedback, run, one, *numbers, keys, 500)


def test_sampled_rows_of_which_one_misleads(triton, monkeypatch):
    """What is sampled of one row is small, and next to nothing of another is above zero."""
    from gradwire.kernels.triton import selection_rows

    calls = []
    monkeypatch.setattr(
        selection_rows.stages, "collect", partial(counted, calls, selection_rows.stages.collect)
    )
    keys = [(r, (4, 5, r)) for r in range(3)]
    x = torch.stack([vector(NUMEL, r) for r in range(3)])
    x[1] = 5.0
    x[1, reference.strata_positions(NUMEL, 300, 1, (4, 5, 1), x.device)] = 1.0
    x[2] = 0.0
    x[2, 77] = 1.0
    found = kernels.select_sampled_rows(x, None, 300, 30, keys, NUMEL)
    assert len(calls) == 2, "with room for all of the second row"
    for row, key, one in zip(x, keys, found, strict=True):
        expected = reference.select_sampled(row, None, 300, 30, *key, NUMEL, None)
        assert all(map(same_bits, one, expected))


def counted(calls, function, *arguments):
    calls.append(arguments)
    return function(*arguments)


def assert_rows_are_apart(numel, feedback, together, alone, *arguments):
    """`together` selects of three rows as `alone` does of each; of lists each has an item."""

    def inputs():
        x, residual, velocity = (
            torch.stack([vector(numel, 3 * r + i) for r in range(3)]) for i in range(3)
        )
        if feedback == "none":
            return x, None
        if feedback == "residual":
            return x, residual
        moved = torch.full((3, numel), torch.nan)
        return x, kernels.Motion(residual, velocity, moved, 0.9, masks=True)

    def one_by_one(x, residual, *arguments):
        *arguments, out = arguments
        return [
            alone(
                x[r],
                kernels.row_of_residual(residual, r),
                *(each[r] if isinstance(each, list) else each for each in arguments),
                out[r],
            )
            for r in range(3)
        ]

    results = []
    for run in (together, one_by_one):
        x, residual = inputs()
        left = torch.full((3, numel), torch.nan)
        rows = run(x, residual, *arguments, left)
        moved = residual.moved if feedback == "motion" else left
        results.append([*(part for row in rows for part in row), left, moved])
    assert all(map(same_bits, *results))


@pytest.mark.parametrize("numel", [1000, NUMEL])
def test_notes_are_what_would_be_found_out(triton, numel):
    x = vector(numel)
    for indices, values in (
        triton.select_largest(x, None, 99, None),
        triton.select_above(x, None, 1.5, 10, None),
    ):
        universe, measured = kernels.noted(indices, "gaps")
        assert universe == numel
        assert measured[:3] == reference_gaps.measure_gaps(indices, numel)
        assert kernels.noted(values, "finite") is True
        values[0] = torch.nan
        assert kernels.noted(values, "finite") is None
    x[3] = torch.inf
    assert kernels.noted(triton.select_largest(x, None, 5, None)[1], "finite") is False
