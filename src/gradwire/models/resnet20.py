"""ResNet-20 for small images (He et al. 2016, "Deep residual learning for image recognition",
sec. 4.2): 6n + 2 layers with n = 3, widths 16, 32, 64, and shortcuts without parameters
(option A: stride-two subsampling, missing channels padded with zeros); 269,722 parameters.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from gradwire.models.base import Model, check_image_shape

_WIDTHS = (16, 32, 64)
_BLOCKS_PER_WIDTH = 3


@dataclass(frozen=True, repr=False)
class ResNet20(Model):
    """The 20-layer residual network for CIFAR, with batch normalisation."""

    paper: ClassVar[str] = "He et al. 2016, Deep residual learning for image recognition"

    def build(self, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
        check_image_shape(self, input_shape)
        return _ResNet(input_shape[0], num_classes)


class _ResidualBlock(nn.Module):
    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inner, outer, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outer)
        self.conv2 = nn.Conv2d(outer, outer, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outer)
        self.stride = stride
        self.padding = (outer - inner) // 2  # channels of zeros on either side of the shortcut

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        if self.stride > 1:
            x = x[:, :, :: self.stride, :: self.stride]
        if self.padding:
            x = F.pad(x, (0, 0, 0, 0, self.padding, self.padding))
        return F.relu(x + y)


class _ResNet(nn.Module):
    def __init__(self, channels: int, num_classes: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, _WIDTHS[0], 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(_WIDTHS[0])
        blocks: list[nn.Module] = []
        inner = _WIDTHS[0]
        for outer in _WIDTHS:
            for _ in range(_BLOCKS_PER_WIDTH):
                # The first block of a stage widens, and halves the image to pay for it.
                blocks.append(_ResidualBlock(inner, outer, stride=1 if outer == inner else 2))
                inner = outer
        self.blocks = nn.Sequential(*blocks)
        self.fc = nn.Linear(inner, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        x = F.relu(self.bn(self.conv(images)))
        x = self.blocks(x)  # [B, 64, H / 4, W / 4]
        return self.fc(x.mean(dim=(2, 3)))
