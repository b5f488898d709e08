"""A data set held in memory: compact integer tensors, turned into network inputs per batch.

Images stay uint8 [N, C, H, W] and text stays uint8 character numbers [N, length], a quarter to
an eighth of what the network reads; `inputs` normalises just the examples asked for.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from gradwire.core.key import Key
from gradwire.data.augment import crop_and_flip
from gradwire.data.moving import onto

Split = Literal["train", "test"]

_CPU = torch.device("cpu")


@lru_cache(maxsize=16)  # the copies to a device would take longer than the arithmetic
def _moments(
    mean: tuple[float, ...], std: tuple[float, ...], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Mean and deviation as [C, 1, 1], which broadcasts over any leading dimensions."""
    return (
        torch.tensor(mean, device=device).reshape(-1, 1, 1),
        torch.tensor(std, device=device).reshape(-1, 1, 1),
    )


@dataclass(frozen=True, eq=False, repr=False)
class Dataset:
    name: str
    kind: Literal["image", "text"]
    train_inputs: Tensor  # uint8, [N, C, H, W] or [N, length]
    train_targets: Tensor  # uint8, [N] labels or [N, length] next characters
    test_inputs: Tensor
    test_targets: Tensor
    num_classes: int  # labels, or characters in the vocabulary
    mean: tuple[float, ...] = ()  # per channel over the training set, in pixel values
    std: tuple[float, ...] = ()
    vocabulary: str = ""  # text: the character that each number stands for
    roles: tuple[Tensor, ...] | None = None  # train indices of each speaking role, int64
    augmentable: bool = False  # crops and mirror images are as good as the original

    def __post_init__(self) -> None:
        for split in ("train", "test"):
            inputs, targets = self._tensors(split)
            if len(inputs) != len(targets):
                raise ValueError(
                    f"{self.name}: {len(inputs)} {split} inputs but {len(targets)} targets; "
                    "give one target per input"
                )
        if self.kind == "image":
            channels = self.train_inputs.shape[1]
            if not len(self.mean) == len(self.std) == channels:
                raise ValueError(
                    f"{self.name}: images of {channels} channels need as many means and "
                    f"deviations, got {len(self.mean)} and {len(self.std)}"
                )

    def __repr__(self) -> str:
        shape = list(self.input_shape)
        return f"<{self.name}: {self.num_train} train, {self.num_test} test, {self.kind} {shape}>"

    @property
    def num_train(self) -> int:
        return len(self.train_inputs)

    @property
    def num_test(self) -> int:
        return len(self.test_inputs)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Of one example: (C, H, W) or (length,)."""
        return tuple(self.train_inputs.shape[1:])

    def inputs(
        self, indices: Tensor, device: torch.device = _CPU, split: Split = "train"
    ) -> Tensor:
        """What the network reads: float32 images of mean 0 and deviation 1, or int64 characters.

        `indices` may have any shape, for example [num_workers, batch]; it comes first in the
        result's shape.
        """
        compact, _ = self._tensors(split)
        chosen = compact[onto(indices, compact.device)].to(device)
        if self.kind == "text":
            return chosen.to(torch.int64)
        mean, std = _moments(self.mean, self.std, device)
        return (chosen.to(torch.float32) - mean) / std

    def targets(
        self, indices: Tensor, device: torch.device = _CPU, split: Split = "train"
    ) -> Tensor:
        """What the network should answer, int64: labels, or [..., length] next characters."""
        _, compact = self._tensors(split)
        return compact[onto(indices, compact.device)].to(device).to(torch.int64)

    def augment(self, batch: Tensor, key: Key, first: int = 0) -> Tensor:
        """Random crops and mirror images of a normalised batch; unchanged unless augmentable.

        `first` is the position of `batch[0]` in the global batch: with a shared key and
        first = rank * batch_size, n workers draw what one worker with the whole batch draws.
        """
        return crop_and_flip(batch, key, first) if self.augmentable else batch

    def to(self, device: torch.device) -> "Dataset":
        """The same data set, its tensors held on `device`: saves the copy of every batch."""
        return replace(
            self,
            train_inputs=self.train_inputs.to(device),
            train_targets=self.train_targets.to(device),
            test_inputs=self.test_inputs.to(device),
            test_targets=self.test_targets.to(device),
        )

    def _tensors(self, split: str) -> tuple[Tensor, Tensor]:
        if split == "train":
            return self.train_inputs, self.train_targets
        if split == "test":
            return self.test_inputs, self.test_targets
        raise ValueError(f"split must be 'train' or 'test', got {split!r}")
