"""The two-convolution network of the MNIST example of Horovod (Sergeev and Del Balso 2018), which
BytePS (Jiang et al. 2020) and the parameter-server experiments took over: 21,840 parameters,
with dropout after the second convolution and after the first dense layer.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from gradwire.models.base import Model


@dataclass(frozen=True, repr=False)
class MnistCNN(Model):
    """Two 5 x 5 convolutions and two dense layers with dropout, for 28 x 28 images."""

    paper: ClassVar[str] = (
        "Sergeev and Del Balso 2018, Horovod: fast and easy distributed deep learning in TensorFlow"
    )

    def build(self, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
        if len(input_shape) != 3 or input_shape[1:] != (28, 28):
            raise ValueError(
                f"{self} needs images of 28 x 28, an input shape (channels, 28, 28), "
                f"got {input_shape}. Choose mnist, or a model for any size: mlp, resnet20."
            )
        return _ConvNet(input_shape[0], num_classes)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.nll_loss(outputs, targets)  # the network ends in log_softmax


class _ConvNet(nn.Module):
    def __init__(self, channels: int, num_classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 10, kernel_size=5)
        self.conv2 = nn.Conv2d(10, 20, kernel_size=5)
        self.conv2_drop = nn.Dropout2d(0.5)
        self.fc1 = nn.Linear(320, 50)
        self.fc1_drop = nn.Dropout(0.5)
        self.fc2 = nn.Linear(50, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        x = F.relu(F.max_pool2d(self.conv1(images), 2))  # [B, 10, 12, 12]
        x = F.relu(F.max_pool2d(self.conv2_drop(self.conv2(x)), 2))  # [B, 20, 4, 4]
        x = F.relu(self.fc1(x.flatten(1)))
        return F.log_softmax(self.fc2(self.fc1_drop(x)), dim=-1)
