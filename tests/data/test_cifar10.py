import gzip
import io
import lzma
import tarfile
from pathlib import Path

import pytest
import torch

from gradwire import data
from gradwire.core.errors import DataError
from gradwire.core.key import Key
from gradwire.data import cifar10


def batch(number: int, count: int = 3) -> tuple[bytes, torch.Tensor, torch.Tensor]:
    key = Key(number)
    images = key.integers(count * 3072, 256).to(torch.uint8).reshape(count, 3, 32, 32)
    labels = key.child("labels").integers(count, 10).to(torch.uint8)
    records = torch.cat([labels[:, None], images.flatten(1)], dim=1)
    return records.numpy().tobytes(), images, labels


def archive(leave_out: str = "") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        # the published archive has another order and other files, too
        for number, name in reversed([*enumerate(cifar10.BATCHES), (7, "readme.html")]):
            if name != leave_out:
                info = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
                content = batch(number)[0]
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("suffix", "compress"), [("", bytes), (".gz", gzip.compress), (".xz", lzma.compress)]
)
def test_reads_a_batch(tmp_path: Path, suffix: str, compress) -> None:
    content, images, labels = batch(0)
    path = tmp_path / f"data_batch_1.bin{suffix}"
    path.write_bytes(compress(content))
    read_images, read_labels = cifar10.read_batch(path)
    assert torch.equal(read_images, images)
    assert torch.equal(read_labels, labels)


def test_reads_the_archive(tmp_path: Path) -> None:
    path = tmp_path / "cifar-10-binary.tar.gz"
    path.write_bytes(archive())
    for number, (images, labels) in enumerate(cifar10.read_archive(path)):
        assert torch.equal(images, batch(number)[1])
        assert torch.equal(labels, batch(number)[2])


def test_refuses_damage(tmp_path: Path) -> None:
    path = tmp_path / "test_batch.bin"
    good = batch(0)[0]
    for bad, reason in [
        (b"", "0 bytes are not a whole number of 3073-byte records"),
        (good[:-1], "9,218 bytes"),
        (b"\x0a" + good[1:], "label 10, the largest is 9"),
        (bytes(3073 * 10_001), "exceed 30,730,000 bytes"),
    ]:
        path.write_bytes(bad)
        with pytest.raises(DataError, match=reason) as caught:
            cifar10.read_batch(path)
        assert str(path) in str(caught.value)
    path = tmp_path / "cifar-10-binary.tar.gz"
    path.write_bytes(archive(leave_out="data_batch_4.bin"))
    with pytest.raises(DataError, match=r"does not hold data_batch_4\.bin"):
        cifar10.read_archive(path)


def test_load_refuses_other_pictures(folder: Path) -> None:
    (folder / "cifar10").mkdir()
    for number, name in enumerate(cifar10.BATCHES):
        (folder / "cifar10" / name).write_bytes(batch(number)[0])
    with pytest.raises(DataError, match="not the labels of cifar10"):
        cifar10.load()


def test_load_uses_the_archive_when_a_batch_is_missing(folder: Path) -> None:
    (folder / "data_batch_1.bin").write_bytes(batch(0)[0])
    (folder / "cifar-10-binary.tar.gz").write_bytes(archive())
    with pytest.raises(DataError, match=r"cifar-10-binary\.tar\.gz cannot be used: these are not"):
        cifar10.load()


def test_load_says_which_batches_are_missing(folder: Path, monkeypatch) -> None:
    (folder / "data_batch_1.bin").write_bytes(b"")
    nowhere = (folder / "nowhere").as_uri()
    monkeypatch.setattr(cifar10, "ARCHIVE", cifar10.DataFile("cifar10", "a.tar.gz", nowhere, 1, ""))
    with pytest.raises(DataError, match=r"missing: data_batch_2\.bin, .*test_batch\.bin"):
        cifar10.load()


def test_one_real_batch(real_data) -> None:
    [path] = real_data("cifar10", "test_batch.bin")
    images, labels = cifar10.read_batch(path)
    assert images.shape == (10_000, 3, 32, 32)
    assert torch.bincount(labels.long()).tolist() == [1000] * 10


@pytest.mark.slow
def test_all_of_it(real_data) -> None:
    real_data("cifar10", *cifar10.BATCHES)
    dataset = data.load("cifar10")
    assert repr(dataset) == "<cifar10: 50000 train, 10000 test, image [3, 32, 32]>"
    assert dataset.augmentable
    # published: the mean and deviation of each channel, of 1
    mean = [0.49139968, 0.48215841, 0.44653091]
    std = [0.24703223, 0.24348513, 0.26158784]
    assert [m / 255 for m in dataset.mean] == pytest.approx(mean, rel=1e-7)
    assert [s / 255 for s in dataset.std] == pytest.approx(std, rel=1e-7)
    channels = dataset.train_inputs.transpose(0, 1).flatten(1)
    for channel, m, s in zip(channels, dataset.mean, dataset.std):
        assert channel.double().mean().item() == pytest.approx(m, rel=1e-7)
        assert channel.double().std().item() == pytest.approx(s, rel=1e-6)
