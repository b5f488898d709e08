"""Checksums of text files that people read, which stay text.

A TOML file has its checksum in a comment at its end, a JSON file under a key of its own. A file
that grows line by line has at the end of each line the checksum of all lines so far: a last line
that a crash tore off is noticed as such, and so is damage anywhere else, or a missing line.
"""

import json
from hashlib import blake2b
from pathlib import Path
from typing import Any

from gradwire.runtime.storage.files import DamagedError, naming

_COMMENT = "# checksum (of the record of a run; to change settings, copy this file): "
_KEY = "checksum"
_LINE_DIGITS = 8  # of a line's checksum, which all later ones depend on


def digest_of(content: str | bytes) -> str:
    data = content.encode() if isinstance(content, str) else content
    return blake2b(data, digest_size=16).hexdigest()


def read(path: Path) -> str:
    with naming(path, "read"):
        raw = path.read_bytes()
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise DamagedError(f"{path} is damaged: {error}") from error


# TOML.


def seal_toml(text: str) -> str:
    return f"{text}{_COMMENT}{digest_of(text)}\n"


def open_toml(path: Path) -> str:
    """The text without its checksum, which is checked."""
    whole = read(path)
    text, found, digest = whole.rpartition(_COMMENT)
    if not found:
        raise DamagedError(
            f"{path} has no checksum: it was cut short or changed, or written by an older gradwire"
        )
    if digest != f"{digest_of(text)}\n":
        raise DamagedError(f"{path} was changed or damaged: its checksum does not fit")
    return text


def has_wrong_checksum(whole: str) -> bool:
    """Whether the text of a TOML file has a checksum that does not fit."""
    text, found, digest = whole.rpartition(_COMMENT)
    return bool(found) and digest.strip() != digest_of(text)


# JSON.


def seal_json(values: dict[str, Any]) -> str:
    return json.dumps({**values, _KEY: digest_of(json.dumps(values))}, indent=1) + "\n"


def open_json(path: Path) -> dict[str, Any]:
    """The values without their checksum, which is checked."""
    text = read(path)
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{path} is damaged: it is no JSON ({error})") from error
    if not isinstance(values, dict) or _KEY not in values:
        raise DamagedError(
            f"{path} has no checksum: it was changed, or written by an older gradwire"
        )
    digest = values.pop(_KEY)
    if digest != digest_of(json.dumps(values)):
        raise DamagedError(f"{path} was changed or damaged: its checksum does not fit")
    return values


# Lines.


class LineSeal:
    """The running checksum of a file's lines."""

    def __init__(self) -> None:
        self._hash = blake2b(digest_size=_LINE_DIGITS // 2)

    def seal(self, line: str) -> str:
        """The next line with its checksum and line end."""
        return f"{line}\t{self._next(line)}\n"

    def open(self, sealed: str) -> str | None:
        """The next line without its checksum; None if that does not fit."""
        line, tab, digest = sealed.rpartition("\t")
        return line if tab and digest == self._next(line) else None

    def _next(self, line: str) -> str:
        self._hash.update(f"{line}\n".encode())
        return self._hash.hexdigest()
