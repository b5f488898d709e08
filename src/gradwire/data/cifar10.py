"""CIFAR-10: 60,000 colour photographs of ten classes, 32 x 32 (Krizhevsky 2009). Read from the
binary version, as the published archive or as its six batches; a record is one label byte, then
3072 bytes of pixels, red, green and blue plane.
"""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from gradwire.data import files, idx
from gradwire.data.dataset import Dataset
from gradwire.data.files import DataFile

BATCHES = (*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin")
FOLDERS = ("cifar10", "cifar-10-batches-bin")
ARCHIVE = DataFile(
    folder="cifar10",
    name="cifar-10-binary.tar.gz",
    url="https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
    size_bytes=170_052_171,
    sha256="c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
)
# over the training set: 0.4914, 0.4822, 0.4465 and 0.2470, 0.2435, 0.2616 of 255
MEAN = (125.30691805, 122.95039414, 113.86538318)
STD = (62.99321928, 62.08870764, 66.70489964)

_NUM_CLASSES = 10
_SHAPE = (3, 32, 32)
_RECORD_BYTES = 1 + 3 * 32 * 32
_LIMIT_BYTES = 10_000 * _RECORD_BYTES


def load() -> Dataset:
    found = {name: files.find(name, FOLDERS) for name in BATCHES}
    paths = [path for path in found.values() if path is not None]
    if len(paths) == len(BATCHES):
        # decompression leaves the interpreter free, so threads share the work
        with ThreadPoolExecutor(max_workers=2) as pool:
            batches = list(pool.map(read_batch, paths))
        last_train, last_test = paths[-2], paths[-1]
    else:
        missing = ", ".join(name for name, path in found.items() if path is None)
        archive = files.obtain(
            ARCHIVE, f"The six batches in {FOLDERS[0]}/ would do as well; missing: {missing}."
        )
        batches = read_archive(archive)
        last_train = last_test = archive
    images = torch.cat([images for images, _ in batches[:-1]])
    labels = torch.cat([labels for _, labels in batches[:-1]])
    test_images, test_labels = batches[-1]
    idx.check_counts(labels, (5000,) * _NUM_CLASSES, last_train, "cifar10")
    idx.check_counts(test_labels, (1000,) * _NUM_CLASSES, last_test, "cifar10")
    return Dataset(
        name="cifar10",
        kind="image",
        train_inputs=images,
        train_targets=labels,
        test_inputs=test_images,
        test_targets=test_labels,
        num_classes=_NUM_CLASSES,
        mean=MEAN,
        std=STD,
        augmentable=True,
    )


def read_batch(path: Path) -> tuple[Tensor, Tensor]:
    """Images [N, 3, 32, 32] and labels [N] of one batch file, plain or compressed."""
    return _parse(files.read(path, _LIMIT_BYTES), path)


def read_archive(path: Path) -> list[tuple[Tensor, Tensor]]:
    """The six batches of the published archive, in the order of BATCHES."""
    found = {
        name: _parse(content, path)
        for name, content in files.read_archive(path, _LIMIT_BYTES)
        if name in BATCHES
    }
    missing = [name for name in BATCHES if name not in found]
    if missing:
        raise files.damaged(path, f"it does not hold {', '.join(missing)}")
    return [found[name] for name in BATCHES]


def _parse(content: bytes, path: Path) -> tuple[Tensor, Tensor]:
    if not content or len(content) % _RECORD_BYTES:
        raise files.damaged(
            path, f"{len(content):,} bytes are not a whole number of {_RECORD_BYTES}-byte records"
        )
    records = torch.frombuffer(bytearray(content), dtype=torch.uint8).reshape(-1, _RECORD_BYTES)
    labels = records[:, 0].clone()
    if int(labels.max()) >= _NUM_CLASSES:
        raise files.damaged(path, f"it has a label {int(labels.max())}, the largest is 9")
    return records[:, 1:].reshape(-1, *_SHAPE), labels
