"""Sealed files: what `torch.save` writes, behind a header with a checksum.

The header has 64 bytes: magic "GWSF", version u32, kind (8 bytes), number u64 (a step or a
generation), length of the body u64, fingerprint of what the file belongs to (16 bytes), BLAKE2b of
16 bytes over the body and the header before it. So a file with any bit changed, cut short, or in
the place of another one is refused. It is read by `torch.load(weights_only=True)`, after the check.
"""

import io
import pickle
import struct
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import torch

from gradwire.runtime.storage.files import DamagedError, naming, replacing

_MAGIC, _VERSION = b"GWSF", 2
_HEAD = struct.Struct("<4sI8sQQ16s")
_DIGEST_NBYTES = 16
_HEAD_NBYTES = _HEAD.size + _DIGEST_NBYTES
_OLDER = (b"PK\x03\x04", b"GWST")  # without a header, or with another one
_UNREADABLE = (
    RuntimeError,
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    EOFError,
    pickle.UnpicklingError,
)


class Seal(NamedTuple):
    """Identifies a file: a kind, a number, and a text that identifies its owner."""

    kind: str  # 8 ASCII characters at most
    number: int = 0
    owner: str = ""

    @property
    def fingerprint(self) -> bytes:
        return blake2b(self.owner.encode(), digest_size=_DIGEST_NBYTES).digest()


def save(path: Path, seal: Seal, state: Any) -> None:
    """Replaces the file atomically, without a copy of the whole in memory."""
    with replacing(path) as file:
        write(file, seal, state)


def write(file: BinaryIO, seal: Seal, state: Any) -> None:
    """Writes a sealed file into an empty one."""
    file.write(bytes(_HEAD_NBYTES))
    hashing = _Hashing(file)
    save_plain(cast(BinaryIO, hashing), state)
    kind = seal.kind.encode("ascii")
    assert len(kind) <= 8, f"a kind has 8 characters at most: {seal.kind}"
    head = _HEAD.pack(_MAGIC, _VERSION, kind, seal.number, hashing.nbytes, seal.fingerprint)
    hashing.hash.update(head)
    file.seek(0)
    file.write(head + hashing.hash.digest())


def save_plain(file: BinaryIO, state: Mapping[str, Any]) -> None:
    """`torch.save`, but a full disk is an `OSError`, not a wrong position."""
    try:
        torch.save(state, file)
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise


def load(path: Path, seal: Seal) -> Any:
    """What was saved; a damaged file is a `DamagedError` that names it."""
    with naming(path, "read"), path.open("rb") as file:
        raw, body = file.read(_HEAD_NBYTES), file.read()
    if raw[:4] in _OLDER:
        raise DamagedError(f"{path} was written by an older gradwire, without a checksum")
    if len(raw) < _HEAD_NBYTES:
        raise DamagedError(f"{path} is damaged: it is cut short")
    head, digest = raw[: _HEAD.size], raw[_HEAD.size :]
    magic, version, kind, number, length, fingerprint = _HEAD.unpack(head)
    if magic == _MAGIC and version != _VERSION:
        raise DamagedError(
            f"{path} is damaged, or was written by another gradwire: its format is {version}, "
            f"this one reads {_VERSION}"
        )
    hashed = blake2b(body, digest_size=_DIGEST_NBYTES)
    hashed.update(head)
    if magic != _MAGIC or length != len(body) or hashed.digest() != digest:
        raise DamagedError(f"{path} is damaged: its checksum does not fit what is in it")
    if (kind.rstrip(b"\0"), number) != (seal.kind.encode("ascii"), seal.number):
        raise DamagedError(
            f"{path} is not the file that its name says: it is {kind.rstrip(bytes(1)).decode()} "
            f"{number}, not {seal.kind} {seal.number}"
        )
    if fingerprint != seal.fingerprint:
        raise ValueError(f"{path} is of another job or rank; put the right file in its place")
    try:
        return torch.load(io.BytesIO(body), weights_only=True)
    except _UNREADABLE as error:
        raise DamagedError(f"{path} cannot be read by this torch: {error}") from error


class _Hashing(io.RawIOBase):
    """Writes to a file, and hashes what it writes."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.hash = blake2b(digest_size=_DIGEST_NBYTES)
        self.nbytes = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self.hash.update(view)
        self.nbytes += len(view)
        self.file.write(view)
        return len(view)
