import pytest
import torch

from gradwire import data
from gradwire.core.key import Key
from gradwire.data import Dataset

IMAGES = torch.arange(6 * 2 * 3 * 3, dtype=torch.uint8).reshape(6, 2, 3, 3)
LABELS = torch.tensor([0, 1, 2, 0, 1, 2], dtype=torch.uint8)


def images(**changes) -> Dataset:
    fields = {
        "name": "small",
        "kind": "image",
        "train_inputs": IMAGES,
        "train_targets": LABELS,
        "test_inputs": IMAGES[:2],
        "test_targets": LABELS[:2],
        "num_classes": 3,
        "mean": (10.0, 20.0),
        "std": (2.0, 4.0),
    }
    return Dataset(**(fields | changes))


def test_inputs_are_normalised_per_channel() -> None:
    dataset = images()
    batch = dataset.inputs(torch.tensor([4, 0]))
    assert batch.dtype == torch.float32
    for i, index in enumerate([4, 0]):
        assert torch.equal(batch[i, 0], (IMAGES[index, 0].float() - 10.0) / 2.0)
        assert torch.equal(batch[i, 1], (IMAGES[index, 1].float() - 20.0) / 4.0)
    assert dataset.targets(torch.tensor([4, 0])).tolist() == [1, 0]
    assert dataset.targets(torch.tensor([4, 0])).dtype == torch.int64
    assert torch.equal(
        dataset.inputs(torch.tensor([1]), split="test")[0], dataset.inputs(torch.tensor([1]))[0]
    )
    assert dataset.targets(torch.tensor([1]), split="test").tolist() == [1]


def test_indices_of_many_workers_at_once() -> None:
    indices = torch.tensor([[0, 1, 2], [3, 4, 5]])
    dataset = images()
    assert dataset.inputs(indices).shape == (2, 3, 2, 3, 3)
    assert torch.equal(dataset.inputs(indices)[1], dataset.inputs(indices[1]))
    assert dataset.targets(indices).shape == (2, 3)


def test_text_stays_whole_numbers() -> None:
    text = torch.arange(12, dtype=torch.uint8).reshape(3, 4)
    dataset = Dataset("t", "text", text, text + 1, text, text + 1, num_classes=13)
    assert dataset.inputs(torch.tensor([2])).tolist() == [[8, 9, 10, 11]]
    assert dataset.targets(torch.tensor([2])).tolist() == [[9, 10, 11, 12]]
    assert dataset.inputs(torch.tensor([2])).dtype == torch.int64
    assert dataset.input_shape == (4,)


def test_to_a_device_keeps_the_rest() -> None:
    dataset = images().to(torch.device("cpu"))
    assert torch.equal(dataset.inputs(torch.arange(6)), images().inputs(torch.arange(6)))
    assert dataset.mean == (10.0, 20.0)


def test_errors() -> None:
    with pytest.raises(ValueError, match="small: 6 train inputs but 5 targets"):
        images(train_targets=LABELS[:5])
    with pytest.raises(ValueError, match="images of 2 channels"):
        images(mean=(1.0,))
    with pytest.raises(ValueError, match="split must be 'train' or 'test', got 'valid'"):
        images().inputs(torch.tensor([0]), split="valid")  # type: ignore[arg-type]


def test_augments_only_what_may_be() -> None:
    key = Key(1)
    batch = images().inputs(torch.arange(6))
    assert images().augment(batch, key) is batch
    assert not torch.equal(images(augmentable=True).augment(batch, key), batch)


def test_load_knows_its_names() -> None:
    names = ["cifar10", "digits", "fashion_mnist", "mnist", "shakespeare", "shakespeare_roles"]
    assert data.names() == names
    assert data.load("digits") is data.load("digits")
    with pytest.raises(ValueError, match=r"'cifra10'.* Did you mean cifar10.*: cifar10, digits,"):
        data.load("cifra10")
    with pytest.raises(ValueError, match="unknown data set 'files'"):
        data.load("files")


def test_digits() -> None:
    dataset = data.load("digits")
    assert repr(dataset) == "<digits: 1437 train, 360 test, image [1, 8, 8]>"
    pixels = torch.cat([dataset.train_inputs, dataset.test_inputs])
    labels = torch.cat([dataset.train_targets, dataset.test_targets])
    assert pixels.dtype == torch.uint8
    assert (pixels.min(), pixels.max()) == (0, 16)
    # the published numbers of each digit
    counts = torch.bincount(labels.long()).tolist()
    assert counts == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert int(torch.bincount(dataset.test_targets.long()).min()) >= 25
    batch = dataset.inputs(torch.arange(1437))
    assert batch.mean().item() == pytest.approx(0.0, abs=1e-5)
    assert batch.std().item() == pytest.approx(1.0, abs=1e-3)
    # the split never changes
    assert dataset.train_targets[:10].tolist() == [6, 1, 3, 7, 9, 7, 2, 7, 0, 9]
