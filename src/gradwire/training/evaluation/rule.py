"""Which way of evaluation suits a module on a device. TODO"""

from typing import Literal

import torch
from torch import nn

Mode = Literal["auto", "vmap", "sequential"]


def resolve(mode: Mode, module: nn.Module, device: torch.device) -> Literal["vmap", "sequential"]:
    if mode == "auto":
        return "sequential"
    return mode
