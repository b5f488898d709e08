"""The keys of a job: two CURVE key pairs in one file.

Scheduler and servers, which bind, authenticate with the first pair, nodes that connect to them
with the second. All members of a job have both. A peer that has not the second is turned away in
the handshake, before anything of the job is sent to it.
"""

import os
import re
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import zmq

_NAMES = ("binding_public", "binding_secret", "connecting_public", "connecting_secret")
_KEY = re.compile(r"[!-~]{40}")  # Z85
_MAX_NBYTES = 4096
_TITLE = "# The keys of a gradwire job. Who has this file can join; keep it secret."


@dataclass(frozen=True, repr=False)
class JobKeys:
    """Z85 texts of 40 characters."""

    binding_public: bytes
    binding_secret: bytes
    connecting_public: bytes
    connecting_secret: bytes

    def __repr__(self) -> str:  # secrets do not belong into logs
        return f"JobKeys({self.binding_public.decode()} ..)"


def make_keys(path: str | Path) -> JobKeys:
    """Makes the keys of a job and writes them to a new file that only its owner can read."""
    keys = _new_keys()
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise FileExistsError(
            f"{path} exists; a job that runs may need it. Give another name, or delete it first."
        ) from None
    with os.fdopen(file, "w") as stream:
        stream.write(_format(keys))
    return keys


@contextmanager
def throwaway_keys() -> Iterator[int]:
    """Makes the keys of a job whose nodes are started here, in a file without a name: it is gone
    with the last process that has it open, however that ends. Nodes that inherit its descriptor
    find it at `descriptor_path`."""
    with tempfile.TemporaryFile("w+", prefix="gradwire-") as stream:
        stream.write(_format(_new_keys()))
        stream.flush()
        stream.seek(0)
        yield stream.fileno()


def descriptor_path(descriptor: int) -> str:
    return f"/dev/fd/{descriptor}"


def _new_keys() -> JobKeys:
    return JobKeys(*zmq.curve_keypair(), *zmq.curve_keypair())


def _format(keys: JobKeys) -> str:
    lines = [_TITLE, *(f"{name} = {getattr(keys, name).decode()}" for name in _NAMES)]
    return "\n".join(lines) + "\n"


def load_keys(path: str | Path) -> JobKeys:
    """Reads what `make_keys` wrote. The file must be this user's, and for nobody else to read."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except FileNotFoundError:
        raise FileNotFoundError(
            f"there are no keys in {path}. Make them once, with `gradwire ps keys FILE`, and copy "
            "the file to all nodes of the job."
        ) from None
    try:
        _check_owner(path, os.fstat(file))  # of what is read then
        text = os.pread(file, _MAX_NBYTES, 0).decode(errors="replace")
    finally:
        os.close(file)
    return _parse(path, text)


def _check_owner(path: str | Path, status: os.stat_result) -> None:
    own = os.geteuid()
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{path} is no file; make one by: gradwire ps keys FILE")
    if status.st_uid != own:
        raise PermissionError(
            f"the keys in {path} belong to user {status.st_uid}, who could use or change them; "
            f"this node runs as user {own}. If you trust them, run: chown {own} {path}"
        )
    if status.st_mode & 0o077:
        raise PermissionError(f"others may read the keys in {path}; run: chmod 600 {path}")


def _parse(path: str | Path, text: str) -> JobKeys:
    found = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, _, key = line.partition(" = ")
            if name not in _NAMES or name in found or not _KEY.fullmatch(key):
                raise ValueError(f"{path} has a line that is no key of a job: it begins {name!r}")
            found[name] = key.encode()
    missing = [name for name in _NAMES if name not in found]
    if missing:
        raise ValueError(f"{path} lacks {', '.join(missing)}; make it by: gradwire ps keys FILE")
    keys = JobKeys(**found)
    for public, secret in (
        (keys.binding_public, keys.binding_secret),
        (keys.connecting_public, keys.connecting_secret),
    ):
        if zmq.curve_public(secret) != public:
            raise ValueError(f"{path} is damaged: a public key does not belong to its secret one")
    return keys
