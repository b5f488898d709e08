"""What must hold after a run was disturbed."""

import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from gradwire.experiment.processes.headers import HEADERS
from gradwire.experiment.processes.state.checkpoints import Checkpoints
from gradwire.experiment.processes.state.recovery import SERVER_STATE_STEP, open_store
from gradwire.runtime.durable import journal
from gradwire.runtime.durable.transport import count_arrivals
from gradwire.training.wire import PushHeader
from soak import watch
from soak.actions import FULL, GLOO, KILL, STOP, Broken
from soak.jobs import Job, Launch
from soak.watch import Peak

_END_S = 30.0  # for processes to end after their launcher
_SPARE_NBYTES, _SPARE = 96 << 20, 1.3  # above what an undisturbed run takes
_SPARE_DESCRIPTORS = 96  # while strangers have connections
_NUM_WORKERS = 2
_NEEDS_CONSENT = "let the run begin again from step 0"
_BEGINS_AGAIN = "the run begins again from step 0"
Updates = dict[int, int]  # by rank of a server


def check_exit(launch: Launch, code: int, done: list[str], before: Sequence[str] = ()) -> None:
    """That it ended as a run may end to which this was done; `before`: to the launch before."""
    said = launch.said
    if "Traceback" in said:
        raise Broken(f"a traceback:\n{said[-4000:]}")
    allowed = {0}
    if any(KILL in text or STOP in text for text in done):
        allowed |= {3, -9}
    if any("SIGTERM" in text or "SIGINT" in text for text in done):
        allowed |= {130, 143, 3}
    if any(FULL in text for text in done):
        allowed |= {2, 3}
    if any("garbage" in text for text in done) and not launch.job.is_served:
        allowed |= {3}  # gloo does not authenticate
    if not done:
        allowed |= {3}  # on a machine that is very busy; `rounds` limits how often
    if lost_checkpoints(launch):
        # Files are written atomically, and no action damages them.
        if not any(FULL in text for text in [*done, *before]):
            raise Broken(f"the run has lost its checkpoints:\n{said[-4000:]}")
        allowed |= {2}
    if code not in allowed:
        raise Broken(f"exit code {code}, expected one of {sorted(allowed)}:\n{said[-4000:]}")


def lost_checkpoints(launch: Launch) -> bool:
    """Whether it found nothing to go on from, though there had been a checkpoint."""
    said = launch.said
    return _NEEDS_CONSENT in said or (launch.had_complete and _BEGINS_AGAIN in said)


def needs_consent(launch: Launch) -> bool:
    """Whether it goes on only with `--restart`."""
    return launch.code == 2 and _NEEDS_CONSENT in launch.said


def check_nothing_left(launch: Launch) -> None:
    """No process of the run, no temporary file."""
    if not watch.wait_until(lambda: not watch.find(launch.mark), _END_S):
        raise Broken(f"processes are left {_END_S:g} s after the end: {watch.find(launch.mark)}")
    left = [str(path) for path in launch.temporary.rglob("*")]
    if left:
        raise Broken(f"temporary files are left: {left}")


def check_peaks(peaks: dict[str, Peak], usual: dict[str, Peak]) -> None:
    """Memory and descriptors, against those of an undisturbed run."""
    for role, peak in peaks.items():
        if role not in usual:
            continue
        limit = int(usual[role].resident_nbytes * _SPARE) + _SPARE_NBYTES
        if peak.resident_nbytes > limit:
            raise Broken(f"a {role} took {peak.resident_nbytes} bytes of memory, limit {limit}")
        most = usual[role].num_descriptors + _SPARE_DESCRIPTORS
        if peak.num_descriptors > most and role != GLOO:
            raise Broken(f"a {role} had {peak.num_descriptors} descriptors, limit {most}")


def check_finished(job: Job, folder: Path, expected: Any) -> None:
    """The record of a run that has ended well."""
    left = [path.name for path in folder.rglob("*.tmp")]
    left += [path.name for path in folder.glob("servers*")]
    if left:
        raise Broken(f"a finished run has left {left}")
    if not job.has_keys and json.loads((folder / "summary.json").read_text()).get("lost"):
        raise Broken("strangers have cost the run a worker")
    if job.is_synchronous and not torch.equal(model_of(folder), expected):
        raise Broken("the model differs from that of an undisturbed run")


def check_counted_once(job: Job, folder: Path) -> None:
    """Of a run that no worker and no job was lost of: as many answers as pushes, and no more."""
    found = json.loads((folder / "summary.json").read_text())
    num_expected = 2 * job.num_servers * _NUM_WORKERS * job.settings["steps"]
    if found["messages_sent"] != num_expected:
        raise Broken(f"{found['messages_sent']} messages are counted, not {num_expected}")


def model_of(folder: Path) -> torch.Tensor:
    found: torch.Tensor = torch.load(folder / "model.pt", weights_only=True)["params"]
    return found


def saved_updates(folder: Path, job: Job) -> Updates:
    """By server: the updates that its checkpoint has, which the next job begins with."""
    found = {}
    for rank in range(_NUM_WORKERS, _NUM_WORKERS + job.num_servers):
        saved = Checkpoints(folder, rank).load().states.get(SERVER_STATE_STEP)
        found[rank] = 0 if saved is None else saved["role"]["memory"]["updates"]
    return found


def durable_updates(folder: Path, job: Job) -> Updates:
    """By server: all updates that its files have, counted by hand. None may be lost.

    The files of a server are its checkpoint, and the stores of jobs that ended since. A push has
    one part here.
    """
    found = saved_updates(folder, job)
    with tempfile.TemporaryDirectory(prefix="soak-") as place:
        copy = Path(place) / "run"
        shutil.copytree(folder, copy)
        for path in sorted(copy.glob("servers/*-*")):
            if path.name.startswith("removed-"):
                continue
            rank = int(path.name.partition("-")[0])
            saved = Checkpoints(copy, rank).load().states.get(SERVER_STATE_STEP)
            store = open_store(path, 10.0)
            try:
                if (
                    saved
                    and saved["store"] == path.name
                    and count_arrivals(store) <= saved["num_received"]
                ):
                    continue  # the checkpoint has all of it
                before = 0 if saved is None else saved["role"]["memory"]["updates"]
                if store.state is not None:
                    before = store.state["state"]["role"]["memory"]["updates"]
                arrivals = [journal.decode(body, HEADERS) for body in store.bodies]
                headers = [getattr(arrival.message, "header", None) for arrival in arrivals]
                count = before + sum(isinstance(header, PushHeader) for header in headers)
                found[rank] = max(found[rank], count)
            finally:
                store.close()
    return found
