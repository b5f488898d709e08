"""What a soak does to the processes of a run."""

import os
import random
import signal
import time
from contextlib import suppress
from dataclasses import dataclass

from soak import strangers, watch
from soak.disk import Disk
from soak.jobs import Job, Launch

_WAIT_S = 60.0  # for the moment to act
_SETTLE_S = 30.0  # for strangers' connections to be gone
_SPARE_DESCRIPTORS = 16
_SIGNALS = {"SIGKILL": signal.SIGKILL, "SIGTERM": signal.SIGTERM, "SIGINT": signal.SIGINT}
GLOO = "rank"  # whose connections torch.distributed makes
KILL, STOP, FULL, GARBAGE, HELLOS = "SIGKILL", "SIGSTOP", "full disk", "garbage", "hellos"


@dataclass(frozen=True)
class Action:
    """`role` is whose processes it is about; `is_early`: before the training has begun."""

    kind: str
    role: str
    is_early: bool
    delay_s: float
    seconds: float  # how long it lasts
    seed: int

    def __str__(self) -> str:
        return f"{self.kind} {self.role}{' early' if self.is_early else ''}"


class Broken(Exception):
    """A check failed."""


def draw(rng: random.Random, job: Job, can_fill: bool) -> Action:
    kinds = [KILL, KILL, KILL, STOP, STOP, "SIGTERM", "SIGINT", GARBAGE, GARBAGE]
    kinds += [HELLOS, HELLOS] if job.is_served else []
    kinds += [FULL] if can_fill else []
    if not job.has_keys:  # nothing that costs it a member: strangers may take free ranks
        kinds = [GARBAGE, HELLOS, HELLOS]
    kind = rng.choice(kinds)
    role = rng.choice(job.roles)
    if kind in (GARBAGE, HELLOS):
        role = rng.choice(("scheduler", "server") if job.is_served else ("rank", "launcher"))
    elif kind == FULL:
        role = rng.choice(("server", "scheduler") if job.is_served else ("rank",))
    return Action(
        kind,
        role,
        is_early=kind != FULL and rng.random() < 0.2 and job.has_keys,
        delay_s=rng.uniform(0.0, 1.5),
        seconds=rng.choice((rng.uniform(0.1, 2.0), rng.uniform(0.1, 2.0), rng.uniform(5.0, 8.0))),
        seed=rng.randrange(1 << 32),
    )


def perform(action: Action, launch: Launch, disk: Disk) -> str:
    """What was done; empty if the run ended before. `Broken` if strangers left something open."""
    rng = random.Random(action.seed)

    def is_time() -> bool:
        if launch.observe() is not None:
            return True
        if action.is_early:
            return len(launch.processes(action.role)) > 0
        return launch.is_training()

    if not watch.wait_until(is_time, _WAIT_S):
        raise Broken(f"no training within {_WAIT_S:g} s")
    time.sleep(action.delay_s)
    found = launch.processes(action.role)
    if launch.code is not None or not found:
        return ""
    if action.role == "launcher" and len(watch.find(launch.mark)) < 3:
        return ""  # it has started nothing: Python's own handlers would end it
    pid = rng.choice(sorted(found))
    name = found[pid]
    try:
        if action.kind in (GARBAGE, HELLOS):
            return _send(action, rng, launch, found)
        if action.kind == FULL:
            began_s = time.monotonic()
            disk.fill(pid, lambda: launch.code is not None, action.seconds)
            return f"full disk for {time.monotonic() - began_s:.1f} s"
        if action.kind == STOP:
            os.kill(pid, signal.SIGSTOP)
            try:
                watch.wait_until(lambda: launch.code is not None, action.seconds)
            finally:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
            return f"SIGSTOP {name} for {action.seconds:.1f} s"
        os.kill(pid, _SIGNALS[action.kind])
    except ProcessLookupError:
        return ""
    return f"{action.kind} {name}"


def _send(action: Action, rng: random.Random, launch: Launch, found: dict[int, str]) -> str:
    """Afterwards nobody has more descriptors open than before; but gloo's ranks, which never close
    what strangers opened."""
    before = {pid: watch.num_descriptors(pid) for pid in found if action.role != GLOO}
    ports = sorted({port for pid in found for port in watch.listening_ports(pid)})
    if not ports:
        return ""
    if action.kind == GARBAGE:
        text = strangers.send_garbage(rng, ports)
    else:
        public_key = next(filter(None, map(watch.public_key, found)), b"")
        text = strangers.send_hellos(rng, ports, launch.folder, public_key)
        if launch.job.has_keys and not text.endswith(strangers.NO_ANSWERS):
            raise Broken(f"a node with keys answered strangers: {text}")
    for pid, count in before.items():
        limit = max(count, 24) + _SPARE_DESCRIPTORS

        def is_flat(pid: int = pid, limit: int = limit) -> bool:
            return watch.num_descriptors(pid) <= limit

        if not watch.wait_until(is_flat, _SETTLE_S):
            raise Broken(
                f"{found[pid]} had {count} descriptors before strangers came and "
                f"{watch.num_descriptors(pid)} {_SETTLE_S:g} s after they left"
            )
    return f"{action.kind} to each {action.role}: {text}"
