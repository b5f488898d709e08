"""The header of a payload: what it says, where the parts lie, and its checksum.

The layout is documented in core/payload.py. Nothing here depends on the bytes of the parts but the
checksum.
"""

import zlib
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.core.binary import ByteReader, write_varint
from gradwire.core.errors import WireError

MAGIC = 0x57
VERSION = 1
FIXED = 8  # bytes before the table of parts
_LEAST_THERE = 1 << 16  # bytes; those of fewer are copied faster than kernels are started
_HEAD = 256  # bytes that are read with a checksum: the header, and parts as short as a scale
# The index of a dtype is its code on the wire.
DTYPES = (
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
)
_CODES = {dtype: code for code, dtype in enumerate(DTYPES)}
PartKind: TypeAlias = tuple[torch.dtype, int]  # dtype and length


class Frame(NamedTuple):
    """What payloads with parts of the same dtypes and lengths have in common."""

    header: bytes  # up to the first part, with zeros for the checksum
    offsets: tuple[int, ...]  # of the parts, in their order
    nbytes: int


def frame(kinds: Mapping[str, PartKind]) -> Frame:
    """The frame of payloads with these parts."""
    return _frame(tuple(kinds.values()))


@lru_cache(maxsize=1024)
def _frame(kinds: tuple[PartKind, ...]) -> Frame:
    assert len(kinds) < 256, "a payload holds at most 255 parts"
    table = _table(kinds)
    offsets, total = layout([(dtype.itemsize, count) for dtype, count in kinds], len(table))
    header = lead_of(len(kinds)) + bytes(4) + table
    return Frame(header + bytes(min(offsets, default=total) - len(header)), tuple(offsets), total)


def seal(buffer: Tensor, header: bytes | bytearray, context: int) -> None:
    """Writes the header, with the checksum, into a buffer on the CPU that has the parts."""
    crc = crc_after(buffer, len(header), crc_of_header(header, context))
    _write(buffer, header, crc)


def crc_after(buffer: Tensor, start: int, crc: int) -> int:
    """CRC-32 of the bytes of a buffer on the CPU from `start` on, continued from `crc`."""
    data: Any = buffer[start:].numpy()
    return zlib.crc32(data, crc)


def checked_there(buffer: Tensor) -> bool:
    """Whether the checksum of a buffer on an accelerator is best computed there."""
    return buffer.numel() >= _LEAST_THERE and kernels.checks_there(buffer.device)


def seal_there(buffer: Tensor, header: bytes | bytearray, context: int) -> None:
    """`seal` of a buffer on an accelerator, which is not copied."""
    crc, _ = kernels.crc32(buffer, len(header), crc_of_header(header, context))
    _write(buffer, header, crc)


def read_there(buffer: Tensor, num_parts: int, context: int) -> tuple[Tensor, int]:
    """The first bytes of a buffer on an accelerator, and its checksum, both in one read."""
    # `read_header` says whether it starts like this.
    start = lead_of(num_parts % 256)
    head = max(_HEAD, longest_header(num_parts))
    crc, first = kernels.crc32(buffer, FIXED, crc_of_header(start, context), head)
    return torch.frombuffer(bytearray(first), dtype=torch.uint8), crc


def _write(buffer: Tensor, header: bytes | bytearray, crc: int) -> None:
    """The header as it is sent."""
    whole = bytearray(header[:4]) + crc.to_bytes(4, "little") + header[FIXED:]
    buffer[: len(header)] = torch.frombuffer(whole, dtype=torch.uint8)


def crc_of_header(header: bytes | bytearray, context: int) -> int:
    """CRC-32 of all bytes of a header but the checksum, continued from `context`."""
    return zlib.crc32(header[FIXED:], zlib.crc32(header[:4], context))


def read_header(
    start: bytes, nbytes: int, names: Sequence[str]
) -> tuple[list[PartKind], list[int], int]:
    """Dtypes and lengths of the parts, their offsets, and the checksum; `WireError` if the first
    bytes are not those of a payload of `nbytes` with these parts."""
    magic, version, num_parts, reserved = start[:4]
    if magic != MAGIC or reserved != 0:
        raise WireError(f"not a gradwire payload: it starts with {magic:#04x}")
    if version != VERSION:
        raise WireError(f"payload version {version}; this gradwire reads version {VERSION}")
    if num_parts != len(names):
        raise WireError(f"{num_parts} parts, expected {len(names)}: {', '.join(names)}")
    kinds, used = _read_table(start[FIXED : longest_header(num_parts)], num_parts)
    offsets, total = layout([(dtype.itemsize, count) for dtype, count in kinds], used)
    if total != nbytes:
        raise WireError(f"{nbytes} bytes, but the header describes {total}")
    return kinds, offsets, int.from_bytes(start[4:FIXED], "little")


def lead_of(num_parts: int) -> bytes:
    """The bytes of a header in front of the checksum."""
    return bytes([MAGIC, VERSION, num_parts, 0])


def code_of(dtype: torch.dtype) -> int:
    """What stands for a dtype in a header."""
    return _CODES[dtype]


def longest_header(num_parts: int) -> int:
    """Bytes that a header has at most, without the padding."""
    # An entry has ten bytes at most: one of dtype, nine of a length below 2^63.
    return FIXED + 10 * num_parts


def packed_nbytes(tensors: Sequence[Tensor]) -> int:
    """Bytes of a payload with these tensors for parts."""
    sizes = [(tensor.element_size(), tensor.numel()) for tensor in tensors]
    return layout(sizes, len(_table((t.dtype, t.numel()) for t in tensors)))[1]


def layout(sizes: Sequence[tuple[int, int]], table_bytes: int) -> tuple[list[int], int]:
    """Offset of each part (itemsize, count), and the length of the whole."""
    widest = max((itemsize for itemsize, _ in sizes), default=1)
    position = FIXED + table_bytes
    position += -position % widest
    offsets = [0] * len(sizes)
    # Widest first: sizes are powers of two, so every part is aligned without a gap.
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i][0]):
        offsets[index] = position
        position += sizes[index][0] * sizes[index][1]
    return offsets, position


def _table(kinds: Iterable[PartKind]) -> bytes:
    """Dtype and length of each part."""
    table = bytearray()
    for dtype, count in kinds:
        table.append(_CODES[dtype])
        write_varint(table, count)
    return bytes(table)


def _read_table(raw: bytes, num_parts: int) -> tuple[list[PartKind], int]:
    """Dtype and length of each part, and how many bytes the table takes."""
    reader = ByteReader(raw, "the table of parts")
    kinds: list[PartKind] = []
    for _ in range(num_parts):
        code = reader.byte()
        if code >= len(DTYPES):
            raise WireError(f"dtype code {code}, expected 0 .. {len(DTYPES) - 1}")
        kinds.append((DTYPES[code], reader.varint()))
    return kinds, reader.position
