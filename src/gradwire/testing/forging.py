"""Messages of a dishonest peer: changed values with a valid checksum."""

import zlib

import torch
from torch import Tensor

from gradwire.core.payload import DTYPES


def forge_floats(message: Tensor, value: float) -> Tensor:
    """The message with this value in place of every float in it, and the right checksum."""
    if message.is_floating_point():
        return torch.full_like(message, value)
    data = bytes(message.reshape(-1).tolist()) if message.dtype == torch.uint8 else b""
    if len(data) < 8 or data[0] != 0x57 or message.dim() != 1:
        return message
    changed = bytearray(data)
    for dtype, start, stop in _floats(data):
        part = torch.full(((stop - start) // dtype.itemsize,), value, dtype=dtype)
        changed[start:stop] = bytes(part.view(torch.uint8).tolist())
    # A checksum is linear, so that of the changed bytes needs no knowledge of where it began.
    crc = int.from_bytes(data[4:8], "little") ^ _crc(data) ^ _crc(bytes(changed))
    changed[4:8] = crc.to_bytes(4, "little")
    return torch.tensor(list(changed), dtype=torch.uint8)


def _crc(data: bytes) -> int:
    return zlib.crc32(data[8:], zlib.crc32(data[:4]))


def _floats(data: bytes) -> list[tuple[torch.dtype, int, int]]:
    """Where the floating-point parts of a payload lie; see core/payload.py."""
    at, parts = 8, []
    for _ in range(data[2]):
        dtype, numel, shift = DTYPES[data[at]], 0, 0
        at += 1
        while True:
            numel |= (data[at] & 0x7F) << shift
            shift, at = shift + 7, at + 1
            if data[at - 1] < 0x80:
                break
        parts.append((dtype, numel))
    widest = max((dtype.itemsize for dtype, numel in parts), default=1)
    start, found = -(-at // widest) * widest, []
    for dtype, numel in sorted(parts, key=lambda part: -part[0].itemsize):
        if dtype.is_floating_point:
            found.append((dtype, start, start + numel * dtype.itemsize))
        start += numel * dtype.itemsize
    return found


def forge_checksum(data: bytes, context: int) -> bytes:
    """With the checksum that belongs to these bytes, for a codec and tensor of this context."""
    if len(data) < 8:
        return data
    crc = zlib.crc32(data[8:], zlib.crc32(data[:4], context))
    return data[:4] + crc.to_bytes(4, "little") + data[8:]
