"""The idx format of MNIST and its successors: four bytes (0, 0, element type, dimensions), one
big-endian 32-bit size per dimension, then the elements, the last dimension fastest. These data
sets use unsigned bytes only.
"""

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from gradwire.data import files
from gradwire.data.dataset import Dataset
from gradwire.data.files import DataFile

_UNSIGNED_BYTE = 8
_LIMIT_BYTES = 1 << 28
_NAMES = (
    "train-images-idx3-ubyte.gz",
    "train-labels-idx1-ubyte.gz",
    "t10k-images-idx3-ubyte.gz",
    "t10k-labels-idx1-ubyte.gz",
)


@dataclass(frozen=True)
class IdxSource:
    """What differs between MNIST and data sets in its format."""

    name: str
    url: str  # of the folder that holds the four files
    sizes_bytes: tuple[int, int, int, int]  # in the order of _NAMES
    sha256s: tuple[str, str, str, str]
    other_folders: tuple[str, ...]
    train_counts: tuple[int, ...]  # examples of each class
    test_counts: tuple[int, ...]
    mean: float
    std: float

    def files(self) -> list[DataFile]:
        return [
            DataFile(self.name, name, self.url + name, size_bytes, sha256, self.other_folders)
            for name, size_bytes, sha256 in zip(_NAMES, self.sizes_bytes, self.sha256s)
        ]


def assemble(source: IdxSource) -> Dataset:
    paths = [files.obtain(file) for file in source.files()]
    train_images, train_labels = read_pair(paths[0], paths[1])
    test_images, test_labels = read_pair(paths[2], paths[3])
    # the four file names are the same for every data set in this format
    check_counts(train_labels, source.train_counts, paths[1], source.name)
    check_counts(test_labels, source.test_counts, paths[3], source.name)
    return Dataset(
        name=source.name,
        kind="image",
        train_inputs=train_images,
        train_targets=train_labels,
        test_inputs=test_images,
        test_targets=test_labels,
        num_classes=len(source.train_counts),
        mean=(source.mean,),
        std=(source.std,),
    )


def read_pair(images_path: Path, labels_path: Path) -> tuple[Tensor, Tensor]:
    """Images [N, 1, H, W] and their labels [N]."""
    images = read_idx(images_path, num_dims=3)
    labels = read_idx(labels_path, num_dims=1)
    if len(images) != len(labels):
        raise files.damaged(
            labels_path, f"{len(labels)} labels for the {len(images)} images of {images_path}"
        )
    return images[:, None], labels


def read_idx(path: Path, num_dims: int) -> Tensor:
    """The uint8 tensor of `num_dims` dimensions in an idx file, plain or compressed."""
    content = files.read(path, _LIMIT_BYTES)
    header_bytes = 4 + 4 * num_dims
    expected = bytes((0, 0, _UNSIGNED_BYTE, num_dims))
    if content[:4] != expected:
        raise files.damaged(
            path, f"it starts with {content[:4].hex(' ') or 'nothing'}, not {expected.hex(' ')}"
        )
    if len(content) < header_bytes:
        raise files.damaged(path, f"its header has {len(content)} of {header_bytes} bytes")
    shape = struct.unpack_from(f">{num_dims}I", content, 4)
    size_bytes = math.prod(shape)
    if len(content) - header_bytes != size_bytes:
        raise files.damaged(
            path,
            f"its header declares {size_bytes:,} elements {list(shape)}, "
            f"{len(content) - header_bytes:,} follow",
        )
    elements = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    return elements[header_bytes:].reshape(shape)


def check_counts(labels: Tensor, counts: Sequence[int], path: Path, name: str) -> None:
    """Refuses labels that are not those of the data set, whatever the reason."""
    found = torch.bincount(labels.to(torch.int64), minlength=len(counts)).tolist()
    if found != list(counts):
        raise files.damaged(
            path,
            f"these are not the labels of {name}: examples per class {found}, "
            f"expected {list(counts)}",
        )
