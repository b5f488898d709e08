"""The messages between nodes, as bytes.

Every message begins with a header of 64 bytes, its first part:

    0   magic "GWZM"                    24  number of the message on its link, u64
    4   version                         32  length of the payload, u64
    5   kind                            40  acknowledged: up to this number, u64
    6   code of an error, or zero, u16  48  room: what is up to this number does not count, u64
    8   hash of the job, 8 bytes        56  taken: up to this number, u64
    16  source, i32; 20 destination, i32

The last three report how far the sender of this header has come with what the other side sent to
it: `taken` has arrived, `acknowledged` need not be kept any more. The second part is the body, the
third, with DATA only, a payload that has no room in the body. The body of DATA is a frame, that of
WAIT and ERROR a text, the others are header objects (`Body`) or empty.
"""

import struct
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from gradwire.core.errors import WireError
from gradwire.runtime.process.headers import Headers
from gradwire.runtime.zeromq.errors import Refusal

VERSION = 2
(
    JOIN,  # a node asks to join: JoinRequest
    WAIT,  # not yet: the body says for whom the job waits
    ACCEPTED,  # the node has joined: JoinAccepted
    ERROR,  # the body says why something was refused
    HEARTBEAT,
    HEARTBEAT_REPLY,  # the scheduler is alive, too
    RESUME,  # a connection was made: Resume
    RESUMED,  # the answer: Resume
    RESEND,  # something is missing: send again what is above `taken`
    ACK,  # nothing but the header
    ANNOUNCE,  # a large message waits: Announcement
    GRANT,  # it may be sent
    DATA,  # a frame; numbered
    MEMBERSHIP,  # a node joined or was lost: MembershipEvent; numbered
) = range(14)
NUMBERED = (DATA, MEMBERSHIP)
_KINDS = range(14)

# Codes of errors.
REFUSED, CANNOT_JOIN, DECLARED_LOST = range(3)

# Roles.
WORKER, SERVER, SCHEDULER = range(3)
ROLES = ("worker", "server", "scheduler")

NOBODY = -1
IDENTITY_NBYTES = 16
MAX_TEXT_NBYTES = 4096

Part = bytes | memoryview  # of a message
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


@dataclass(frozen=True, slots=True)
class JoinRequest:
    identity: bytes
    role: int
    wanted: int  # the rank; NOBODY: any
    num_workers: int
    num_servers: int
    address: str  # where others reach the node


@dataclass(frozen=True, slots=True)
class MemberRecord:
    """A member as the others know it."""

    rank: int
    is_there: bool
    has_left: bool
    incarnation: float
    time_s: float  # of the last change
    identity: bytes
    address: str


@dataclass(frozen=True, slots=True)
class JoinAccepted:
    rank: int
    incarnation: float
    time_s: float  # of the last event: later ones are new
    heartbeat_s: float  # a worker that is silent for so long is lost
    members: tuple[MemberRecord, ...]  # the scheduler is the last one


@dataclass(frozen=True, slots=True)
class MembershipEvent:
    """A node has joined (the text is its address), or is lost (the text is the reason)."""

    has_joined: bool
    rank: int
    time_s: float
    identity: bytes
    text: str


@dataclass(frozen=True, slots=True)
class Resume:
    incarnation: float  # of the sender
    is_fresh: bool  # the sender knows nothing of this link before its incarnation
    last_peer_incarnation: float  # of the process it last exchanged messages with; -1: none


@dataclass(frozen=True, slots=True)
class Announcement:
    priority: float


_BODIES = Headers(JoinRequest, MemberRecord, JoinAccepted, MembershipEvent, Resume, Announcement)
Body = TypeVar("Body", JoinRequest, JoinAccepted, MembershipEvent, Resume, Announcement)


def pack_body(body: Any) -> bytes:
    return _BODIES.encode(body)


def unpack_body(data: bytes, kind: type[Body]) -> Body:
    body = _BODIES.decode(data)
    if not isinstance(body, kind):
        raise WireError(f"a {type(body).__name__} where a {kind.__name__} belongs")
    return body


def pack_text(text: str) -> bytes:
    return text.encode()[:MAX_TEXT_NBYTES].decode(errors="ignore").encode()


def unpack_text(body: bytes) -> str:
    return body[:MAX_TEXT_NBYTES].decode(errors="replace")
