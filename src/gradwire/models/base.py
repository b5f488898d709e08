"""What a network of the experiments is: an expression that builds a module, with its loss.

A `Model` holds hyper-parameters only; `build` makes a fresh `nn.Module` for the shape of the
data. Images have an `input_shape` of (channels, height, width); text has (length,), int64
symbols, and a class per symbol of the vocabulary.
"""

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradwire.core.notation import Expression


class Model(Expression, ABC):
    """A network architecture with its hyper-parameters."""

    @abstractmethod
    def build(self, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
        """A freshly initialised module; it draws from torch's global generator."""

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Mean loss; outputs are logits [..., num_classes], targets int64 [...]."""
        return F.cross_entropy(outputs.flatten(0, -2), targets.flatten())

    def correct(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """How many targets [...] are the argmax of their outputs [..., num_classes]."""
        return (outputs.argmax(dim=-1) == targets).sum()

    def count(self, targets: Tensor) -> int:
        """How many targets there are: the weight of a batch in means over batches."""
        return targets.numel()


def build_seeded(
    model: Model, input_shape: tuple[int, ...], num_classes: int, seed: int
) -> nn.Module:
    """`model.build` with initial weights that depend on the seed alone.

    Torch's global generator is left as it was.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would reseed CUDA too
        return model.build(input_shape, num_classes)


def check_image_shape(model: Model, input_shape: tuple[int, ...]) -> None:
    if len(input_shape) != 3 or min(input_shape) < 1:
        raise ValueError(
            f"{model} needs images, an input shape (channels, height, width), got {input_shape}. "
            "Choose an image data set, or mlp for flat inputs."
        )


def check_text_shape(model: Model, input_shape: tuple[int, ...]) -> None:
    if len(input_shape) != 1 or min(input_shape) < 1:
        raise ValueError(
            f"{model} needs text, an input shape (length,), got {input_shape}. "
            "Choose a text data set, or mlp, mnist_cnn or resnet20 for images."
        )
