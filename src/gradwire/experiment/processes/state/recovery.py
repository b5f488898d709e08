"""What a server had in a job of its run that ended without a word: for the job that goes on.

When the scheduler, the launcher or all machines are gone at once, no server has left a checkpoint.
But each has a store (`runtime/durable/checkpoint.py`): its last state, and the journal of what had
arrived since. In a run that does not pause the next job goes on from there. A server of the job
that ended is made from the state and told again what the journal has; what it sends goes nowhere;
when all is told, what it has is written as a checkpoint (step 0, as after a signal). Only then the
store is removed. So every update that was acknowledged with `--durable` counts. Without, what only
workers had is gone with them.

Each server does so for itself: one may have heard of a push of which another has not, as when a
worker is lost. Asynchronous methods live with that, and servers need not agree on a moment.
"""

import contextlib
import shutil
import time
from pathlib import Path
from typing import Any, NamedTuple

from gradwire.core.errors import PeerLost
from gradwire.core.wire import REQUEST
from gradwire.experiment.processes.agreement import Agreement
from gradwire.experiment.processes.headers import HEADERS
from gradwire.experiment.processes.state.checkpoints import Checkpoints
from gradwire.experiment.run.config import common_settings
from gradwire.experiment.run.machine import own_device
from gradwire.experiment.run.setup import Experiment
from gradwire.runtime.durable import journal
from gradwire.runtime.durable.checkpoint import Store
from gradwire.runtime.durable.transport import DurableTransport, count_arrivals
from gradwire.runtime.process.engine import ProcessEngine
from gradwire.runtime.process.transport import Arrival, LinkCounts
from gradwire.runtime.storage import sealed, text
from gradwire.runtime.storage.files import DamagedError
from gradwire.runtime.storage.sealed import Seal
from gradwire.training.server import TrainingServer

SERVERS_STATE = 0  # the step under which servers of a run that does not pause leave their state
BEGAN = "began.pt"  # in a store: the checkpoint that its job began with
CONFIG = "config.toml"  # in a store: what it is of
_WAIT_S = 15.0  # for a process of the job before that has not ended yet
_POLL_S = 0.05
_BEGAN_SEAL = Seal("began")
Saved = dict[str, Any]


def store_folder(folder: Path, rank: int, job: str) -> Path:
    """Of a server, in the folder of its run."""
    return folder / "servers" / f"{rank}-{job}"


def open_store(folder: Path, wait_s: float = 0.0) -> Store:
    """A process that was killed may have it for a moment longer: it waits for the disk."""
    limit = time.monotonic() + wait_s
    while Store.is_in_use(folder) and time.monotonic() < limit:
        time.sleep(_POLL_S)
    return Store(folder, folder.name.replace("-", " "))


def remove_store(folder: Path) -> None:
    """At once: of one that is half removed nobody could tell that something is missing."""
    gone = folder.with_name(f"removed-{folder.name}")
    shutil.rmtree(gone, ignore_errors=True)
    with contextlib.suppress(OSError):
        folder.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)
    with contextlib.suppress(OSError):  # others are there
        folder.parent.rmdir()


def remove_others(own: Path) -> None:
    """The stores that this server had in jobs that have ended."""
    for folder in _others(own):
        if not Store.is_in_use(folder):
            remove_store(folder)
    for folder in own.parent.glob(f"removed-{_rank(own)}-*"):
        shutil.rmtree(folder, ignore_errors=True)


class Recovered(NamedTuple):
    """What was damaged, in words."""

    skipped: list[str]  # and could be made again
    lost: list[str]  # and cannot


def recover(experiment: Experiment, own: Path, checkpoints: Checkpoints) -> Recovered:
    """Makes a checkpoint of what this server had in jobs before that of its store `own`, if that is
    more than the checkpoint has that is there."""
    damaged = Recovered([], [])
    if not _others(own):
        return damaged
    loaded = checkpoints.load()
    damaged.skipped.extend(loaded.skipped)
    before = saved = loaded.states.get(SERVERS_STATE)
    for folder in _others(own):
        try:
            _check_config(folder, experiment)
            store = open_store(folder, _WAIT_S)
            try:
                damaged.skipped.extend([store.skipped] if store.skipped else [])
                if not _has_all(saved, store):
                    # At most one job came to train since the checkpoint was written.
                    saved = _told_again(experiment, store, saved) or saved
            finally:
                store.close()
        except DamagedError as error:
            damaged.lost.append(str(error))
    if saved is not None and saved is not before:
        checkpoints.write(SERVERS_STATE, saved)
    return damaged


def heard(store: Path | None, num: int, *, is_rest: bool) -> Saved:
    """To be in a checkpoint: of which store it is, how many arrivals it has of it, and whether its
    job went on from another one."""
    return {"store": "" if store is None else store.name, "num_heard": num, "is_rest": is_rest}


def is_evidence(saved: Saved | None) -> bool:
    """Whether the state of a server shows that all servers have one: workers had pushed to them."""
    if saved is None or "store" not in saved:
        return False
    return bool(saved["is_rest"] or saved["part"]["pushes"])


def began_with(store: Path, saved: Saved | None) -> Saved | None:
    """The checkpoint that the job of a store began with; it is `saved` if the job begins now."""
    path = store / BEGAN
    if path.exists():
        found: Saved = sealed.load(path, _BEGAN_SEAL)
        return found
    if saved is not None:
        sealed.save(path, _BEGAN_SEAL, saved)
    return saved


def _rank(folder: Path) -> int:
    return int(folder.name.partition("-")[0])


def _others(own: Path) -> list[Path]:
    return sorted(folder for folder in own.parent.glob(f"{_rank(own)}-*") if folder != own)


def _check_config(folder: Path, experiment: Experiment) -> None:
    path = folder / CONFIG
    there = text.open_toml(path) if path.exists() else ""
    here = experiment.config.to_toml()
    if there and common_settings(there) != common_settings(here):
        raise ValueError(
            f"{folder} is of a run with another configuration; put config.toml back as it was, or "
            "start a new run"
        )


def _has_all(saved: Saved | None, store: Store) -> bool:
    """Whether a checkpoint has what could be had from a store."""
    if saved is None or saved.get("store") != store.folder.name:
        return False
    is_whole = all(journal.glance(body).message is not journal.NOT_KEPT for body in store.bodies)
    return not is_whole or count_arrivals(store) <= saved["num_heard"]


# A server of the job that has ended.


class _JournalEnded(Exception):
    """The server waits for a message after the last one of its journal."""


class _ClosedTransport:
    """A transport without peers: what is sent is dropped, and nothing arrives."""

    num_bytes_sent = 0

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def send(self, dst: int, job: int, tag: int, message: Any) -> None:
        pass

    def send_done(self, dst: int, job: int, number: int) -> None:
        pass

    def next(self, timeout_s: float | None) -> Arrival | None:
        if timeout_s == 0:
            return None
        raise _JournalEnded

    def keep(self, arrival: Arrival) -> None:
        pass

    def kept(self, job: int) -> list[Arrival]:
        return []

    def acknowledge(self, src: int, number: int) -> None:
        pass

    def links(self) -> LinkCounts:
        return {}

    def outstanding(self) -> dict[int, int]:
        return {}


def _told_again(experiment: Experiment, store: Store, checkpoint: Saved | None) -> Saved | None:
    """What the server had, as a checkpoint; None if its job had not come to train."""
    plan, config = experiment.plan, experiment.config
    rank = _rank(store.folder)
    num_all, state = count_arrivals(store), store.state
    transport = DurableTransport(
        _ClosedTransport(rank, plan.num_workers + plan.architecture.num_others),
        store,
        lambda: None,  # nothing is written
        headers=HEADERS,
        is_alone=True,
        device=own_device(config),
    )
    engine = ProcessEngine(transport, plan.num_workers)
    server = TrainingServer(plan, rank - plan.num_workers)
    if state is not None:
        server.restore(state["state"]["part"], is_replayed=True)
        engine.num_runs = state["state"]["num_runs"] - 1  # it enters that run again
    else:
        has_began = (store.folder / BEGAN).exists()
        began = began_with(store.folder, None) if has_began else checkpoint
        if not _begins(server, engine, began):
            return None
    with engine.unread.only((REQUEST,)), contextlib.suppress(_JournalEnded, PeerLost):
        engine.run(lambda node: transport.recorded(server.run(node)))
    server.forget_workers()
    is_rest = checkpoint is not None or (store.folder / BEGAN).exists()
    own = heard(store.folder, num_all, is_rest=is_rest)
    return {"config": config.to_toml(), "part": server.snapshot(), **own}


def _begins(server: TrainingServer, engine: ProcessEngine, began: Saved | None) -> bool:
    """Hears again what was decided before the training; whether that had begun.

    The job may begin, from which checkpoint (see `NodeState`), and all begin together. Workers may
    have heard the last before this server did.
    """
    agreement = Agreement(engine, engine.size - 1)
    try:
        decisions = [agreement.agree({}, lambda reports: {}) for _ in range(2)]
    except (_JournalEnded, PeerLost):
        return False
    if decisions[1]["failure"]:
        return False
    if decisions[1]["step"] is not None:
        assert began is not None, "a server begins with the checkpoint that it said it has"
        server.restore(began["part"])
        server.forget_workers()
    with contextlib.suppress(_JournalEnded, PeerLost):
        agreement.agree({}, lambda reports: {})
    return True
