"""Recovers the state of a server from a job that ended without a checkpoint.

When the scheduler, the launcher or all machines are gone at once, no server has saved a checkpoint.
But each has a store (`runtime/durable/checkpoint.py`): its last state, and the journal of what has
arrived since. The next job of a run that does not pause continues from there. A server is made from
the state, and the journal is replayed to it; what it sends is dropped. Its state is then written as
a checkpoint (step 0, as after a signal), and only then the store is removed. So every update that
was acknowledged with `--durable` counts. Without it, messages that only workers had are lost.

Each server recovers by itself: one may have received a push that another has not, as when a worker
is lost. Asynchronous methods tolerate that, so servers need not agree on a moment.
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

SERVER_STATE_STEP = 0  # the step of checkpoints of servers, in runs that do not pause
INITIAL_CHECKPOINT = "initial.pt"  # in a store: the checkpoint that its job began with
CONFIG = "config.toml"  # in a store: the configuration of its run
_WAIT_S = 15.0  # for a process of an earlier job that has not ended yet
_POLL_S = 0.05
_INITIAL_SEAL = Seal("initial")
Saved = dict[str, Any]


def store_folder(folder: Path, rank: int, job: str) -> Path:
    """The store of a server, in the folder of its run."""
    return folder / "servers" / f"{rank}-{job}"


def open_store(folder: Path, wait_s: float = 0.0) -> Store:
    """Opens a store. A process that was killed may still use it for a moment: it waits."""
    limit = time.monotonic() + wait_s
    while Store.is_in_use(folder) and time.monotonic() < limit:
        time.sleep(_POLL_S)
    return Store(folder, folder.name.replace("-", " "))


def remove_store(folder: Path) -> None:
    """Removes a store. It is renamed first: a half-removed store would look complete."""
    gone = folder.with_name(f"removed-{folder.name}")
    shutil.rmtree(gone, ignore_errors=True)
    with contextlib.suppress(OSError):
        folder.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)
    with contextlib.suppress(OSError):  # there are other stores
        folder.parent.rmdir()


def remove_other_stores(own: Path) -> None:
    """Removes the stores that this server had in earlier jobs."""
    for folder in _other_stores(own):
        if not Store.is_in_use(folder):
            remove_store(folder)
    for folder in own.parent.glob(f"removed-{_rank(own)}-*"):
        shutil.rmtree(folder, ignore_errors=True)


class Damage(NamedTuple):
    """Messages about damaged files."""

    skipped: list[str]  # without a loss: the content was recovered from other files
    lost: list[str]  # acknowledged updates are lost


def recover(experiment: Experiment, own: Path, checkpoints: Checkpoints) -> Damage:
    """Writes a checkpoint with the state of this server in earlier jobs, if the existing one is
    older. `own` is its store in this job."""
    damage = Damage([], [])
    if not _other_stores(own):
        return damage
    loaded = checkpoints.load()
    damage.skipped.extend(loaded.skipped)
    before = saved = loaded.states.get(SERVER_STATE_STEP)
    for folder in _other_stores(own):
        try:
            _check_config(folder, experiment)
            store = open_store(folder, _WAIT_S)
            try:
                damage.skipped.extend([store.skipped] if store.skipped else [])
                if not _covers(saved, store):
                    # At most one job has trained since the checkpoint was written.
                    saved = _replay_store(experiment, store, saved) or saved
            finally:
                store.close()
        except DamagedError as error:
            damage.lost.append(str(error))
    if saved is not None and saved is not before:
        checkpoints.write(SERVER_STATE_STEP, saved)
    return damage


def store_entry(store: Path | None, num_received: int, *, resumed_from_servers: bool) -> Saved:
    """For a checkpoint: the name of its store, the number of arrivals in the store that the state
    includes, and whether its job continued from another one."""
    return {
        "store": "" if store is None else store.name,
        "num_received": num_received,
        "resumed_from_servers": resumed_from_servers,
    }


def has_updates(saved: Saved | None) -> bool:
    """Whether workers had pushed to this server. Then all servers have a state."""
    if saved is None or "store" not in saved:
        return False
    return bool(saved["resumed_from_servers"] or saved["role"]["pushes"])


def initial_checkpoint(store: Path, saved: Saved | None) -> Saved | None:
    """The checkpoint that the job of a store began with: `saved`, if the job begins now."""
    path = store / INITIAL_CHECKPOINT
    if path.exists():
        found: Saved = sealed.load(path, _INITIAL_SEAL)
        return found
    if saved is not None:
        sealed.save(path, _INITIAL_SEAL, saved)
    return saved


def _rank(folder: Path) -> int:
    return int(folder.name.partition("-")[0])


def _other_stores(own: Path) -> list[Path]:
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


def _covers(saved: Saved | None, store: Store) -> bool:
    """Whether a checkpoint includes everything that a store has."""
    if saved is None or saved.get("store") != store.folder.name:
        return False
    is_complete = all(journal.peek(body).message is not journal.NOT_STORED for body in store.bodies)
    return not is_complete or count_arrivals(store) <= saved["num_received"]


# A server of the job that has ended, to which its journal is replayed.


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

    def defer(self, arrival: Arrival) -> None:
        pass

    def deferred(self, job: int) -> list[Arrival]:
        return []

    def acknowledge(self, src: int, number: int) -> None:
        pass

    def links(self) -> LinkCounts:
        return {}

    def outstanding(self) -> dict[int, int]:
        return {}


def _replay_store(experiment: Experiment, store: Store, checkpoint: Saved | None) -> Saved | None:
    """The state of the server, as a checkpoint; None if its job had not begun to train."""
    plan, config = experiment.plan, experiment.config
    rank, layout = _rank(store.folder), plan.layout
    num_all, state = count_arrivals(store), store.state
    transport = DurableTransport(
        _ClosedTransport(rank, layout.size),
        store,
        lambda: None,  # nothing is written
        headers=HEADERS,
        is_alone=True,
        device=own_device(config),
    )
    engine = ProcessEngine(transport, layout.num_workers)
    server = TrainingServer(plan, layout.number_of(rank))
    if state is not None:
        server.restore(state["state"]["role"], is_replayed=True)
        engine.num_runs = state["state"]["num_runs"] - 1  # it enters that run again
    else:
        has_initial = (store.folder / INITIAL_CHECKPOINT).exists()
        initial = initial_checkpoint(store.folder, None) if has_initial else checkpoint
        if not _replay_start(server, engine, layout.coordinator, initial):
            return None
    with engine.unread.only((REQUEST,)), contextlib.suppress(_JournalEnded, PeerLost):
        engine.run(lambda node: transport.recorded(server.run(node)))
    server.forget_workers()
    has_before = checkpoint is not None or (store.folder / INITIAL_CHECKPOINT).exists()
    own = store_entry(store.folder, num_all, resumed_from_servers=has_before)
    return {"config": config.to_toml(), "role": server.snapshot(), **own}


def _replay_start(
    server: TrainingServer, engine: ProcessEngine, coordinator: int, initial: Saved | None
) -> bool:
    """Replays the agreements before the training, and returns whether the training had begun.

    They are: whether the job may begin, from which checkpoint (see `NodeState`), and that all begin
    together. Workers may have received the last decision before this server did.
    """
    agreement = Agreement(engine, coordinator)
    try:
        decisions = [agreement.agree({}, lambda reports: {}) for _ in range(2)]
    except (_JournalEnded, PeerLost):
        return False
    if decisions[1]["failure"]:
        return False
    if decisions[1]["step"] is not None:
        assert initial is not None, "a server begins with the checkpoint that it reported"
        server.restore(initial["role"])
        server.forget_workers()
    with contextlib.suppress(_JournalEnded, PeerLost):
        agreement.agree({}, lambda reports: {})
    return True
