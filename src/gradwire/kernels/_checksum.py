"""Checksums of memory."""

import torch
from torch import Tensor

from gradwire.kernels._dispatch import InTriton, pick, runs_triton
from gradwire.kernels.reference import checksum as reference

_triton = InTriton("checksum")
_ALIGNMENT = 4  # bytes


def crc32(x: Tensor, start: int = 0, crc: int = 0, head: int = 0) -> tuple[int, bytes]:
    """CRC-32, as zlib has it, of the bytes of x from `start` on, continued from `crc`, and the
    first `head` bytes.

    On an accelerator both are computed or copied there, and waited for once.
    """
    if x.dtype != torch.uint8 or x.dim() != 1 or not x.is_contiguous():
        raise ValueError(f"crc32 takes a contiguous vector of uint8, got {x.dtype} {list(x.shape)}")
    if not 0 <= start <= x.numel() or head < 0:
        raise ValueError(f"crc32 cannot start at byte {start} of {x.numel()}, nor give {head}")
    if x.data_ptr() % _ALIGNMENT:
        x = x.clone()
    return pick(x.device, reference.crc32, reference.crc32, _triton.crc32)(x, start, crc, head)


def checks_there(device: torch.device) -> bool:
    """Whether `crc32` computes on this accelerator, and does not copy all bytes to the host."""
    return device.type != "cpu" and runs_triton(device)
