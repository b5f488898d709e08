"""A message as bytes.

    0   magic "GWFR"                    12  job, u32
    4   version                         16  hash of the tag, u64
    5   kind                            24  length of the payload, u64
    6   dtype code; 255: no tensor      32  length of the header object, u16
    7   number of dimensions            34  flags (1: the tensor lay on an accelerator), u16
    8   zero, u32                       36  zero, u32
    40  the dimensions, u64 each, then the header object, then the payload if there is room

All this lies in a block of at most `BLOCK_NBYTES`, for which a receiver always has room. A payload
that has no room in it follows by itself, as one buffer that nobody copied. Tags travel as hashes:
whoever waits for one knows it. A tag is text, numbers and None in nested tuples.

A header object is a frozen dataclass of plain values whose class is on a list (`Headers`). It
travels as JSON text and is checked field by field against the declared types. What comes from the
network is never trusted: anything unexpected is a `WireError`, raised before anything is allocated.
"""

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from functools import lru_cache
from hashlib import blake2b
from math import isnan
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from gradwire.core.errors import WireError
from gradwire.core.node import Framed, Tag
from gradwire.core.payload import DTYPES

BLOCK_NBYTES = 32768
MAX_PAYLOAD_NBYTES = 1 << 32
MAX_DIMS = 8

TENSOR, FRAMED, GOODBYE, DONE = range(4)  # kinds
_KINDS = (TENSOR, FRAMED, GOODBYE, DONE)

_MAGIC, _VERSION = b"GWFR", 1
_FIXED = struct.Struct("<4sBBBBIIQQHHI")
_NO_TENSOR = 255
_ON_DEVICE = 1
_DTYPES = (*DTYPES, torch.bool)
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}


class Frame(NamedTuple):
    """What a block says, without the payload."""

    kind: int
    job: int
    tag: int  # the hash
    header: Any
    dtype: torch.dtype | None  # None: no tensor
    shape: tuple[int, ...]
    nbytes: int  # of the payload
    on_device: bool
    start: int  # where the payload begins in the block; 0: it follows by itself

    @property
    def num_to_come(self) -> int:
        """Bytes that follow the block."""
        return 0 if self.start else self.nbytes

    def message(self, payload: Tensor) -> Any:
        """What the program gets, given the payload as a uint8 vector of its own memory."""
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


Check = Callable[[Any], Any]


class Headers:
    """The classes of header objects that may travel, by name."""

    def __init__(self, *classes: type) -> None:
        self._classes: dict[str, type] = {}
        self._fields: dict[type, list[tuple[str, Check]]] = {}
        for cls in classes:
            name = cls.__name__
            assert name not in self._classes, f"two header classes are called {name}"
            if not is_dataclass(cls) or not cls.__dataclass_params__.frozen:  # type: ignore[attr-defined]
                raise TypeError(f"{name} is no frozen dataclass, so it cannot be a header")
            hints = get_type_hints(cls)
            self._classes[name] = cls
            self._fields[cls] = [(one.name, _check_of(hints[one.name])) for one in fields(cls)]

    def encode(self, header: Any) -> bytes:
        if header is None:
            return b""
        checks = self._fields.get(type(header))
        if checks is None:
            raise WireError(
                f"a header of class {type(header).__name__} cannot be sent; this transport knows "
                f"{', '.join(self._classes) or 'none'}"
            )
        values = [check(getattr(header, name)) for name, check in checks]
        return json.dumps([type(header).__name__, *values], separators=(",", ":")).encode()

    def decode(self, text: bytes) -> Any:
        if not text:
            return None
        try:
            name, *values = json.loads(text.decode())
            cls = self._classes[name]
            checks = self._fields[cls]
            if len(values) != len(checks):
                raise WireError(f"{name} has {len(checks)} fields, got {len(values)}")
            return cls(*[check(value) for (_, check), value in zip(checks, values)])
        except WireError:
            raise
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            raise WireError(f"these bytes are no header object: {error!r}") from error


def _check_of(kind: Any) -> Check:
    """A function that returns a value of this type, or raises `WireError`."""
    origin, args = get_origin(kind), get_args(kind)
    if kind in (int, str, bool):
        return lambda value: value if type(value) is kind else _refuse(value, kind)
    if kind is float:
        return lambda value: float(value) if type(value) in (int, float) else _refuse(value, kind)
    if kind is None or kind is NoneType:
        return lambda value: None if value is None else _refuse(value, kind)
    if origin is Literal:
        return lambda value: (
            value
            if any(type(value) is type(arg) and value == arg for arg in args)
            else _refuse(value, kind)
        )
    if origin in (Union, UnionType):
        choices = [_check_of(arg) for arg in args]
        return lambda value: _first(choices, value, kind)
    if origin is tuple and len(args) == 2 and args[1] is Ellipsis:
        item = _check_of(args[0])
        return lambda value: tuple(map(item, _items(value, kind)))
    if origin is tuple:
        items = [_check_of(arg) for arg in args]
        return lambda value: (
            tuple(check(one) for check, one in zip(items, value))
            if len(_items(value, kind)) == len(items)
            else _refuse(value, kind)
        )
    raise TypeError(f"a header field of type {kind} cannot travel: only plain values and tuples")


def _first(choices: list[Check], value: Any, kind: Any) -> Any:
    for choice in choices:
        try:
            return choice(value)
        except WireError:
            pass
    return _refuse(value, kind)


def _items(value: Any, kind: Any) -> Any:
    return value if type(value) in (list, tuple) else _refuse(value, kind)


def _refuse(value: Any, kind: Any) -> Any:
    raise WireError(f"a header field should be {kind}, got {value!r}")


@dataclass(frozen=True, slots=True)
class Packed:
    """What is sent: a block, and a payload that had no room in it."""

    block: Tensor  # uint8
    payload: Tensor | None

    @property
    def nbytes(self) -> int:
        return self.block.numel() + (0 if self.payload is None else self.payload.numel())


def pack(job: int, tag: int, message: Any, headers: Headers) -> Packed:
    """A tensor, or a `Framed`, as bytes. The payload is the tensor's own memory if it can be."""
    if isinstance(message, Framed):
        return _pack(FRAMED, job, tag, message.data, headers.encode(message.header))
    if not isinstance(message, Tensor):
        raise ValueError(f"a message is a tensor or a Framed, got {type(message).__name__}")
    return _pack(TENSOR, job, tag, message, b"")


def pack_control(kind: int, job: int = 0, number: int = 0) -> Packed:
    """A frame without a message: done with run number `number`, or goodbye.

    With a goodbye the number is 1 + the rank that was lost, if it is because of that.
    """
    return _pack(kind, job, number, None, b"")


def _pack(kind: int, job: int, tag: int, data: Tensor | None, header: bytes) -> Packed:
    shape: tuple[int, ...] = ()
    code, nbytes, flags, payload = _NO_TENSOR, 0, 0, None
    if data is not None:
        if data.dtype not in _CODES or data.dim() > MAX_DIMS:
            raise ValueError(f"cannot send a {data.dim()}-d tensor of {data.dtype}")
        code, shape = _CODES[data.dtype], tuple(data.shape)
        flags = 0 if data.device.type == "cpu" else _ON_DEVICE
        nbytes = data.numel() * data.element_size()
        if nbytes:
            payload = data.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    fixed = _FIXED.pack(
        _MAGIC, _VERSION, kind, code, len(shape), 0, job, tag, nbytes, len(header), flags, 0
    )
    text = fixed + struct.pack(f"<{len(shape)}Q", *shape) + header
    if len(text) > BLOCK_NBYTES:
        raise ValueError(
            f"a header object of {len(header)} bytes is too long: with the rest it must fit into "
            f"{BLOCK_NBYTES} bytes"
        )
    block = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    if payload is not None and len(text) + nbytes <= BLOCK_NBYTES:
        block, payload = torch.cat([block, payload]), None
    return Packed(block, payload)


def unpack(
    block: bytes | memoryview, headers: Headers, max_nbytes: int = MAX_PAYLOAD_NBYTES
) -> Frame:
    """Reads a block; raises `WireError` unless everything in it is as it should be.

    What lies behind the end of the frame is of no matter: transports that do not say how much
    came read into a buffer of `BLOCK_NBYTES`.
    """
    if not _FIXED.size <= len(block) <= BLOCK_NBYTES:
        raise WireError(f"a block has {_FIXED.size} .. {BLOCK_NBYTES} bytes, got {len(block)}")
    fixed = _FIXED.unpack_from(block)
    magic, version, kind, code, num_dims, zero, job, tag, nbytes, length, flags, also_zero = fixed
    if magic != _MAGIC or version != _VERSION:
        raise WireError(f"no frame of version {_VERSION}: it begins with {bytes(block[:5])!r}")
    if kind not in _KINDS or zero or also_zero or flags & ~_ON_DEVICE:
        raise WireError(f"unknown kind {kind} or flags {flags} of a frame")
    if num_dims > MAX_DIMS:
        raise WireError(f"{num_dims} dimensions; there are at most {MAX_DIMS}")
    end = _FIXED.size + 8 * num_dims + length
    if end > len(block) or (length and kind != FRAMED):
        raise WireError(f"a header object of {length} bytes does not belong into this frame")
    shape = struct.unpack_from(f"<{num_dims}Q", block, _FIXED.size)
    dtype = None
    if code == _NO_TENSOR:
        if num_dims or nbytes or kind == TENSOR:
            raise WireError("a frame without a tensor has no shape and no payload")
    elif code >= len(_DTYPES) or kind not in (TENSOR, FRAMED):
        raise WireError(f"dtype code {code} in a frame of kind {kind}")
    else:
        dtype = _DTYPES[code]
        _check_size(shape, dtype.itemsize, nbytes, max_nbytes)
    header = headers.decode(bytes(block[end - length : end]))
    is_inside = 0 < nbytes <= BLOCK_NBYTES - end
    if is_inside and end + nbytes > len(block):
        raise WireError(f"the block ends {end + nbytes - len(block)} bytes before its payload does")
    start = end if is_inside else 0
    return Frame(kind, job, tag, header, dtype, shape, nbytes, bool(flags), start)


def _check_size(shape: tuple[int, ...], itemsize: int, nbytes: int, max_nbytes: int) -> None:
    size, span = itemsize, itemsize  # span: without dimensions of zero, which strides are made of
    for dim in shape:
        size *= dim
        span *= dim or 1
    if nbytes > max_nbytes or span > max_nbytes:
        raise WireError(f"a tensor of {max(nbytes, span)} bytes; the limit is {max_nbytes}")
    if size != nbytes:
        raise WireError(f"shape {shape} needs {size} bytes, the payload has {nbytes}")
