"""Data sets of users: batches, labels, randomness, fingerprints."""

import random

import numpy
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from gradwire.core.key import Key
from gradwire.own.data import OwnData
from gradwire.own.fingerprint import fingerprint_module


class Noisy(Dataset):
    """Draws from all three global generators."""

    def __init__(self, num=40):
        self.num = num
        self.targets = [index % 3 for index in range(num)]

    def __len__(self):
        return self.num

    def __getitem__(self, index):
        noise = [float(torch.rand(())), random.random(), numpy.random.rand()]
        return torch.tensor([index, *noise]), self.targets[index]


def test_random_transforms_depend_on_worker_and_step_alone():
    data = OwnData("noisy", (Noisy(), Noisy()))
    states = random.getstate(), numpy.random.get_state()[1].tolist()
    key = Key(3).at(5).private(1)
    first, labels = data.batch(torch.tensor([4, 2]), key)
    assert torch.equal(first, data.batch(torch.tensor([4, 2]), key)[0])
    assert first[:, 0].tolist() == [4.0, 2.0]
    assert labels.tolist() == [1, 2]
    other, _ = data.batch(torch.tensor([4, 2]), key.private(0))
    assert (other[:, 1:] != first[:, 1:]).all()
    assert states == (random.getstate(), numpy.random.get_state()[1].tolist())


def test_runs_on_random_transforms_are_reproducible(simulate):
    runs = [simulate(model=lambda: nn.Linear(4, 3), data=(Noisy(), Noisy())) for _ in range(2)]
    assert torch.equal(runs[0].params, runs[1].params)
    assert runs[0].config.data == runs[1].config.data


def test_labels_of_data_sets_and_of_tensors_are_known():
    assert OwnData("noisy", (Noisy(), Noisy())).train_targets.tolist()[:4] == [0, 1, 2, 0]
    pair = torch.zeros(5, 2), torch.tensor([0, 1, 0, 1, 6])
    data = OwnData("tensors", (TensorDataset(*pair), pair))
    assert (data.num_train, data.num_classes, data.input_shape) == (5, 7, (2,))


def test_inputs_may_be_trees_and_collate_applies_to_tensors():
    inputs = {"a": torch.arange(6), "b": (torch.arange(12).reshape(6, 2),)}
    part = inputs, torch.arange(6)
    tree, targets = OwnData("t", (part, part)).batch(torch.tensor([5, 0]), Key(0))
    assert tree["a"].tolist() == targets.tolist() == [5, 0]
    assert tree["b"][0].tolist() == [[10, 11], [0, 1]]

    def collate(examples):
        return sum(int(example["a"]) for example, _ in examples), "targets"

    assert OwnData("t", (part, part), collate).batch(torch.tensor([5, 1]), Key(0)) == (6, "targets")


def test_numpy_arrays_and_lists_of_examples():
    x, y = numpy.arange(6.0).reshape(3, 2), numpy.array([0, 1, 0])
    data = OwnData("n", ((x, y), [(torch.ones(2), 1), (torch.zeros(2), 0)]))
    inputs, targets = data.batch(torch.tensor([2]), Key(0))
    assert inputs.tolist() == [[4.0, 5.0]]
    assert targets.tolist() == [0]
    inputs, targets = data.batch(torch.tensor([1, 0]), Key(0), "test")
    assert inputs.tolist() == [[0.0, 0.0], [1.0, 1.0]]
    assert targets.tolist() == [0, 1]
    assert (data.num_train, data.num_test) == (3, 2)


class Fetched(Noisy):
    def __getitems__(self, indices):
        self.asked = indices
        return [(torch.tensor(float(index)), index) for index in indices]


def test_examples_are_fetched_together_where_the_data_set_can():
    data = Fetched()
    assert OwnData("f", (data, data)).batch(torch.tensor([3, 1]), Key(0))[1].tolist() == [3, 1]
    assert data.asked == [3, 1]


def test_fingerprints_tell_data_apart():
    x, y = torch.arange(20.0).reshape(10, 2), torch.arange(10)
    base = OwnData("d", ((x, y), (x, y))).fingerprint()
    assert base == OwnData("other name", ((x.clone(), y), (x, y))).fingerprint()
    changed = x.clone()
    changed[-1, 0] += 1
    others = [
        ((changed, y), (x, y)),
        ((x[:9], y[:9]), (x, y)),
        ((x.double(), y), (x, y)),
        ((x, y.float()), (x, y)),
        (Noisy(10), (x, y)),
    ]
    found = {OwnData("d", other).fingerprint() for other in others}
    assert len(found | {base}) == 1 + len(others)


def test_fingerprints_tell_modules_apart(build):
    makers = [
        lambda: nn.Conv1d(2, 2, 3),
        lambda: nn.Conv1d(2, 2, 3, padding=1),
        lambda: nn.Conv1d(2, 2, 3).requires_grad_(False),
        lambda: nn.Sequential(nn.Conv1d(2, 2, 3)),
        lambda: nn.Conv1d(2, 2, 3).double(),
        lambda: nn.Sequential(nn.Conv1d(2, 2, 3), nn.BatchNorm1d(2)),
    ]
    found = [fingerprint_module(build(maker)) for maker in makers]
    assert len(set(found)) == len(makers)
    assert found == [fingerprint_module(build(maker)) for maker in makers]
    assert fingerprint_module(build(makers[0], 2)) != found[0]


@pytest.mark.parametrize("partition", ["by_label(1)", "dirichlet(0.3)"])
def test_partitions_by_label(simulate, partition):
    run = simulate(
        model=lambda: nn.Linear(4, 3), data=(Noisy(), Noisy()), partition=partition, batch_size=4
    )
    assert run.config.partition == partition
