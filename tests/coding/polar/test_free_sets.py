"""The sets that come with the package."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch

from gradwire.coding.polar import free_positions, free_sets

SCRIPT = Path(__file__).resolve().parents[3] / "experiments" / "make_free_sets.py"


def test_every_code_of_the_grid_is_there() -> None:
    assert len(free_sets.grid()) == 110
    for n, k in free_sets.grid():
        free = free_sets.shipped(n, k)
        assert free is not None
        assert free.shape == (n,)
        assert int(free.sum()) == k
        assert bool(free[-1])
        assert torch.equal(free_positions(n, k), free)
    assert free_sets.shipped(64, 33) is None


@pytest.mark.slow
def test_the_file_is_what_the_script_makes() -> None:
    spec = importlib.util.spec_from_file_location("make_free_sets", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    for n, k in ((64, 32), (128, 115)):
        assert torch.equal(script.free_set(n, k), free_sets.shipped(n, k))


def test_another_file_is_refused(tmp_path, monkeypatch) -> None:
    with np.load(free_sets.FILE) as arrays:
        free = arrays["free"].copy()
    free[100] ^= 1
    np.savez(tmp_path / "free_sets.npz", version=np.array(free_sets.VERSION), free=free)
    monkeypatch.setattr(free_sets, "FILE", tmp_path / "free_sets.npz")
    free_sets._load.cache_clear()
    try:
        with pytest.raises(RuntimeError, match="not version 1 of the free sets"):
            free_sets.shipped(64, 32)
    finally:
        free_sets._load.cache_clear()
