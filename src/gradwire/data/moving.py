"""Copies of small tensors from the CPU to a device."""

import torch
from torch import Tensor


def onto(x: Tensor, device: torch.device) -> Tensor:
    """x on a device; a copy from the CPU does not wait for what the device does."""
    if x.device.type == "cpu" and device.type == "cuda":
        return x.pin_memory().to(device, non_blocking=True)
    return x.to(device)
