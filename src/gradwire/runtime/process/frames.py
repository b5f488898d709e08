"""A message as bytes.

    0   magic "GWFR"                    12  job, u32
    4   version                         16  hash of the tag, u64
    5   kind                            24  length of the payload, u64
    6   dtype code; 255: no tensor      32  length of the header object, u32
    7   number of dimensions            36  flags (1: the tensor lay on an accelerator;
                                            2: the payload goes directly), u16
    8   zero, u32                       38  zero, u16
    40  the dimensions, u64 each, then the header object, then the payload if there is room

All this lies in a block of at most `BLOCK_NBYTES`, for which a receiver always has room. A payload
that has no room in it follows as a buffer of its own, which is not copied. Transports that know the
length of a block may allow longer ones, for long header objects; payloads are inside up to the same
length, unless both ends agree on another (`inline_nbytes`). Tags travel as hashes, since a receiver
knows the tag that it waits for. A tag is text, numbers and None in nested tuples.

A header object is a frozen dataclass of plain values whose class is on a list: see headers.py.
Nothing from the network is trusted: anything unexpected is a `WireError`, raised before anything is
allocated.
"""

import json
import struct
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from math import isnan
from types import NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradwire.core.errors import WireError
from gradwire.core.node import Framed, Tag
from gradwire.core.payload import DTYPES
from gradwire.runtime.process.headers import Headers as Headers

BLOCK_NBYTES = 32768
MAX_PAYLOAD_NBYTES = 1 << 32
MAX_DIMS = 8

TENSOR, FRAMED, GOODBYE, DONE = range(4)  # kinds
_KINDS = (TENSOR, FRAMED, GOODBYE, DONE)

_MAGIC, _VERSION = b"GWFR", 1
_FIXED = struct.Struct("<4sBBBBIIQQIHH")
_NO_TENSOR = 255
_ON_DEVICE, _DIRECT = 1, 2
_DTYPES = (*DTYPES, torch.bool)
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}


class Frame(NamedTuple):
    """The content of a block, without the payload."""

    kind: int
    job: int
    tag: int  # the hash
    header: Any
    dtype: torch.dtype | None  # None: no tensor
    shape: tuple[int, ...]
    nbytes: int  # of the payload
    on_device: bool
    start: int  # where the payload begins in the block; 0: it follows by itself
    is_direct: bool = False  # the payload comes from accelerator to accelerator
    total_nbytes: int = 0  # of the block and of the payload

    @property
    def num_to_come(self) -> int:
        """Bytes that follow the block."""
        return 0 if self.start else self.nbytes

    def message(self, payload: Tensor) -> Any:
        """The message for the program, given the payload as a uint8 vector of its own memory."""
        data = None
        if self.dtype is not None:
            # A byte that is neither 0 nor 1 must not become a bool.
            flat = payload != 0 if self.dtype is torch.bool else payload.view(self.dtype)
            data = flat.reshape(self.shape)
        return Framed(self.header, data) if self.kind == FRAMED else data


@lru_cache(maxsize=4096)
def tag_hash(tag: Tag) -> int:
    """64 bits that tags share if, and practically only if, they are equal."""
    return int.from_bytes(blake2b(_canonical(tag).encode(), digest_size=8).digest(), "little")


def _canonical(tag: Any) -> str:
    """Equal tags have the same text, also where one has 1 and the other 1.0 or True."""
    kind = type(tag)
    if kind is tuple:
        return "(" + "".join(_canonical(item) + "," for item in tag) + ")"
    if kind is str:
        return json.dumps(tag)
    if kind is NoneType:
        return "None"
    if kind is int or kind is bool:
        return str(int(tag))
    if kind is float and not isnan(tag):
        return str(int(tag)) if tag.is_integer() else repr(tag)
    raise ValueError(
        f"a tag is made of str, int, float, bool, None and tuples of these, got {tag!r}"
    )


@dataclass(frozen=True, slots=True)
class Packed:
    """The bytes of a message: a block, and a payload that has no room in it."""

    block: Tensor  # uint8
    payload: Tensor | None
    is_direct: bool = False  # the payload goes from accelerator to accelerator

    @property
    def nbytes(self) -> int:
        return self.block.numel() + (0 if self.payload is None else self.payload.numel())


def frame_nbytes(message: Any, headers: Headers) -> int:
    """The length of a message as `pack` makes it."""
    data = message.data if isinstance(message, Framed) else message
    header = len(headers.encode(message.header)) if isinstance(message, Framed) else 0
    if data is None:
        return _FIXED.size + header
    return int(_FIXED.size + 8 * data.dim() + header + data.numel() * data.element_size())


def pack(
    job: int,
    tag: int,
    message: Any,
    headers: Headers,
    block_nbytes: int = BLOCK_NBYTES,
    *,
    inline_nbytes: int = BLOCK_NBYTES,
    copied: Tensor | None = None,
    is_direct: bool = False,
) -> Packed:
    """A tensor, or a `Framed`, as bytes. The payload is the tensor's own memory if it can be.

    `copied`: a copy of the tensor on the host. `is_direct`: the payload goes from accelerator to
    accelerator.
    """
    kind, data, header = TENSOR, message, b""
    if isinstance(message, Framed):
        kind, data, header = FRAMED, message.data, headers.encode(message.header)
    elif not isinstance(message, Tensor):
        raise ValueError(f"a message is a tensor or a Framed, got {type(message).__name__}")
    return _pack(kind, job, tag, data, header, block_nbytes, inline_nbytes, copied, is_direct)


def pack_control(kind: int, job: int = 0, number: int = 0) -> Packed:
    """A frame without a message: DONE with run number `number`, or GOODBYE.

    With GOODBYE the number is 1 + the rank because of whose loss this one leaves, or 0.
    """
    return _pack(kind, job, number, None, b"")


def _pack(
    kind: int,
    job: int,
    tag: int,
    data: Tensor | None,
    header: bytes,
    block_nbytes: int = BLOCK_NBYTES,
    inline_nbytes: int = BLOCK_NBYTES,
    copied: Tensor | None = None,
    is_direct: bool = False,
) -> Packed:
    shape: tuple[int, ...] = ()
    code, nbytes, flags, payload = _NO_TENSOR, 0, 0, None
    if data is not None:
        if data.dtype not in _CODES or data.dim() > MAX_DIMS:
            raise ValueError(f"cannot send a {data.dim()}-d tensor of {data.dtype}")
        code, shape = _CODES[data.dtype], tuple(data.shape)
        flags = 0 if data.device.type == "cpu" else _ON_DEVICE
        nbytes = data.numel() * data.element_size()
        if nbytes:
            if not is_direct:
                data = data.detach().cpu() if copied is None else copied
            flags |= _DIRECT if is_direct else 0
            payload = data.detach().contiguous().reshape(-1).view(torch.uint8)
    fixed = _FIXED.pack(
        _MAGIC, _VERSION, kind, code, len(shape), 0, job, tag, nbytes, len(header), flags, 0
    )
    text = fixed + struct.pack(f"<{len(shape)}Q", *shape) + header
    if len(text) > block_nbytes:
        raise ValueError(
            f"a header object of {len(header)} bytes is too long: with the rest it must fit into "
            f"{block_nbytes} bytes"
        )
    is_direct = bool(flags & _DIRECT)
    head = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    if payload is None or is_direct or len(text) + nbytes > inline_nbytes:
        return Packed(head, payload, is_direct)
    return Packed(torch.cat([head, payload]), None)


def unpack(
    block: bytes | memoryview,
    headers: Headers,
    max_nbytes: int = MAX_PAYLOAD_NBYTES,
    *,
    block_nbytes: int = BLOCK_NBYTES,
    inline_nbytes: int = BLOCK_NBYTES,
    is_exact: bool = False,
) -> Frame:
    """Reads a block; raises `WireError` unless everything in it is as it should be.

    Bytes behind the frame are ignored unless the block `is_exact`: some transports do not say how
    much came, and read into a buffer of `BLOCK_NBYTES`.
    """
    if not _FIXED.size <= len(block) <= block_nbytes:
        raise WireError(f"a block has {_FIXED.size} .. {block_nbytes} bytes, got {len(block)}")
    fixed = _FIXED.unpack_from(block)
    magic, version, kind, code, num_dims, zero, job, tag, nbytes, length, flags, also_zero = fixed
    if magic != _MAGIC or version != _VERSION:
        raise WireError(f"no frame of version {_VERSION}: it begins with {bytes(block[:5])!r}")
    if kind not in _KINDS or zero or also_zero or flags & ~(_ON_DEVICE | _DIRECT):
        raise WireError(f"unknown kind {kind} or flags {flags} of a frame")
    if num_dims > MAX_DIMS:
        raise WireError(f"{num_dims} dimensions; there are at most {MAX_DIMS}")
    end = _FIXED.size + 8 * num_dims + length
    if end > len(block) or (length and kind != FRAMED):
        raise WireError(f"a header object of {length} bytes does not belong into this frame")
    shape = struct.unpack_from(f"<{num_dims}Q", block, _FIXED.size)
    dtype = None
    if code == _NO_TENSOR:
        if num_dims or nbytes or flags or kind == TENSOR:
            raise WireError("a frame without a tensor has no shape, no payload and no place")
    elif code >= len(_DTYPES) or kind not in (TENSOR, FRAMED):
        raise WireError(f"dtype code {code} in a frame of kind {kind}")
    else:
        dtype = _DTYPES[code]
        _check_size(shape, dtype.itemsize, nbytes, max_nbytes)
    header = headers.decode(bytes(block[end - length : end]))
    is_direct = bool(flags & _DIRECT)
    if is_direct and not nbytes:
        raise WireError("a payload of no bytes cannot go directly")
    is_inside = not is_direct and 0 < nbytes <= inline_nbytes - end
    if is_inside and end + nbytes > len(block):
        raise WireError(f"the block ends {end + nbytes - len(block)} bytes before its payload does")
    stop = end + nbytes if is_inside else end
    if is_exact and stop != len(block):
        raise WireError(f"the block continues for {len(block) - stop} bytes behind its frame")
    start = end if is_inside else 0
    on_device = bool(flags & _ON_DEVICE)
    total = end + nbytes
    return Frame(kind, job, tag, header, dtype, shape, nbytes, on_device, start, is_direct, total)


def _check_size(shape: tuple[int, ...], itemsize: int, nbytes: int, max_nbytes: int) -> None:
    size, span = itemsize, itemsize  # span: without dimensions of zero, which strides are made of
    for dim in shape:
        size *= dim
        span *= dim or 1
    if nbytes > max_nbytes or span > max_nbytes:
        raise WireError(f"a tensor of {max(nbytes, span)} bytes; the limit is {max_nbytes}")
    if size != nbytes:
        raise WireError(f"shape {shape} needs {size} bytes, the payload has {nbytes}")
