"""Tensors that wait on disk."""

from pathlib import Path

import pytest
import torch

from gradwire.experiment.processes.state.model_snapshots import ModelSnapshots


@pytest.mark.parametrize("has_folder", [True, False])
def test_what_was_put_is_got_in_any_order_and_as_often_as_wanted(tmp_path: Path, has_folder: bool):
    snapshots = ModelSnapshots(tmp_path if has_folder else None)
    rng = torch.Generator().manual_seed(1)
    kept = {
        step: [
            torch.randn(3, 4, generator=rng),
            torch.tensor(step),
            torch.empty(0),
            torch.randn(5, generator=rng).to(torch.bfloat16),
            torch.arange(12).reshape(3, 4).T,
        ]
        for step in (10, 20, 30)
    }
    for step in (10, 20):
        snapshots.save(step, kept[step])
    assert torch.equal(snapshots.load(10)[0], kept[10][0])
    snapshots.save(30, kept[30])  # after something was read
    for step in (20, 30, 10, 20):
        found = snapshots.load(step)
        assert [x.dtype for x in found] == [x.dtype for x in kept[step]]
        assert all(torch.equal(a, b) for a, b in zip(found, kept[step], strict=True))


def test_it_is_as_it_was_when_it_was_put(tmp_path: Path):
    x = torch.ones(4)
    snapshots = ModelSnapshots(tmp_path)
    snapshots.save(1, [x])
    x.zero_()
    assert torch.equal(snapshots.load(1)[0], torch.ones(4))
    assert not list(tmp_path.iterdir())  # nothing that somebody would have to remove
