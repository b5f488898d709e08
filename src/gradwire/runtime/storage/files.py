"""Folders and files on disk: atomic replacement, and errors that name the file."""

import contextlib
import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

_GO_ON = "a run goes on with --resume"
_ADVICE = {
    errno.ENOSPC: f"Free some space there; {_GO_ON}.",
    errno.EDQUOT: f"Free some space there; {_GO_ON}.",
    errno.EACCES: "Change its permissions, or choose another folder.",
    errno.EPERM: "Change its permissions, or choose another folder.",
    errno.EROFS: "Choose another folder.",
    errno.EEXIST: "There is a file in the place of a folder; choose another folder.",
    errno.ENOTDIR: "There is a file in the place of a folder; choose another folder.",
    errno.EISDIR: "There is a folder in the place of a file; choose another name.",
    errno.EIO: f"The disk is damaged; copy the folder to another one: {_GO_ON}.",
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
    """What the operating system refuses meanwhile is an error that names this file."""
    try:
        yield
    except FileError:
        raise
    except OSError as error:
        raise FileError(doing, path, error) from error


def explain(error: BaseException) -> str:
    """An error in words; one of the operating system with the file and with what to do."""
    if isinstance(error, OSError) and not isinstance(error, FileError) and error.filename:
        return _explained("use", error)
    return str(error)


def _explained(doing: str, error: OSError) -> str:
    text = f"cannot {doing} {error.filename}: {error.strerror}"
    advice = _ADVICE.get(error.errno or 0)
    return f"{text}. {advice}" if advice else text


def sync_folder(folder: Path) -> None:
    """Returns when it is on disk which files there are."""
    with naming(folder):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def make_folder(folder: Path) -> None:
    """Once it returns the folder and those above it are there, also after a loss of power."""
    if not folder.is_dir():
        make_folder(folder.parent)
        with naming(folder, "make the folder"):
            folder.mkdir(exist_ok=True)
        sync_folder(folder.parent)


def write_atomically(path: Path, content: bytes | memoryview) -> None:
    """Whoever reads the file sees all of it or what was there before, even after a crash."""
    with replacing(path) as file:
        file.write(content)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write to, that takes the place of this one if all goes well."""
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
    if os.name == "posix":  # the new name, too, must survive
        sync_folder(path.parent)


def remove_leftovers(path: Path) -> None:
    """What processes left that ended while they wrote this file."""
    for temporary in path.parent.glob(f"{path.name}.*.tmp"):
        match = re.fullmatch(r"\.(\d+)\.tmp", temporary.name.removeprefix(path.name))
        if match and not _is_another(int(match[1])):
            temporary.unlink(missing_ok=True)


def _is_another(pid: int) -> bool:
    """Whether this is a process that runs, but not this one. In doubt it is."""
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
