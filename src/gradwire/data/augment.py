"""The usual augmentation of small photographs (He et al. 2016, section 4.2): pad by 4 pixels,
crop back at a random place, mirror half of the images. The padding is zero after normalisation,
as there, so it has the colour of the mean rather than black.
"""

import torch
from torch import Tensor

from gradwire.core.key import Key
from gradwire.data.moving import onto

PADDING = 4
_OFFSETS = 2 * PADDING + 1  # places where a crop can start, per axis


def crop_and_flip(batch: Tensor, key: Key, first: int = 0) -> Tensor:
    """`batch` is [N, C, H, W]; image i takes draw number first + i of `key`."""
    if batch.dim() != 4:
        raise ValueError(f"augmentation needs images [N, C, H, W], got {list(batch.shape)}")
    num, channels, height, width = batch.shape
    device = batch.device
    # One draw per image covers row offset, column offset and flip. A key gives the same numbers
    # everywhere: so few are drawn sooner on the CPU than by a hundred small operations on a device.
    draw = onto(key.integers(first + num, 2 * _OFFSETS * _OFFSETS)[first:], device)
    flip, draw = draw % 2, draw // 2
    top, left = draw // _OFFSETS, draw % _OFFSETS

    rows = top[:, None] + torch.arange(height, device=device)  # [N, H]
    across = torch.arange(width, device=device)
    across = torch.where(flip[:, None] == 1, across.flip(0), across)  # [N, W]
    columns = left[:, None] + across
    padded = torch.nn.functional.pad(batch, (PADDING, PADDING, PADDING, PADDING))
    return padded[
        torch.arange(num, device=device)[:, None, None, None],
        torch.arange(channels, device=device)[None, :, None, None],
        rows[:, None, :, None],
        columns[:, None, None, :],
    ]
