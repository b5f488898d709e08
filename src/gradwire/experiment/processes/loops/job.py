"""A job with servers for a user's loop: its nodes, and how they find each other.

Workers learn it from the environment variables of ps-lite and BytePS, which `gradwire launch` sets:
DMLC_PS_ROOT_URI and DMLC_PS_ROOT_PORT (the scheduler), DMLC_NUM_WORKER, DMLC_NUM_SERVER,
DMLC_WORKER_ID; and GRADWIRE_KEYS, the file with the job's keys, or GRADWIRE_INSECURE=1.

The scheduler also has the store through which workers find each other for torch.distributed, on the
port after its own.
"""

import re
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from gradwire.core.layout import NodeLayout, RoleName
from gradwire.runtime.network.network import parse_duration

DEFAULT_PORT = 9092  # of the scheduler
KEYS, INSECURE = "GRADWIRE_KEYS", "GRADWIRE_INSECURE"
CLOSED_S = 1.0  # a node whose connections are closed without a goodbye is lost after so long
LAUNCH = "gradwire launch --workers 2 --servers {servers} -- python train.py"


@dataclass(frozen=True)
class LoopJob:
    """The nodes of a job, and the address of its scheduler: tcp://HOST:PORT."""

    num_workers: int
    num_servers: int
    scheduler: str
    keys: Path | None = None
    insecure: bool = False
    silence: str = "10s"  # after which a node is lost

    def __post_init__(self) -> None:
        for name, count in (("workers", self.num_workers), ("servers", self.num_servers)):
            if count < 1:
                raise ValueError(f"{name} must be at least 1, got {count}")
        parse_duration(self.silence)

    @property
    def layout(self) -> NodeLayout:
        return NodeLayout(self.num_workers, self.num_servers, 1)

    def transport_options(self) -> dict[str, Any]:
        """What the transports of all nodes have in common."""
        from gradwire.experiment.processes.headers import HEADERS
        from gradwire.runtime.zeromq.keys import load_keys

        silence_s = parse_duration(self.silence)
        return {
            "scheduler": self.scheduler,
            "num_workers": self.num_workers,
            "num_servers": self.num_servers,
            # Other nodes than those of `gradwire ps`.
            "fingerprint": blake2b(b"loop" + HEADERS.digest, digest_size=16).digest(),
            "headers": HEADERS,
            "keys": None if self.keys is None else load_keys(self.keys),
            "insecure": self.insecure,
            "heartbeat_s": silence_s,
            "server_s": silence_s,
            "closed_s": CLOSED_S,
            "close_s": 2.0,
        }

    def environment(self, worker: int) -> dict[str, str]:
        """The variables of a worker, for gradwire and for torch.distributed."""
        host, port = split_address(self.scheduler)
        found = {
            "DMLC_ROLE": "worker",
            "DMLC_PS_ROOT_URI": host,
            "DMLC_PS_ROOT_PORT": str(port),
            "DMLC_NUM_WORKER": str(self.num_workers),
            "DMLC_NUM_SERVER": str(self.num_servers),
            "DMLC_WORKER_ID": str(worker),
            "RANK": str(worker),
            "WORLD_SIZE": str(self.num_workers),
            "MASTER_ADDR": host,
            "MASTER_PORT": str(port + 1),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # rank 0, too, is a client of the store
        }
        if self.keys is not None:
            found[KEYS] = str(self.keys)
        if self.insecure:
            found[INSECURE] = "1"
        return found


_RENDEZVOUS = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE")


def complete(environment: MutableMapping[str, str], job: LoopJob, worker: int) -> None:
    """Adds the variables of a worker. Where MASTER_ADDR is set, workers find each other there."""
    own = job.environment(worker)
    if "MASTER_ADDR" in environment:
        own = {name: text for name, text in own.items() if name not in _RENDEZVOUS}
    environment.update(own)


def job_of_worker(environment: Mapping[str, str], servers: int) -> tuple[LoopJob, int]:
    """The job of this process, and its number among the workers.

    `servers`: of the architecture, for messages.
    """
    names = ("DMLC_PS_ROOT_URI", "DMLC_NUM_WORKER", "DMLC_NUM_SERVER", "DMLC_WORKER_ID")
    missing = [name for name in names if not environment.get(name)]
    if missing:
        raise RuntimeError(
            f"no servers are running for this process ({', '.join(missing)} not set): start it "
            f"with {LAUNCH.format(servers=servers)}"
        )
    keys = environment.get(KEYS)
    job = LoopJob(
        number(environment, "DMLC_NUM_WORKER") or 0,
        number(environment, "DMLC_NUM_SERVER") or 0,
        scheduler_address(environment),
        Path(keys) if keys else None,
        environment.get(INSECURE, "") == "1",
    )
    own = number(environment, "DMLC_WORKER_ID")
    assert own is not None
    if own >= job.num_workers:
        raise ValueError(f"DMLC_WORKER_ID is {own}, but there are {job.num_workers} workers")
    return job, own


def number(environment: Mapping[str, str], name: str) -> int | None:
    """A variable that is a number; None if it is not set."""
    text = environment.get(name, "")
    if text and not re.fullmatch(r"\d+", text):
        raise ValueError(f"{name} must be a number, got {text!r}")
    return int(text) if text else None


def scheduler_address(environment: Mapping[str, str]) -> str:
    host = environment.get("DMLC_PS_ROOT_URI", "127.0.0.1")
    return f"tcp://{host}:{number(environment, 'DMLC_PS_ROOT_PORT') or DEFAULT_PORT}"


def split_address(address: str) -> tuple[str, int]:
    """Host and port of tcp://HOST:PORT."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"an address is tcp://HOST:PORT, got {address!r}")
    return host, int(port)


def default_bind(scheduler: str) -> str:
    """Where servers listen: on loopback if the scheduler is there, else on all interfaces."""
    host = scheduler.removeprefix("tcp://").rpartition(":")[0]
    is_local = host in ("localhost", "::1") or host.startswith("127.")
    return "tcp://127.0.0.1:0" if is_local else "tcp://0.0.0.0:0"


@dataclass(frozen=True)
class LoopNode:
    """A server or the scheduler of a job."""

    job: LoopJob
    role: RoleName
    number: int | None = None  # among the servers
    bind: str = ""
    advertise: str = ""
    join_wait: str = "600s"
