import gzip
import hashlib
import lzma
import struct
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gradwire import data
from gradwire.core.errors import DataError
from gradwire.data import fashion_mnist, idx, mnist


def written(values: torch.Tensor) -> bytes:
    header = bytes((0, 0, 8, values.dim())) + struct.pack(f">{values.dim()}I", *values.shape)
    return header + values.numpy().tobytes()


IMAGES = torch.arange(5 * 4 * 3, dtype=torch.uint8).reshape(5, 4, 3)
LABELS = torch.tensor([0, 1, 2, 1, 0], dtype=torch.uint8)


@pytest.mark.parametrize(
    ("suffix", "compress"), [("", bytes), (".gz", gzip.compress), (".xz", lzma.compress)]
)
def test_reads(tmp_path: Path, suffix: str, compress) -> None:
    images, labels = tmp_path / f"images{suffix}", tmp_path / f"labels{suffix}"
    images.write_bytes(compress(written(IMAGES)))
    labels.write_bytes(compress(written(LABELS)))
    read_images, read_labels = idx.read_pair(images, labels)
    assert torch.equal(read_images, IMAGES[:, None])
    assert torch.equal(read_labels, LABELS)


def test_refuses_damage(tmp_path: Path) -> None:
    path = tmp_path / "images"
    good = written(IMAGES)
    for bad, reason in [
        (b"", "starts with nothing, not 00 00 08 03"),
        (b"\x00\x00\x0d" + good[3:], "starts with 00 00 0d 03"),
        (written(LABELS), "starts with 00 00 08 01"),
        (good[:10], "header has 10 of 16 bytes"),
        (good[:-1], r"declares 60 elements \[5, 4, 3\], 59 follow"),
        (good + b"\x00", "61 follow"),
        (good[:4] + b"\xff" * 12 + good[16:], "60 follow"),
    ]:
        path.write_bytes(bad)
        with pytest.raises(DataError, match=reason) as caught:
            idx.read_idx(path, num_dims=3)
        assert str(path) in str(caught.value)


def test_refuses_a_label_too_few(tmp_path: Path) -> None:
    (tmp_path / "images").write_bytes(written(IMAGES))
    (tmp_path / "labels").write_bytes(written(LABELS[:4]))
    with pytest.raises(DataError, match="4 labels for the 5 images"):
        idx.read_pair(tmp_path / "images", tmp_path / "labels")


def tiny_source(server) -> idx.IdxSource:
    contents = [gzip.compress(written(x)) for x in (IMAGES, LABELS, IMAGES[:2], LABELS[:2])]
    for name, content in zip(idx._NAMES, contents):
        server.put(f"tiny/{name}", content)
    return idx.IdxSource(
        name="tiny",
        url=server.url + "tiny/",
        sizes_bytes=tuple(len(c) for c in contents),  # type: ignore[arg-type]
        sha256s=tuple(hashlib.sha256(c).hexdigest() for c in contents),  # type: ignore[arg-type]
        other_folders=(),
        train_counts=(2, 2, 1),
        test_counts=(1, 1, 0),
        mean=10.0,
        std=2.0,
    )


def test_assembles_a_downloaded_set(server) -> None:
    dataset = idx.assemble(tiny_source(server))
    assert repr(dataset) == "<tiny: 5 train, 2 test, image [1, 4, 3]>"
    assert dataset.num_classes == 3
    expected = (IMAGES[[3], None].float() - 10.0) / 2.0
    assert torch.equal(dataset.inputs(torch.tensor([3])), expected)


def test_refuses_the_labels_of_another_set(server) -> None:
    source = replace(tiny_source(server), train_counts=(1, 2, 2))
    with pytest.raises(DataError, match=r"not the labels of tiny: .* \[2, 2, 1\], expected"):
        idx.assemble(source)


def test_mnist(real_data) -> None:
    real_data("mnist", *idx._NAMES)
    dataset = data.load("mnist")
    assert repr(dataset) == "<mnist: 60000 train, 10000 test, image [1, 28, 28]>"
    counts = torch.bincount(dataset.train_targets.long()).tolist()
    assert counts == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    counts = torch.bincount(dataset.test_targets.long()).tolist()
    assert counts == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    images = dataset.train_inputs.double()
    assert images.mean().item() == pytest.approx(dataset.mean[0], rel=1e-8)
    assert images.std().item() == pytest.approx(dataset.std[0], rel=1e-7)


def test_fashion_mnist(real_data) -> None:
    real_data("fashion_mnist", *idx._NAMES)
    dataset = data.load("fashion_mnist")
    images = dataset.train_inputs.double()
    assert images.mean().item() == pytest.approx(dataset.mean[0], rel=1e-8)
    assert images.std().item() == pytest.approx(dataset.std[0], rel=1e-7)


def test_fashion_mnist_is_not_mnist(folder: Path, real_data, monkeypatch) -> None:
    # both use these names: bare files of one must not pass for the other
    for path in real_data("mnist", *idx._NAMES):
        (folder / path.name).symlink_to(path)
    monkeypatch.setenv("GRADWIRE_DATA", str(folder))
    with pytest.raises(DataError, match="not the labels of fashion_mnist"):
        fashion_mnist.load()
    assert mnist.load().num_train == 60000
