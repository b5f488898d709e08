"""The batches of a run: of training, by worker and step, and of the test data."""

from collections.abc import Callable, Iterator

import torch

from gradwire.core.key import Key
from gradwire.data.dataset import Dataset
from gradwire.data.sampler import Sampler
from gradwire.experiment.run.config import Config
from gradwire.experiment.run.together import BatchesTogether
from gradwire.own.data import OwnData
from gradwire.training.gradient import Batch

_TEST_CHUNK = 1024  # examples made into network inputs at a time
_LEAST_OWN_CHUNK = 64  # of a user's own data; else as many as in a batch of training


def train_batches(
    config: Config, dataset: Dataset | OwnData, sampler: Sampler, device: torch.device, key: Key
) -> Callable[[int, int], Batch]:
    """A function of rank and step; `key` says what random transforms of examples draw."""
    if isinstance(dataset, OwnData):
        own, drawn = dataset, key.child("own")
        return lambda rank, step: own.batch(
            sampler.indices(rank, step), drawn.at(step).private(rank)
        )

    def batch(rank: int, step: int) -> Batch:
        indices = sampler.indices(rank, step)
        inputs = dataset.inputs(indices, device)
        if config.augment and dataset.augmentable:
            inputs = dataset.augment(inputs, key.at(step), rank * config.batch_size)
        return inputs, dataset.targets(indices, device)

    if config.engine != "simulator" or config.workers == 1:
        return batch
    augments = config.augment and dataset.augmentable
    return BatchesTogether(batch, dataset, sampler, device, key if augments else None)


def test_batches(
    dataset: Dataset | OwnData, device: torch.device, key: Key, batch_size: int
) -> Iterator[Batch]:
    """All test examples, in order."""
    if isinstance(dataset, OwnData):
        size = max(_LEAST_OWN_CHUNK, batch_size)
        for number, indices in enumerate(torch.arange(dataset.num_test).split(size)):
            yield dataset.batch(indices, key.at(number), "test")
        return
    for indices in torch.arange(dataset.num_test).split(_TEST_CHUNK):
        yield (
            dataset.inputs(indices, device, "test"),
            dataset.targets(indices, device, "test"),
        )
