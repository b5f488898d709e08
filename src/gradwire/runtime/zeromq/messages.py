"""What nodes say to each other, as bytes.

Every message begins with a header of 64 bytes, its first part:

    0   magic "GWZM"                    24  number of the message on its link, u64
    4   version                         32  length of the payload, u64
    5   kind                            40  acknowledged: up to this number, u64
    6   code of an error, or zero, u16  48  room: what is up to this number does not count, u64
    8   hash of the job, 8 bytes        56  taken: up to this number, u64
    16  source, i32; 20 destination, i32

The last three say how far the sender of this header has come with what the other one sent to it:
taken is what has arrived, acknowledged what need not be kept for it any more. The second part is
the body, the third, with DATA only, a payload that has no room in the body.
"""

import struct
from typing import Any, NamedTuple

from gradwire.runtime.zeromq.refusals import Refusal

VERSION = 1
(
    HELLO,  # a node wants to join
    WAIT,  # not yet: the body says for whom
    WELCOME,  # it is in: its rank and all members
    ERROR,  # the body says why something was refused
    BEAT,  # I am there
    BEATEN,  # the scheduler is, too
    RESUME,  # a connection was made
    RESUMED,  # the answer
    AGAIN,  # something is missing: send again what is above `taken`
    ACK,  # nothing but the header
    ANNOUNCE,  # a large message waits
    GRANT,  # it may come
    DATA,  # a frame; numbered
    EVENT,  # who came or was lost; numbered
) = range(14)
NUMBERED = (DATA, EVENT)
_KINDS = range(14)

# Codes of errors.
REFUSED, CANNOT_JOIN, DECLARED_LOST = range(3)

# Roles.
WORKER, SERVER, SCHEDULER = range(3)
ROLES = ("worker", "server", "scheduler")

# Kinds of events.
IS_LOST, HAS_JOINED = range(2)

NOBODY = -1
IDENTITY_NBYTES = 16
MAX_TEXT_NBYTES = 4096

_MAGIC = b"GWZM"
_HEADER = struct.Struct("<4sBBH8siiQQQQQ")
HEADER_NBYTES = _HEADER.size


class Header(NamedTuple):
    kind: int
    job: bytes
    src: int = NOBODY
    dst: int = NOBODY
    number: int = 0
    nbytes: int = 0
    acknowledged: int = 0
    room: int = 0
    taken: int = 0
    code: int = 0

    def pack(self) -> bytes:
        kind, job, src, dst, *numbers, code = self
        return _HEADER.pack(_MAGIC, VERSION, kind, code, job, src, dst, *numbers)


def unpack_header(part: bytes) -> Header:
    if len(part) != HEADER_NBYTES or part[:4] != _MAGIC:
        raise Refusal("malformed", "this is no message of gradwire")
    _, version, kind, code, job, *others = _HEADER.unpack(part)
    if version != VERSION and kind != ERROR:  # errors are understood by all versions
        raise Refusal("version", f"this is version {version}, here is {VERSION}", CANNOT_JOIN)
    if kind not in _KINDS:
        raise Refusal("kind", f"there is no kind {kind}")
    return Header._make((kind, job, *others, code))


class Hello(NamedTuple):
    """A node introduces itself."""

    identity: bytes
    role: int
    wanted: int  # the rank; NOBODY: any
    num_workers: int
    num_servers: int
    address: str  # where others reach it


class Entry(NamedTuple):
    """A member as the others know it."""

    rank: int
    is_there: bool
    has_left: bool
    life: float
    time_s: float  # of the last change
    identity: bytes
    address: str


class Welcome(NamedTuple):
    rank: int
    life: float
    time_s: float  # of the last event: what comes later is news
    heartbeat_s: float  # after so long a silence a worker is lost
    entries: tuple[Entry, ...]


class Event(NamedTuple):
    """With IS_LOST the text is the reason, with HAS_JOINED the address."""

    kind: int
    rank: int
    time_s: float
    identity: bytes
    text: str


class Resume(NamedTuple):
    life: float  # of the process that speaks
    is_fresh: bool  # whether it knows nothing of what was on this link before its life
    life_there: float  # of the process it last spoke to; -1: to none


_HELLO = struct.Struct("<16sBiiiH")
_WELCOME = struct.Struct("<idddI")
_ENTRY = struct.Struct("<iBBdd16sH")
_EVENT = struct.Struct("<Bid16sH")
_RESUME = struct.Struct("<dBd")
_ANNOUNCE = struct.Struct("<d")


class _Reader:
    """Takes a body apart; anything missing or left over is a `Refusal`."""

    def __init__(self, body: bytes) -> None:
        self._body, self._at = body, 0

    def read(self, form: struct.Struct) -> tuple[Any, ...]:
        if self._at + form.size > len(self._body):
            raise Refusal("malformed", "a body is too short")
        self._at += form.size
        return form.unpack_from(self._body, self._at - form.size)

    def text(self, nbytes: int) -> str:
        end = self._at + nbytes
        if end > len(self._body) or nbytes > MAX_TEXT_NBYTES:
            raise Refusal("malformed", "a text is longer than its message")
        raw, self._at = self._body[self._at : end], end
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise Refusal("malformed", "a text is not UTF-8") from None

    def end(self) -> None:
        if self._at != len(self._body):
            raise Refusal("malformed", "a body is too long")


def _text(text: str) -> bytes:
    return text.encode()[:MAX_TEXT_NBYTES].decode(errors="ignore").encode()


def pack_hello(hello: Hello) -> bytes:
    address = _text(hello.address)
    return _HELLO.pack(*hello[:-1], len(address)) + address


def unpack_hello(body: bytes) -> Hello:
    reader = _Reader(body)
    *values, length = reader.read(_HELLO)
    hello = Hello._make((*values, reader.text(length)))
    reader.end()
    if hello.role not in (WORKER, SERVER):
        raise Refusal("malformed", f"there is no role {hello.role}")
    return hello


def pack_welcome(welcome: Welcome) -> bytes:
    parts = [_WELCOME.pack(*welcome[:-1], len(welcome.entries))]
    for entry in welcome.entries:
        address = _text(entry.address)
        parts += _ENTRY.pack(*entry[:-1], len(address)), address
    return b"".join(parts)


def unpack_welcome(body: bytes) -> Welcome:
    reader = _Reader(body)
    *values, count = reader.read(_WELCOME)
    if count * _ENTRY.size > len(body):
        raise Refusal("malformed", "a welcome has fewer members than it says")
    entries = []
    for _ in range(count):
        rank, is_there, has_left, *others, length = reader.read(_ENTRY)
        fields = (rank, bool(is_there), bool(has_left), *others, reader.text(length))
        entries.append(Entry._make(fields))
    reader.end()
    return Welcome._make((*values, tuple(entries)))


def pack_event(event: Event) -> bytes:
    text = _text(event.text)
    return _EVENT.pack(*event[:-1], len(text)) + text


def unpack_event(body: bytes) -> Event:
    reader = _Reader(body)
    *values, length = reader.read(_EVENT)
    event = Event._make((*values, reader.text(length)))
    reader.end()
    if event.kind not in (IS_LOST, HAS_JOINED):
        raise Refusal("malformed", f"there is no event {event.kind}")
    return event


def pack_resume(resume: Resume) -> bytes:
    return _RESUME.pack(*resume)


def unpack_resume(body: bytes) -> Resume:
    reader = _Reader(body)
    life, is_fresh, life_there = reader.read(_RESUME)
    reader.end()
    return Resume(life, bool(is_fresh), life_there)


def pack_announce(priority: float) -> bytes:
    return _ANNOUNCE.pack(priority)


def unpack_announce(body: bytes) -> float:
    reader = _Reader(body)
    (priority,) = reader.read(_ANNOUNCE)
    reader.end()
    if priority != priority:  # NaN has no place in an order
        raise Refusal("malformed", "a priority is not a number")
    return float(priority)


def pack_text(text: str) -> bytes:
    return _text(text)


def unpack_text(body: bytes) -> str:
    return body[:MAX_TEXT_NBYTES].decode(errors="replace")
