from pathlib import Path

import pytest
import torch

from gradwire import data
from gradwire.core.errors import DataError
from gradwire.data import Dataset, shakespeare, text

PATH = Path("some.txt")


def decoded(dataset: Dataset, numbers: torch.Tensor) -> str:
    return "".join(dataset.vocabulary[i] for i in numbers.flatten().tolist())


def test_encode() -> None:
    assert text.encode("banana", "abn", PATH).tolist() == [1, 0, 2, 0, 2, 0]
    with pytest.raises(DataError, match=r"some.txt .*should not: \['c', 'd'\]"):
        text.encode("abcd", "abn", PATH)
    with pytest.raises(DataError, match=r"should not: \['é'\]"):
        text.encode("abé?", "?abn", PATH)


def test_windows() -> None:
    numbers = torch.arange(2 * text.LENGTH + 1)
    inputs, targets = text.windows(numbers)
    assert inputs.shape == targets.shape == (2, text.LENGTH)
    assert torch.equal(inputs.flatten(), numbers[:-1])
    assert torch.equal(targets, inputs + 1)
    # the last character of a window needs a successor
    assert len(text.windows(numbers[:-1])[0]) == 1
    assert text.windows(numbers[:80])[0].shape == (0, text.LENGTH)
    assert text.windows(numbers[:0])[0].shape == (0, text.LENGTH)


def test_split() -> None:
    train, test = text.split(torch.arange(1000))
    assert (len(train), len(test)) == (900, 100)
    assert torch.equal(torch.cat([train, test]), torch.arange(1000))


def test_refuses_another_text(folder: Path) -> None:
    (folder / "input.txt").write_text("To be, or not to be")
    with pytest.raises(DataError, match=r"input\.txt .* 19 bytes, expected 1,115,394"):
        shakespeare.load()


def test_shakespeare(real_data) -> None:
    [path] = real_data("shakespeare", "input.txt")
    content = path.read_text()
    assert "".join(sorted(set(content))) == shakespeare.VOCABULARY
    dataset = data.load("shakespeare")
    assert repr(dataset) == "<shakespeare: 12548 train, 1394 test, text [80]>"
    assert dataset.num_classes == 65
    train = decoded(dataset, dataset.train_inputs)
    assert content.startswith(train)
    assert content[1:].startswith(decoded(dataset, dataset.train_targets))
    test = decoded(dataset, dataset.test_inputs)
    cut = int(0.9 * len(content))
    assert content[cut:].startswith(test)
    assert len(train) + len(test) > len(content) - 200
