"""Finds, downloads and reads data files without trusting them.

A file is looked for in `$GRADWIRE_DATA`, then in the user's cache (`$XDG_CACHE_HOME/gradwire`,
or `~/.cache/gradwire`), with or without its sub-folder, plain or compressed. If it is in neither,
it is downloaded from its public home into the cache: to a temporary file, at most as many bytes
as it should have, checked by SHA-256, then renamed, so that a file with its final name is
complete. Every failure is a `DataError` that names the file and says what to do.
"""

import gzip
import hashlib
import http.client
import lzma
import os
import sys
import tarfile
import tempfile
import urllib.request
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

from gradwire.core.errors import DataError

FOLDER_VARIABLE = "GRADWIRE_DATA"
TIMEOUT_S = 30.0  # without a byte from the server
_CHUNK_BYTES = 1 << 20
_SUFFIXES = ("", ".gz", ".xz")
# what the readers of gzip, xz and tar raise for files that are not what they claim to be
_DAMAGE = (OSError, EOFError, zlib.error, lzma.LZMAError, tarfile.TarError)


@dataclass(frozen=True)
class DataFile:
    """A public file: its place below the data folder, and where it comes from."""

    folder: str  # "mnist"
    name: str  # "train-labels-idx1-ubyte.gz"
    url: str
    size_bytes: int
    sha256: str
    other_folders: tuple[str, ...] = ()  # where other libraries keep it

    @property
    def place(self) -> str:
        return f"{self.folder}/{self.name}"


def obtain(file: DataFile, alternative: str = "") -> Path:
    """The file, found or downloaded. `alternative` says what else would do, for the error."""
    found = find(file.name, (file.folder, *file.other_folders))
    return found if found is not None else _download(file, alternative)


def find(name: str, folders: tuple[str, ...]) -> Path | None:
    """The first match of `name`, plain, .gz or .xz, in `folders` of the places to look.

    Bare names come last: two data sets may use the same ones (MNIST and Fashion-MNIST do).
    """
    stem = name.removesuffix(".gz").removesuffix(".xz")
    roots = _roots()
    for folder in (*folders, ""):
        for root in roots:
            for suffix in _SUFFIXES:
                path = root / folder / f"{stem}{suffix}"
                if path.is_file():
                    return path
    return None


def read(path: Path, limit_bytes: int) -> bytes:
    """The contents of a plain, .gz or .xz file, refused beyond `limit_bytes`."""
    try:
        with _opened(path) as stream:
            # one byte more than allowed, so that reading reaches the end and its checksum
            content = stream.read(limit_bytes + 1)
    except _DAMAGE as error:
        raise damaged(path, str(error) or type(error).__name__) from error
    if len(content) > limit_bytes:
        raise damaged(path, f"its contents exceed {limit_bytes:,} bytes")
    return content


def read_archive(path: Path, limit_bytes: int) -> Iterator[tuple[str, bytes]]:
    """(bare name, contents) of each file in a tar archive, plain, .gz or .xz.

    Nothing is unpacked to disk, so names cannot lead anywhere.
    """
    try:
        with _opened(path) as stream:
            with tarfile.open(fileobj=stream, mode="r|") as archive:
                for member in archive:
                    if member.size > limit_bytes:
                        raise damaged(path, f"{member.name} has {member.size:,} bytes")
                    content = archive.extractfile(member) if member.isfile() else None
                    if content is not None:
                        yield member.name.rpartition("/")[2], content.read()
            while stream.read(_CHUNK_BYTES):
                pass  # the checksum of a compressed file comes at its end
    except _DAMAGE as error:
        raise damaged(path, str(error) or type(error).__name__) from error


def _opened(path: Path) -> IO[bytes]:
    if path.suffix == ".gz":
        return cast(IO[bytes], gzip.open(path, "rb"))
    return lzma.open(path, "rb") if path.suffix == ".xz" else path.open("rb")


def damaged(path: Path, what: str) -> DataError:
    return DataError(
        f"{path} cannot be used: {what}. Delete it to have it downloaded again, or put a good "
        "copy in its place."
    )


def cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "gradwire"


def _roots() -> list[Path]:
    chosen = os.environ.get(FOLDER_VARIABLE)
    if not chosen:
        return [cache_folder()]
    root = Path(chosen).expanduser()
    if not root.is_dir():
        raise DataError(
            f"{FOLDER_VARIABLE} is {chosen!r}, which is not a folder; create it or unset it"
        )
    return [root, cache_folder()]


def _download(file: DataFile, alternative: str) -> Path:
    target = cache_folder() / file.place
    print(f"gradwire: downloading {file.url} ({file.size_bytes:,} bytes)", file=sys.stderr)
    partial: Path | None = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(suffix=".part", dir=target.parent)
        partial = Path(temporary)
        with open(handle, "wb") as out:
            problem = _transfer(file, out)
        if problem is None:
            partial.replace(target)  # atomic: processes that fetch at once do no harm
            return target
    except (OSError, http.client.HTTPException) as error:
        problem = str(error) or type(error).__name__
        raise _missing(file, target, problem, alternative) from error
    finally:
        if partial is not None:
            partial.unlink(missing_ok=True)
    raise _missing(file, target, problem, alternative)


def _transfer(file: DataFile, out: IO[bytes]) -> str | None:
    """Copies the file's bytes to `out`; returns what is wrong with them, if anything."""
    digest = hashlib.sha256()
    size_bytes = 0
    with urllib.request.urlopen(file.url, timeout=TIMEOUT_S) as response:
        while size_bytes <= file.size_bytes and (chunk := response.read(_CHUNK_BYTES)):
            size_bytes += len(chunk)
            digest.update(chunk)
            out.write(chunk)
    if size_bytes > file.size_bytes:
        return f"the server sent more than the {file.size_bytes:,} bytes expected"
    if size_bytes < file.size_bytes:
        return f"the server sent {size_bytes:,} of {file.size_bytes:,} bytes"
    if digest.hexdigest() != file.sha256:
        return f"its SHA-256 is {digest.hexdigest()}, expected {file.sha256}"
    return None


def _missing(file: DataFile, target: Path, problem: str, alternative: str) -> DataError:
    chosen = os.environ.get(FOLDER_VARIABLE)
    state = f"now {chosen}" if chosen else "not set"
    return DataError(
        f"{file.place} ({file.size_bytes:,} bytes) was not found, and downloading {file.url} "
        f"failed: {problem}. Put that file at ${FOLDER_VARIABLE}/{file.place} "
        f"({FOLDER_VARIABLE} is {state}) or at {target}."
        + (f" {alternative}" if alternative else "")
    )
