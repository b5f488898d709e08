"""Folders and files on disk: atomic replacement, and errors that name the file."""

import contextlib
import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

_RESUME_HINT = "a run continues with --resume"
_ADVICE = {
    errno.ENOSPC: f"Free some space there; {_RESUME_HINT}.",
    errno.EDQUOT: f"Free some space there; {_RESUME_HINT}.",
    errno.EACCES: "Change its permissions, or choose another folder.",
    errno.EPERM: "Change its permissions, or choose another folder.",
    errno.EROFS: "Choose another folder.",
    errno.EEXIST: "There is a file in the place of a folder; choose another folder.",
    errno.ENOTDIR: "There is a file in the place of a folder; choose another folder.",
    errno.EISDIR: "There is a folder in the place of a file; choose another name.",
    errno.EIO: f"The disk is damaged; copy the folder to another one: {_RESUME_HINT}.",
}


class FileError(OSError):
    """A file that cannot be read or written: which one, why, and what to do."""

    def __init__(self, doing: str, path: Path | str, error: OSError) -> None:
        super().__init__(error.errno, error.strerror or str(error), str(path))
        self._doing = doing

    def __str__(self) -> str:
        return _explained(self._doing, self)


class DamagedError(ValueError):
    """A file that is not what was written."""


@contextlib.contextmanager
def naming(path: Path, doing: str = "write") -> Iterator[None]:
    """Turns errors of the operating system into a `FileError` that names this file."""
    try:
        yield
    except FileError:
        raise
    except OSError as error:
        raise FileError(doing, path, error) from error


def explain(error: BaseException) -> str:
    """The text of an error; an error of the operating system names the file and what to do."""
    if isinstance(error, OSError) and not isinstance(error, FileError) and error.filename:
        return _explained("use", error)
    return str(error)


def _explained(doing: str, error: OSError) -> str:
    text = f"cannot {doing} {error.filename}: {error.strerror}"
    advice = _ADVICE.get(error.errno or 0)
    return f"{text}. {advice}" if advice else text


def sync_folder(folder: Path) -> None:
    """Returns when the list of files of this folder is on disk."""
    with naming(folder):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def make_folder(folder: Path) -> None:
    """Makes the folder and those above it; they survive a loss of power."""
    if not folder.is_dir():
        make_folder(folder.parent)
        with naming(folder, "make the folder"):
            folder.mkdir(exist_ok=True)
        sync_folder(folder.parent)


def write_atomically(path: Path, content: bytes | memoryview) -> None:
    """Replaces a file: a reader sees all of it or the old one, even after a crash."""
    with replacing(path) as file:
        file.write(content)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write to, which replaces this one unless there is an error."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with naming(path):
            with temporary.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    if os.name == "posix":  # the new name must survive, too
        sync_folder(path.parent)


def remove_leftovers(path: Path) -> None:
    """Removes temporary files of processes that ended while they wrote this file."""
    for temporary in path.parent.glob(f"{path.name}.*.tmp"):
        match = re.fullmatch(r"\.(\d+)\.tmp", temporary.name.removeprefix(path.name))
        if match and not _is_another(int(match[1])):
            temporary.unlink(missing_ok=True)


def _is_another(pid: int) -> bool:
    """Whether another process with this number runs; True if that is not known."""
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
