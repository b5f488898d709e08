"""The disk that runs write to, which can be full for a while.

Root gets a small tmpfs in a mount namespace of its own, which vanishes with this process. Others
limit the length of the files that one process may write (RLIMIT_FSIZE): its writes fail, too.
"""

import ctypes
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_CLONE_NEWNS = 0x00020000
_SIZE_MIB = 64
_BLOCK_NBYTES = 1 << 16
_REFILL_S = 0.01


class Disk:
    """A folder for runs. `how` says how it is filled, or why it cannot be."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self._is_own = _mount(place)
        self.how = f"a tmpfs of {_SIZE_MIB} MiB" if self._is_own else "RLIMIT_FSIZE"
        self.can_fill = self._is_own or hasattr(resource, "prlimit")
        if not self.can_fill:
            self.how = f"no full disks: no tmpfs can be mounted, and {sys.platform} has no prlimit"

    def close(self) -> None:
        if self._is_own:
            subprocess.run(["umount", "--lazy", str(self.place)], check=False)

    def fill(self, pid: int, is_over: Callable[[], bool], limit_s: float) -> None:
        """Until it is over: for everybody, what is deleted meanwhile is filled again; or else for
        this process."""
        with self._filler() if self._is_own else _limited(pid) as fill_again:
            until = time.monotonic() + limit_s
            while not is_over() and time.monotonic() < until:
                fill_again()
                time.sleep(_REFILL_S)

    @contextmanager
    def _filler(self) -> Iterator[Callable[[], None]]:
        path = self.place / "filler"

        def fill() -> None:
            for size in (_BLOCK_NBYTES, 1):
                with suppress(OSError), path.open("ab", buffering=0) as file:
                    while True:
                        file.write(bytes(size))

        try:
            fill()
            yield fill
        finally:
            path.unlink(missing_ok=True)


def _mount(place: Path) -> bool:
    if os.geteuid() != 0 or sys.platform != "linux":
        return False
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNS) != 0:
        return False
    for command in (
        ["mount", "--make-rprivate", "/"],
        ["mount", "-t", "tmpfs", "-o", f"size={_SIZE_MIB}m", "gradwire-soak", str(place)],
    ):
        try:
            if subprocess.run(command, capture_output=True, check=False).returncode != 0:
                return False
        except OSError:
            return False
    return True


@contextmanager
def _limited(pid: int) -> Iterator[Callable[[], None]]:
    soft, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield lambda: None
    finally:
        with suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (soft, hard))
