"""Batches of all workers made at once are those that each worker would get alone."""

from typing import Any

import pytest
import torch

from gradwire.core.key import Key
from gradwire.data.dataset import Dataset
from gradwire.data.sampler import Sampler
from gradwire.experiment.run.batches import train_batches
from gradwire.experiment.run.config import Config
from gradwire.experiment.run.registries import PARTITIONS
from gradwire.experiment.run.together import BatchesTogether

CPU = torch.device("cpu")


def images(num: int = 96) -> Dataset:
    pixels = Key(1).integers(num * 3 * 8 * 8, 256).to(torch.uint8).view(num, 3, 8, 8)
    labels = Key(2).integers(num, 10).to(torch.uint8)
    moments = {"mean": (120.0, 100.0, 90.0), "std": (60.0, 50.0, 70.0)}
    return Dataset(
        "images", "image", pixels, labels, pixels, labels, 10, augmentable=True, **moments
    )


def batches(workers: int = 4, **settings: Any) -> tuple[Any, Any]:
    """Made at once, and alone."""
    config = Config(workers=workers, batch_size=6, **settings)
    partition = PARTITIONS.parse(config.partition)
    dataset = images()
    sampler = Sampler(dataset, partition, workers, 6, Key(3))
    together = train_batches(config, dataset, sampler, CPU, Key(4))
    process = Config(**{**vars(config), "engine": "process"})
    return together, train_batches(process, dataset, sampler, CPU, Key(4))


@pytest.mark.parametrize("partition", ["iid", "dirichlet(0.5)"])
@pytest.mark.parametrize("augment", [True, False])
def test_equal_those_made_alone(partition: str, augment: bool) -> None:
    together, alone = batches(partition=partition, augment=augment)
    assert isinstance(together, BatchesTogether)
    assert not isinstance(alone, BatchesTogether)
    # In lockstep, apart by more steps than are kept, and the same one again.
    asked = [(r, s) for s in (0, 1) for r in range(4)] + [(0, s) for s in range(2, 12)]
    asked += [(3, 2), (2, 11), (3, 11), (0, 0), (0, 11)]
    for rank, step in asked:
        for one, other in zip(together(rank, step), alone(rank, step), strict=True):
            assert one.dtype == other.dtype
            assert one.is_contiguous()
            assert torch.equal(one, other)


def test_a_step_is_made_once() -> None:
    together, _ = batches()
    made = []
    make = together._make
    together._make = lambda step: made.append(step) or make(step)
    for step in range(5):
        for rank in range(4):
            together(rank, step)
    assert made == list(range(5))
    assert not together._steps


def test_batches_made_ahead_are_those_made_alone() -> None:
    together, alone = batches()
    made = []
    make = together._make
    together._make = lambda step: made.append(step) or make(step)
    together.make_ahead(3)  # nobody has asked yet
    assert made == []
    for step in range(3):
        for rank in range(4):
            if rank == 2:
                together.make_ahead(3)  # others have not had theirs
            for one, other in zip(together(rank, step), alone(rank, step), strict=True):
                assert torch.equal(one, other)
        assert made == list(range(step + 1))
        together.make_ahead(3)
        together.make_ahead(3)
    assert made == [0, 1, 2]  # there is no step 3
    assert not together._steps


def test_unknown_ranks_are_refused() -> None:
    together, _ = batches()
    with pytest.raises(ValueError, match="rank must lie in"):
        together(4, 0)


def test_what_is_kept_is_bounded() -> None:
    together, _ = batches()
    for step in range(50):
        together(0, step)
    assert len(together._steps) <= 4
