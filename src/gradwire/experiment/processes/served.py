"""Runs one node of a run with servers, over ZeroMQ: the scheduler, a server or a worker.

The scheduler keeps the record. A server that has a folder survives the end of its process (see
`runtime/durable/transport.py`): when it is restarted, it finds its state and its journal there. A
lost worker may be replaced if the others can continue without it; the new one asks the servers for
the model.
"""

from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from gradwire.core.errors import LostError, RefusedError
from gradwire.core.layout import RoleName
from gradwire.experiment.processes.headers import HEADERS
from gradwire.experiment.processes.launch.children import is_launched, report_joined
from gradwire.experiment.processes.launch.signals import Interrupted, Signals
from gradwire.experiment.processes.node.run import NodeRun
from gradwire.experiment.processes.node.types import RunFolder
from gradwire.experiment.processes.ranks import prepare_or_explain
from gradwire.experiment.processes.state.recovery import (
    CONFIG,
    open_store,
    remove_store,
    store_folder,
)
from gradwire.experiment.run.config import Config, common_settings
from gradwire.experiment.run.machine import default_threads, layout_of, own_device
from gradwire.experiment.run.outcome import Progress, Run, use_threads
from gradwire.experiment.run.record import write_config
from gradwire.experiment.run.setup import Experiment
from gradwire.runtime.durable.checkpoint import Store
from gradwire.runtime.durable.transport import DurableTransport, links_of
from gradwire.runtime.network.network import parse_duration
from gradwire.runtime.process.transport import LinkCounts
from gradwire.runtime.zeromq import ZmqTransport
from gradwire.runtime.zeromq.connections.sockets import (
    check_allowed,
    check_target,
    host_of,
    is_loopback,
)
from gradwire.runtime.zeromq.errors import JoinError, NoMemberError, NotAdmittedError
from gradwire.runtime.zeromq.keys import load_keys


@dataclass(frozen=True)
class NodeOptions:
    """The role of a node, and how it finds the others."""

    role: RoleName
    scheduler: str  # tcp://HOST:PORT
    number: int | None = None  # among the workers, or among the servers
    bind: str = "tcp://127.0.0.1:0"  # where a server listens
    advertise: str | None = None
    keys: Path | None = None
    insecure: bool = False
    is_durable: bool = False
    silence: str = "5s"
    server_wait: str = "60s"
    join_wait: str = "60s"


def take_part(
    config: Config,
    options: NodeOptions,
    where: RunFolder,
    *,
    checkpoint_every: str = "30s",
    timeout: str = "300s",
    signals: Signals | None = None,
    progress: Progress | None = None,
    say: Callable[[str], None] = lambda text: None,
    report: Callable[[str], None] = lambda text: None,
) -> Run:
    """Runs until the job is done. All nodes get the summary, the scheduler also the model."""
    with use_threads(config.threads or default_threads(layout_of(config).size)):
        experiment = prepare_or_explain(config, is_quiet=options.role != "scheduler")
        if isinstance(experiment, str):
            raise RefusedError(experiment)
        try:
            node = _ServedNode(experiment, options, where, report)
        except NotAdmittedError as error:
            raise RefusedError(str(error)) from error
        except JoinError as error:
            raise LostError(str(error), None) from error
        return node.run(
            checkpoint_every_s=parse_duration(checkpoint_every),
            timeout_s=parse_duration(timeout),
            signals=signals or Signals(),
            progress=progress,
            say=say,
        )


def _describe_access(address: str) -> str:
    """Who has access to this address of a job without keys."""
    where = "every user of this machine" if is_loopback(address) else "everybody on the network"
    return (
        f"{where} can join, and read and change the model. `gradwire ps keys FILE` makes keys; "
        "give all nodes --keys FILE"
    )


def _count(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


class _ServedNode:
    """A node on its transport."""

    def __init__(
        self,
        experiment: Experiment,
        options: NodeOptions,
        where: RunFolder,
        report: Callable[[str], None],
    ) -> None:
        self.experiment = experiment
        self.options = options
        self.where = where
        self.store: Store | None = None
        self._has_begun = False
        config, layout = experiment.config, experiment.plan.layout
        assert layout.others, f"{config.architecture} has no servers"
        keys = None if options.keys is None else load_keys(options.keys)
        check_allowed(options.scheduler, keys, options.insecure)
        if options.role != "scheduler":
            check_target(options.scheduler)
        if options.role == "worker":
            report(f"worker: joining the scheduler at {options.scheduler}")
        self.transport = ZmqTransport(
            options.role,
            scheduler=options.scheduler,
            num_workers=layout.num_workers,
            num_servers=layout.num_servers,
            rank=self._requested_rank(),
            bind=options.bind,
            advertise=options.advertise,
            on_bound=lambda address: report(self._describe_address(address)),
            on_wait=lambda text: report(f"{options.role}: waiting, {text}"),
            fingerprint=self._fingerprint(),
            headers=HEADERS,
            keys=keys,
            insecure=options.insecure,
            heartbeat_s=parse_duration(options.silence),
            join_s=parse_duration(options.join_wait),
            server_s=parse_duration(options.server_wait),
            acknowledges="asked" if self._has_store else "received",
            links=self._open_store if self._has_store else None,
            device=own_device(config),
        )
        self.report = report
        self.name = layout.name_of(self.transport.rank)
        if is_launched():
            report_joined()
        if options.role == "scheduler":
            report("scheduler: all are there")
        else:
            report(f"{options.role}: joined as {self.name}")

    def _describe_address(self, address: str) -> str:
        """What the user must know to start the other nodes, once this one listens."""
        options, layout = self.options, self.experiment.plan.layout
        if options.role == "server":
            return f"server: at {address}, joining the scheduler at {options.scheduler}"
        needed = (
            f"{_count(layout.num_workers, 'worker')} and {_count(layout.num_servers, 'server')}"
        )
        host, hint = host_of(address), ""
        if host in ("0.0.0.0", "::", "*"):
            address = f"tcp://HOST:{address.rpartition(':')[2]}"
            hint = ", where HOST is how they reach this machine"
        flags = f"--scheduler {address}"
        if options.keys is not None:
            flags += f" --keys {options.keys}"
        elif options.insecure:
            flags += " --insecure"
        warning = (
            ""
            if options.keys is not None
            else f"\nwarning: without keys {_describe_access(address)}"
        )
        return f"scheduler: waiting for {needed}. Start them with {flags}{hint}{warning}"

    @property
    def _has_store(self) -> bool:
        return self.options.role == "server" and self.where.folder is not None

    def _requested_rank(self) -> int | None:
        """The rank to ask for; None: any."""
        role, number = self.options.role, self.options.number
        if number is None:
            return None
        ranks = self.experiment.plan.layout.ranks_of(role)
        if not 0 <= number < len(ranks):
            raise ValueError(f"there is no {role} number {number}: there are {len(ranks)}, from 0")
        return ranks[number]

    def _fingerprint(self) -> bytes:
        """A digest that is equal for nodes with the same settings and header classes."""
        text = "\n".join(common_settings(self.experiment.config.to_toml()))
        return blake2b(text.encode() + HEADERS.digest, digest_size=16).digest()

    def _open_store(self, rank: int, incarnation: float, job: str) -> LinkCounts:
        """Opens the store of this server in this job; returns its links as of its state."""
        assert self.where.folder is not None
        self.store = open_store(store_folder(self.where.folder, rank, job))
        write_config(self.store.folder / CONFIG, self.experiment.config)
        return links_of(self.store)

    def _report_training(self, program: Any) -> Any:
        """Wraps programs of segments: with the first one the training begins. Before it the run may
        be refused, and there is no record."""
        if self.options.role == "scheduler" and not self._has_begun:
            self._has_begun = True
            self.report(f"scheduler: the training begins; the record is in {self.where.folder}")
        return program

    def run(
        self, *, signals: Signals, timeout_s: float, checkpoint_every_s: float, **settings: Any
    ) -> Run:
        transport, state, durable = self.transport, None, None
        lost: int | None = transport.rank  # unless the run ends well
        try:
            if self.store is not None:
                state = None if self.store.state is None else self.store.state["state"]
                durable = DurableTransport(
                    transport,
                    self.store,
                    lambda: node.state(),
                    headers=HEADERS,
                    is_durable=self.options.is_durable,
                    checkpoint_every_s=checkpoint_every_s,
                    device=own_device(self.experiment.config),
                )
            node = NodeRun(
                self.experiment,
                transport if durable is None else durable,
                self.experiment.plan.layout,
                self.where,
                checkpoint_every_s=checkpoint_every_s,
                timeout_s=timeout_s,
                signals=signals,
                incarnation=transport.incarnation,
                wrap=self._report_training if durable is None else durable.recorded,
                store_folder=None if self.store is None else self.store.folder,
                is_started_by_hand=not is_launched(),
                **settings,
            )
            if self.store is not None and self.store.skipped:
                node.notices.append(self.store.skipped)
            run = node.run(state)
            lost = None
            if self.options.role != "scheduler":
                self.report(f"{self.name}: done; the scheduler has the record")
            return run
        except LostError as error:
            lost = error.rank
            raise
        except RefusedError:  # all nodes get this error
            lost = None
            raise
        except Interrupted:
            if self.experiment.plan.pauses:  # all nodes stop
                lost = None
            raise
        except NoMemberError as error:
            raise LostError(str(error), transport.rank) from error
        finally:
            try:
                if durable is not None:
                    durable.close()
            finally:
                transport.close(lost)
            if lost is None and self.store is not None:  # it is not needed again
                remove_store(self.store.folder)
