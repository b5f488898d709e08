"""Finds the processes of a run, and how much memory and how many descriptors they have.

Every process of a run inherits an environment variable with a value of its own, so that none is
missed, whoever is its parent.
"""

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from gradwire.runtime.zeromq.keys import load_keys

MARK = "GRADWIRE_SOAK"
LAUNCHER, REMOVER = "launcher", "remover"
_PAGE_NBYTES = os.sysconf("SC_PAGE_SIZE")
_SAMPLE_S = 0.25


def find(mark: str) -> dict[int, str]:
    """Process ids and names (worker 0, server 1, scheduler, rank 2, launcher) of those that run."""
    found = {}
    entry = f"{MARK}={mark}".encode()
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            with suppress(OSError):  # it ended meanwhile
                environment = (path / "environ").read_bytes().split(b"\0")
                if entry in environment and is_running(int(path.name)):
                    words = (path / "cmdline").read_bytes().split(b"\0")
                    found[int(path.name)] = _name(words, environment)
    return found


def _name(words: list[bytes], environment: list[bytes]) -> str:
    texts = [word.decode(errors="replace") for word in words]
    if "gradwire-scratch" in texts:
        return REMOVER
    if "ps" in texts:
        number = texts[texts.index("--number") + 1] if "--number" in texts else ""
        return f"{texts[texts.index('ps') + 1]} {number}".strip()
    ranks = [one[5:].decode() for one in environment if one.startswith(b"RANK=")]
    return f"rank {ranks[0]}" if ranks else LAUNCHER


def is_running(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def listening_ports(pid: int) -> list[int]:
    """TCP ports on which a process listens, on any address."""
    inodes = set()
    with suppress(OSError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                target = os.readlink(descriptor)
                if target.startswith("socket:["):
                    inodes.add(target[8:-1])
    found = set()
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[9] in inodes and fields[3] == "0A":  # it listens
                    found.add(int(fields[1].rpartition(":")[2], 16))
    return sorted(found)


def public_key(pid: int) -> bytes:
    """With which a node proves who it is to those who connect; none if it has no keys."""
    with suppress(OSError, ValueError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
        path = words[words.index("--keys") + 1]
        return load_keys(path.replace("/dev/fd/", f"/proc/{pid}/fd/")).binding_public
    return b""


def num_descriptors(pid: int) -> int:
    with suppress(OSError):
        return len(os.listdir(f"/proc/{pid}/fd"))
    return 0


def resident_nbytes(pid: int) -> int:
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_NBYTES
    return 0


def wait_until(happens: Callable[[], object], limit_s: float, poll_s: float = 0.02) -> bool:
    """Whether it happened within the limit."""
    until = time.monotonic() + limit_s
    while not happens():
        if time.monotonic() > until:
            return False
        time.sleep(poll_s)
    return True


class Peak(NamedTuple):
    """The most that any process of a role had."""

    resident_nbytes: int = 0
    num_descriptors: int = 0


class Sampler:
    """A thread that follows the processes with a mark."""

    def __init__(self, mark: str) -> None:
        self.peaks: dict[str, Peak] = {}  # by role, without numbers
        self._mark = mark
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Sampler":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._is_over.wait(_SAMPLE_S):
            for pid, name in find(self._mark).items():
                role = name.split()[0]
                before = self.peaks.get(role, Peak())
                now = Peak(resident_nbytes(pid), num_descriptors(pid))
                self.peaks[role] = Peak(*map(max, zip(before, now)))
