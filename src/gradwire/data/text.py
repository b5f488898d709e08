"""Text as numbered characters, cut into windows for next-character prediction: from the first
`length` characters of a window, predict each one's successor.
"""

from pathlib import Path

import torch
from torch import Tensor

from gradwire.data import files

LENGTH = 80  # characters per window, as in McMahan et al. 2017 and LEAF
TRAIN_SHARE = 0.9  # the beginning of a text trains, the end tests
_UNKNOWN_CHARACTER = 255  # stands for characters outside the vocabulary


def encode(text: str, vocabulary: str, path: Path) -> Tensor:
    """The place of every character in `vocabulary`, which is sorted ASCII; uint8 [len(text)]."""
    table = bytearray([_UNKNOWN_CHARACTER]) * 256
    for number, code in enumerate(vocabulary.encode("ascii")):
        table[code] = number
    # what is not ASCII becomes "?" here, and is found by the second test
    numbers = text.encode("ascii", errors="replace").translate(table)
    if _UNKNOWN_CHARACTER in numbers or not text.isascii():
        strange = sorted(set(text) - set(vocabulary))
        raise files.damaged(path, f"it holds characters that it should not: {strange[:10]}")
    return torch.frombuffer(bytearray(numbers), dtype=torch.uint8)


def split(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """(train, test): the text up to nine tenths, and the rest."""
    cut = int(len(numbers) * TRAIN_SHARE)
    return numbers[:cut], numbers[cut:]


def windows(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Inputs and targets [N, LENGTH], not overlapping; targets are the inputs one place on.

    What does not fill a window at the end is left out.
    """
    count = max(0, (len(numbers) - 1) // LENGTH)
    inputs = numbers[: count * LENGTH].reshape(count, LENGTH)
    targets = numbers[1 : count * LENGTH + 1].reshape(count, LENGTH)
    return inputs.clone(), targets.clone()
