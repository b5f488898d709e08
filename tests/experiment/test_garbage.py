"""A run leaves the garbage collector as it was."""

import gc
import weakref

import pytest

import gradwire
from gradwire.experiment.simulate.garbage import OldObjectsLeftAlone

SETTINGS = {
    "workers": 2,
    "steps": 4,
    "eval_every": 2,
    "model": "mlp((4,))",
    "compute": "fixed(0.01)",
}


def test_objects_are_frozen_during_a_run_only() -> None:
    counts = []
    gradwire.simulate(**SETTINGS, progress=lambda row, last: counts.append(gc.get_freeze_count()))
    first, second = counts
    assert 0 < first < second  # the second time with what the first steps have imported and made
    assert gc.get_freeze_count() == 0


def test_what_others_have_frozen_stays_frozen() -> None:
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        with OldObjectsLeftAlone() as old:
            old.renew()
            assert gc.get_freeze_count() <= frozen
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()


def test_garbage_made_meanwhile_is_collected() -> None:
    class Circle:
        def __init__(self) -> None:
            self.itself = self

    with OldObjectsLeftAlone():
        seen = weakref.ref(Circle())
        gc.collect()
        assert seen() is None


def test_a_run_that_fails_unfreezes() -> None:
    with pytest.raises(RuntimeError), OldObjectsLeftAlone():
        raise RuntimeError
    assert gc.get_freeze_count() == 0
