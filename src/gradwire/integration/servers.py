"""The communicator of a worker whose job has servers: it joins the job over ZeroMQ.

`gradwire launch` starts scheduler and servers, and tells workers by environment variables where
they are (`experiment/processes/loops/job.py`).
"""

import os
import time
from typing import NoReturn

import torch

from gradwire.core.errors import PeerLost
from gradwire.experiment.processes.loops.job import LoopJob, job_of_worker
from gradwire.experiment.run.machine import why_lost
from gradwire.integration.communicator import Communicator, shared_communicator
from gradwire.integration.settings import Settings
from gradwire.runtime.zeromq import ZmqTransport

_NAME = "servers"


class NodeLost(PeerLost):
    """A worker, a server or the scheduler is gone, and this worker cannot continue without it."""

    def __init__(self, error: PeerLost, message: str) -> None:
        super().__init__(error.rank, error.crashed_s, error.noticed_s)
        self.args = (message,)


def find_servers(settings: Settings) -> tuple[LoopJob, int]:
    """The job of this process and its number; refuses other numbers of servers than there are."""
    job, own = job_of_worker(os.environ, settings.num_servers)
    if job.num_servers != settings.num_servers:
        raise ValueError(
            f"{settings.architecture!r} has {settings.num_servers} servers, but this job was "
            f"launched with {job.num_servers}. Write parameter_server({job.num_servers}), or "
            f"gradwire launch --servers {settings.num_servers}"
        )
    return job, own


def communicator_with_servers(
    settings: Settings, *, timeout_s: float, device: torch.device | None
) -> Communicator:
    """That of this process. All workers call this, since the job waits for them to join."""
    job, own = find_servers(settings)

    def make() -> Communicator:
        transport = ZmqTransport(
            "worker",
            rank=own,
            join_s=timeout_s,
            device=device if device is not None and device.type == "cuda" else None,
            **job.transport_options(),
        )
        made = Communicator(
            transport, job.num_workers, timeout_s=timeout_s, native=False, device=device
        )
        _watch(made, job)
        return made

    return shared_communicator(_NAME, make)


def _watch(made: Communicator, job: LoopJob) -> None:
    """Ends all exchanges if a server or the scheduler is lost, and names who was lost."""
    layout = job.layout

    def on_change(rank: int, is_there: bool, why: str) -> None:
        if not is_there and not layout.is_worker(rank):
            _raise_lost(rank, why)

    def explain(error: BaseException) -> BaseException:
        if not isinstance(error, PeerLost):
            return error
        text = why_lost(error, layout.name_of)
        if layout.is_worker(error.rank):
            text += (
                f", and means need all {job.num_workers} workers (this is worker {made.rank}). "
                "Start the job again from a checkpoint; with asp and ssp(3) the others continue"
            )
        else:
            text += f" (this is worker {made.rank}). Start the job again from a checkpoint"
        return NodeLost(error, text)

    made.engine.on_change, made.engine.explain = on_change, explain


def _raise_lost(rank: int, why: str) -> NoReturn:
    now = time.monotonic()
    error = PeerLost(rank, now, now)
    error.add_note(f"rank {rank}: {why}")
    raise error
