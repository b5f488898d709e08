"""The folder of a durable server: its last two states, and a journal of what arrived since each.

    state-00000007.pt      the whole state when generation 7 began (none for generation 0)
    journal-00000007.log   what has arrived since

A new generation is made in this order: the state is written under another name and synced; renamed;
the folder synced; the new journal made and synced; what is older than the one before removed. So at
every moment the newest state with a valid checksum and its journal (an empty one, if it is missing)
are all that is needed. A state that was damaged later can be recovered from the one before and both
journals, if these hold the messages.

A state file is sealed (`storage/sealed.py`) with its generation and a fingerprint of the job.
"""

import contextlib
import fcntl
import os
import re
from pathlib import Path
from typing import Any

from gradwire.runtime.durable import journal
from gradwire.runtime.durable.journal import Journal, JournalContents
from gradwire.runtime.storage import sealed
from gradwire.runtime.storage.files import DamagedError, make_folder, naming
from gradwire.runtime.storage.sealed import Seal

_NAME = re.compile(r"(?:state-(?=\d+\.pt)|journal-(?=\d+\.log))(\d+)\.\w+")
_LOCK = "lock"


class Store:
    """The folder, for one process at a time. `job` is a text that only this server's job has.

    `state` is what was last saved, None if nothing was; `bodies` are the journal's records since,
    for `journal.decode`.
    """

    def __init__(self, folder: Path, job: str) -> None:
        make_folder(folder)
        self.folder = folder
        self.skipped = ""  # describes a damaged state that was recovered
        self._job = job
        self._fingerprint = Seal("state", owner=job).fingerprint
        with naming(folder / _LOCK):
            self._lock = (folder / _LOCK).open("wb")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            raise ValueError(f"{folder} is in use by another process; wait until it ends") from None
        try:
            self.state, self.bodies, self.generation, found = self._load()
            self.journal = self._journal(self.generation, found)
        except BaseException:
            self._lock.close()
            raise

    @staticmethod
    def is_in_use(folder: Path) -> bool:
        """Whether a process has this folder open."""
        if not (folder / _LOCK).exists():
            return False
        with contextlib.suppress(BlockingIOError), (folder / _LOCK).open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return False
        return True

    def save(self, state: Any) -> None:
        """Starts a new generation. Afterwards nothing older is needed."""
        self.journal.write()  # this state may be damaged later, and made again from the one before
        generation = self.generation + 1
        path = self._state_path(generation)
        part = path.with_suffix(".part")
        with naming(path):
            with part.open("wb") as file:
                sealed.write(file, self._seal(generation), state)
                file.flush()
                journal.sync(file.fileno())
            rename(part, path)
        journal.sync_folder(self.folder)
        self.journal.close()
        self.generation = generation
        self.journal = self._journal(generation, None)
        for old in self._generations():
            if old < generation - 1:
                remove(self._state_path(old))
                remove(self._journal_path(old))

    def forget(self) -> None:
        """Drops what was loaded, after it was used."""
        self.state, self.bodies = None, []

    def close(self) -> None:
        self.journal.close()
        self._lock.close()

    # Files.

    def _state_path(self, generation: int) -> Path:
        return self.folder / f"state-{generation:08d}.pt"

    def _journal_path(self, generation: int) -> Path:
        return self.folder / f"journal-{generation:08d}.log"

    def _generations(self) -> list[int]:
        found = (_NAME.fullmatch(path.name) for path in self._files())
        return sorted({int(name[1]) for name in found if name})

    def _files(self) -> list[Path]:
        return sorted(self.folder.iterdir())

    def _journal(self, generation: int, found: JournalContents | None) -> Journal:
        path = self._journal_path(generation)
        return Journal(path, self._fingerprint, generation, None if found is None else found.end)

    # Reading.

    def _load(self) -> tuple[Any, list[memoryview], int, JournalContents | None]:
        for path in self._files():
            if path.suffix == ".part":  # from a crash while it was written
                remove(path)
        states = [g for g in self._generations() if self._state_path(g).exists()]
        newest = max(states, default=0)
        later = [g for g in self._generations() if g > newest]
        if later:
            raise DamagedError(
                f"{self.folder} holds {self._journal_path(later[-1]).name}, but not the state that "
                "it continues from"
            )
        if not states:
            found = self._found(0)
            return None, [] if found is None else found.bodies, 0, found
        found = self._found(newest)
        bodies = [] if found is None else found.bodies
        try:
            return self._read(newest), bodies, newest, found
        except DamagedError as error:
            state, before = self._one_before(newest, error)
            self.skipped = f"{error}; the state is made again from the one before"
            return state, before + bodies, newest, found

    def _one_before(self, newest: int, error: DamagedError) -> tuple[Any, list[memoryview]]:
        """The state before a damaged one, and the records between the two."""
        has_state = newest > 1 and self._state_path(newest - 1).exists()
        if not self._journal_path(newest - 1).exists() or (newest > 1 and not has_state):
            raise error
        state = self._read(newest - 1) if has_state else None
        found = self._found(newest - 1)
        bodies = [] if found is None else found.bodies
        if any(journal.peek(body).message is journal.NOT_STORED for body in bodies):
            raise error  # their senders have dropped them
        return state, bodies

    def _found(self, generation: int) -> JournalContents | None:
        path = self._journal_path(generation)
        return journal.read(path, self._fingerprint, generation) if path.exists() else None

    def _read(self, generation: int) -> Any:
        return sealed.load(self._state_path(generation), self._seal(generation))

    def _seal(self, generation: int) -> Seal:
        return Seal("state", generation, self._job)


def rename(source: Path, target: Path) -> None:
    os.replace(source, target)


def remove(path: Path) -> None:
    path.unlink(missing_ok=True)
