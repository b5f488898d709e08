"""The sets that come with the package."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch

from gradwire.coding.polar import free_positions, frozen

SCRIPT = Path(__file__).resolve().parents[3] / "experiments" / "make_frozen_sets.py"


def test_every_code_of_the_grid_is_there() -> None:
    assert len(frozen.grid()) == 110
    for n, k in frozen.grid():
        free = frozen.shipped(n, k)
        assert free is not None
        assert free.shape == (n,)
        assert int(free.sum()) == k
        assert bool(free[-1])
        assert torch.equal(free_positions(n, k), free)
    assert frozen.shipped(64, 33) is None


def test_the_file_is_what_the_script_makes() -> None:
    spec = importlib.util.spec_from_file_location("make_frozen_sets", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    for n, k in ((64, 32), (128, 115)):
        assert torch.equal(script.free_set(n, k), frozen.shipped(n, k))


def test_another_file_is_refused(tmp_path, monkeypatch) -> None:
    with np.load(frozen.FILE) as arrays:
        free = arrays["free"].copy()
    free[100] ^= 1
    np.savez(tmp_path / "frozen.npz", version=np.array(frozen.VERSION), free=free)
    monkeypatch.setattr(frozen, "FILE", tmp_path / "frozen.npz")
    frozen._load.cache_clear()
    try:
        with pytest.raises(RuntimeError, match="not version 1 of the frozen sets"):
            frozen.shipped(64, 32)
    finally:
        frozen._load.cache_clear()
