"""The data and the model of the other examples: handwritten digits, and a small CNN."""

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from gradwire import data


def loaders(
    batch_size: int, rank: int, size: int, name: str = "digits"
) -> tuple[DataLoader, tuple]:
    """This rank's batches of the training set, and the whole test set."""
    digits = data.load(name)
    splits = []
    for split, count in (("train", digits.num_train), ("test", digits.num_test)):
        every = torch.arange(count)
        device = torch.device("cpu")
        splits.append((digits.inputs(every, device, split), digits.targets(every, device, split)))
    train = TensorDataset(*splits[0])
    sampler = DistributedSampler(train, num_replicas=size, rank=rank)
    return DataLoader(train, batch_size=batch_size, sampler=sampler, drop_last=True), splits[1]


def make_model() -> nn.Module:
    torch.manual_seed(0)  # the same on all ranks
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def accuracy(model: nn.Module, test: tuple) -> float:
    inputs, targets = test
    with torch.no_grad():
        return float((model(inputs).argmax(1) == targets).float().mean())
