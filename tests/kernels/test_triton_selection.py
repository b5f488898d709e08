"""Selection in Triton beyond the cases of triton_cases/: samples that mislead, ties among many
candidates, velocities, rows, and what is noted of the results."""

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

    results = []
    for run in (kernels.select_largest_rows, _one_by_one):
        x, residual = inputs()
        left = torch.full((3, numel), torch.nan)
        rows = run(x, residual, 50, left)
        moved = residual.moved if feedback == "motion" else left
        results.append([*(part for row in rows for part in row), left, moved])
    assert all(map(same_bits, *results))


def _one_by_one(x, residual, count, out):
    chosen = []
    for r in range(len(x)):
        owed = residual[r] if isinstance(residual, torch.Tensor) else residual
        if isinstance(owed, kernels.Motion):
            owed = owed.with_vectors(owed.residual[r], owed.velocity[r], owed.moved[r])
        chosen.append(reference.select_largest(x[r], owed, count, out[r]))
    return chosen


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
