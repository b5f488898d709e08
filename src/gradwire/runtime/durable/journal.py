"""The write-ahead log of a server: what has arrived, in order, as a file of checked records.

A file begins with a header of 40 bytes: magic "GWJL", version u32, generation u64, the fingerprint
of the job (16 bytes), zero u32, CRC-32 u32. Each record has

    0   magic "GWRC"                    8   length of what follows, u64
    4   CRC-32                          16  committed, u64
    24  kind u8, flags u8, zero u16, source i32, job u32, length of the block u32, tag u64,
        number u64, time f64, then the block of the message (frames.py), then its payload

`committed` is the length of the file when it was last known to be on disk as this record was
written. The checksum starts from fingerprint, generation and the record's own place, so that a
record counts nowhere else.

After a crash the end of the file may be missing or torn, in any order of its pages: what was
appended since the last commit, on which no other node depends. It is cut off. A record that cannot
be read, though a later record shows that it had been committed, is damage: then nothing is cut off,
and reading stops with a `DamagedError`.
"""

import logging
import mmap
import os
import struct
import zlib
from collections import deque
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

import torch

from gradwire.runtime.process import frames
from gradwire.runtime.process.frames import Headers
from gradwire.runtime.process.transport import ARRIVED, DONE, GOODBYE, JOINED, LOST, Arrival
from gradwire.runtime.storage.files import DamagedError, naming, sync_folder

# What else is in a journal: a wait of the program that timed out, and how far links are.
TIMED_OUT, LINKS = "timed out", "links"

_KINDS: Final = (ARRIVED, DONE, GOODBYE, LOST, JOINED, TIMED_OUT, LINKS)
_MAGIC, _VERSION = b"GWJL", 1
_HEAD = struct.Struct("<4sIQ16sI")
_HEAD_NBYTES = _HEAD.size + 4
_RECORD_MAGIC = b"GWRC"
_RECORD = struct.Struct("<4sIQQ")
_BODY = struct.Struct("<BBHiIIQQd")
_LINK = struct.Struct("<idQ")
_IS_WHOLE, _HAS_TIME = 1, 2  # flags
_MAX_BLOCK_NBYTES = 1 << 30  # it has been checked when it came from the network

_log = logging.getLogger(__name__)
_MAX_PIECES = 512  # in one call
Buffer = bytes | memoryview


class _NotStored:
    """In place of a message that its sender still has."""

    def __repr__(self) -> str:
        return "NOT_STORED"


NOT_STORED = _NotStored()


def sync(handle: int) -> None:
    """Returns when the file's contents are on disk."""
    os.fdatasync(handle)


def write(handle: int, pieces: list[Buffer]) -> None:
    """Hands all of them to the operating system."""
    left = deque(memoryview(piece).cast("B") for piece in pieces if len(piece))
    while left:
        done = os.writev(handle, list(islice(left, _MAX_PIECES)))
        while left and done >= len(left[0]):
            done -= len(left.popleft())
        if done:
            left[0] = left[0][done:]


# Records.


def encode(arrival: Arrival, headers: Headers, is_whole: bool = True) -> list[Buffer]:
    """An arrival as bytes; if not `is_whole`, without the message, which its sender keeps."""
    kind, src, job, tag, message, time_s, number = arrival
    flags = (_IS_WHOLE if is_whole else 0) | (0 if time_s is None else _HAS_TIME)
    rest: list[Buffer] = []
    block_nbytes = 0
    if kind == ARRIVED and is_whole:
        packed = frames.pack(job, tag, message, headers, _MAX_BLOCK_NBYTES)
        rest = [packed.block.numpy().data]
        block_nbytes = packed.block.numel()
        if packed.payload is not None:
            rest.append(packed.payload.numpy().data)
    elif kind == LOST:
        rest = [str(message).encode()]
    elif kind == LINKS:
        links = message.items()
        rest = [
            b"".join(
                _LINK.pack(rank, incarnation, received) for rank, (incarnation, received) in links
            )
        ]
    code, place = _KINDS.index(kind), 0.0 if time_s is None else time_s
    return [_BODY.pack(code, flags, 0, src, job, block_nbytes, tag, number, place), *rest]


def peek(body: memoryview) -> Arrival:
    """The arrival without its message; `NOT_STORED` stands for one that only its sender has."""
    code, flags, _, src, job, _, tag, number, place = _BODY.unpack_from(body)
    kind, message = _KINDS[code], cast(Any, None)
    if not flags & _IS_WHOLE:
        message = NOT_STORED
    elif kind == LINKS:
        links = _LINK.iter_unpack(body[_BODY.size :])
        message = {rank: (incarnation, received) for rank, incarnation, received in links}
    return Arrival(kind, src, job, tag, message, place if flags & _HAS_TIME else None, number)


def decode(body: memoryview, headers: Headers, device: torch.device | None = None) -> Arrival:
    """The arrival that `encode` was given, in memory of its own."""
    arrival = peek(body)
    rest = body[_BODY.size :]
    if arrival.kind == LOST:
        return arrival._replace(message=bytes(rest).decode())
    if arrival.kind != ARRIVED or arrival.message is NOT_STORED:
        return arrival
    block_nbytes = _BODY.unpack_from(body)[5]
    frame = frames.unpack(rest[:block_nbytes], headers, block_nbytes=_MAX_BLOCK_NBYTES)
    first = frame.start or block_nbytes
    # Memory of its own, aligned for every dtype.
    payload = torch.empty(frame.nbytes, dtype=torch.uint8)
    if frame.nbytes:
        payload.numpy().data[:] = rest[first : first + frame.nbytes]
    if frame.on_device and device is not None:
        payload = payload.to(device)
    return arrival._replace(message=frame.message(payload))


# Files.


class Journal:
    """A journal to write. `end`: the file exists, and is cut off there."""

    def __init__(
        self, path: Path, fingerprint: bytes, generation: int, end: int | None = None
    ) -> None:
        self._seed = _seed(fingerprint, generation)
        self._path = path
        with naming(path):
            self._file = path.open("wb" if end is None else "r+b", buffering=0)
        self._pieces: list[Buffer] = []  # not written yet
        if end is None:
            head = _HEAD.pack(_MAGIC, _VERSION, generation, fingerprint, 0)
            self._pieces = [head, struct.pack("<I", zlib.crc32(head))]
            end = _HEAD_NBYTES
        else:
            with naming(path):
                self._file.truncate(end)
                self._file.seek(end)
        self._end = end
        self._committed = 0
        # What is found after a crash may be in memory only, and is about to be acted upon.
        self.commit()
        sync_folder(path.parent)

    @property
    def nbytes(self) -> int:
        """The size of all records."""
        return self._end - _HEAD_NBYTES

    def append(self, pieces: list[Buffer]) -> None:
        """Adds a record; its bytes must not change before they are written."""
        length = sum(len(piece) for piece in pieces)
        rest = struct.pack("<QQ", length, self._committed)
        crc = _place(self._seed, self._end)
        for piece in (rest, *pieces):
            crc = zlib.crc32(piece, crc)
        self._pieces += [_RECORD_MAGIC + struct.pack("<I", crc) + rest, *pieces]
        self._end += _RECORD.size + length

    def write(self) -> None:
        """Hands all to the operating system: it survives the process, but not the machine."""
        if self._pieces:
            with naming(self._path):
                write(self._file.fileno(), self._pieces)
            self._pieces = []

    def commit(self) -> None:
        """Returns when all is on disk."""
        if self._committed < self._end:
            self.write()
            with naming(self._path):
                sync(self._file.fileno())
            self._committed = self._end

    def close(self) -> None:
        self._file.close()


class JournalContents(NamedTuple):
    """The records of a journal that was read."""

    bodies: list[memoryview]  # of its records, mapped
    end: int


def read(path: Path, fingerprint: bytes, generation: int) -> JournalContents | None:
    """The records of a journal; None if its header was not written yet."""
    with naming(path, "read"), path.open("rb") as file:
        size = path.stat().st_size
        if size == 0:
            return None
        view = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    if not _is_head(view, path, fingerprint, generation):
        if size > _HEAD_NBYTES:
            raise DamagedError(f"{path} has no valid header, but records")
        return None
    seed = _seed(fingerprint, generation)
    bodies, end = [], _HEAD_NBYTES
    while end < size:
        body = _body_at(view, end, seed)
        if body is None:
            _check_tail(view, end, seed, path)
            _log.warning("%s: the last %d bytes were not committed; cut off", path, size - end)
            break
        bodies.append(body)
        end += _RECORD.size + len(body)
    return JournalContents(bodies, end)


def _is_head(view: memoryview, path: Path, fingerprint: bytes, generation: int) -> bool:
    if len(view) < _HEAD_NBYTES:
        return False
    magic, version, its_generation, its_fingerprint, _ = _HEAD.unpack_from(view)
    if struct.unpack_from("<I", view, _HEAD.size)[0] != zlib.crc32(view[: _HEAD.size]):
        return False
    if magic != _MAGIC or version != _VERSION or its_generation != generation:
        raise DamagedError(f"{path} is no journal of version {_VERSION}, generation {generation}")
    if its_fingerprint != fingerprint:
        raise ValueError(f"{path} is of another job. Choose another folder, or empty this one.")
    return True


def _body_at(view: memoryview, start: int, seed: int) -> memoryview | None:
    """The body of the record that begins here, if there is one."""
    if start + _RECORD.size > len(view):
        return None
    magic, crc, length, _ = _RECORD.unpack_from(view, start)
    first = start + _RECORD.size
    if magic != _RECORD_MAGIC or length < _BODY.size or first + length > len(view):
        return None
    expected = zlib.crc32(view[start + 8 : first + length], _place(seed, start))
    return view[first : first + length] if crc == expected else None


def _check_tail(view: memoryview, start: int, seed: int, path: Path) -> None:
    """Raises if what begins here had been committed, as a later record says."""
    for later in _places_of(view, _RECORD_MAGIC, start + 1):
        if _body_at(view, later, seed) is not None:
            committed = _RECORD.unpack_from(view, later)[3]
            if committed > start:
                raise DamagedError(
                    f"{path}: the record at byte {start} is damaged, and the one at {later} was "
                    f"written when {committed} bytes had been committed. What was acknowledged "
                    "cannot be recovered; put back a copy of the folder, or start a new run."
                )


def _places_of(view: memoryview, what: bytes, start: int) -> Iterator[int]:
    whole = view.obj
    assert isinstance(whole, mmap.mmap)
    place = whole.find(what, start)
    while place >= 0:
        yield place
        place = whole.find(what, place + 1)


def _seed(fingerprint: bytes, generation: int) -> int:
    return zlib.crc32(struct.pack("<16sQ", fingerprint, generation))


def _place(seed: int, start: int) -> int:
    return zlib.crc32(struct.pack("<Q", start), seed)
