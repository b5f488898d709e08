"""Tests run on one thread: their networks are tiny and CI has two cores."""

import os
from pathlib import Path

import pytest
import torch
from hypothesis import settings

import sampling

pytest.register_assert_rewrite("gradwire.testing")

from gradwire.testing import quadratics  # noqa: E402, rewritten only if imported after

torch.set_num_threads(1)
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton
settings.register_profile("default", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("default")

os.environ["GRADWIRE_CACHE"] = ""  # what is tested is computed, and nothing is left behind

_SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"
if "GRADWIRE_DATA" not in os.environ and _SHARED.is_dir():
    os.environ["GRADWIRE_DATA"] = str(_SHARED)


@pytest.hookimpl(tryfirst=True)  # before `-m` looks at the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    sampling.mark_further_cases(items)


@pytest.fixture
def train() -> quadratics.Train:
    """Trains on quadratics: `train("ssp(2)", "parameter_server", workers=3, steps=20)`."""
    return quadratics.train


@pytest.fixture(autouse=True)
def _global_generator_is_left_alone():
    """No code of ours may draw from torch's global generator."""
    before = torch.get_rng_state()
    yield
    assert torch.equal(before, torch.get_rng_state()), "the global generator was used"
