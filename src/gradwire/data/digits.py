"""Handwritten digits, 8 x 8 pixels of 17 grey levels: 1,797 images from 13 writers, the test set
of "Optical Recognition of Handwritten Digits" (Alpaydin and Kaynak 1998, UCI Machine Learning
Repository, https://doi.org/10.24432/C50P49, CC BY 4.0). It comes with the package as `digits.npz`
(the pixels unchanged, as uint8), so that examples and tests run at once and without a network.
The split into 1,437 train and 360 test images is ours: a permutation drawn once and for all.
"""

from pathlib import Path

import numpy as np
import torch

from gradwire.core.key import Key
from gradwire.data.dataset import Dataset

NUM_TRAIN = 1437
_FILE = Path(__file__).with_suffix(".npz")


def load() -> Dataset:
    with np.load(_FILE, allow_pickle=False) as arrays:
        images = torch.from_numpy(arrays["images"])[:, None]  # [1797, 1, 8, 8]
        labels = torch.from_numpy(arrays["labels"])
    order = Key(seed=0).child("digits").permutation(len(labels))
    train, test = order[:NUM_TRAIN], order[NUM_TRAIN:]
    pixels = images[train].double()
    return Dataset(
        name="digits",
        kind="image",
        train_inputs=images[train],
        train_targets=labels[train],
        test_inputs=images[test],
        test_targets=labels[test],
        num_classes=10,
        mean=(float(pixels.mean()),),
        std=(float(pixels.std(correction=0)),),
    )
