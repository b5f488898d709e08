"""A part of CIFAR-10 for recipes at the scale `smoke`: 2,000 images to train on, 500 to test."""

from dataclasses import replace

from gradwire import data
from gradwire.data.dataset import Dataset

_NUM_TRAIN, _NUM_TEST = 2000, 500


def cifar10_part() -> Dataset:
    whole = data.load("cifar10")
    return replace(
        whole,
        name="cifar10_part",
        train_inputs=whole.train_inputs[:_NUM_TRAIN],
        train_targets=whole.train_targets[:_NUM_TRAIN],
        test_inputs=whole.test_inputs[:_NUM_TEST],
        test_targets=whole.test_targets[:_NUM_TEST],
    )


data.register(cifar10_part)
