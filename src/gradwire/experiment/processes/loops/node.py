"""Runs a server or the scheduler of a user's loop, until all workers have left or are lost."""

import socket
import threading
from collections.abc import Callable
from typing import Any

from gradwire.architecture.parameter_server.parameter_server import ParameterServer
from gradwire.core.errors import LostError
from gradwire.core.node import Node
from gradwire.core.wire import REQUEST
from gradwire.experiment.processes.launch.children import (
    is_launched,
    report_address,
    report_gone,
    report_joined,
    report_model,
)
from gradwire.experiment.processes.launch.launcher import rendezvous_store
from gradwire.experiment.processes.launch.signals import Interrupted, Signals
from gradwire.experiment.processes.loops.job import LoopNode, default_bind, split_address
from gradwire.experiment.processes.loops.models import hold_models
from gradwire.experiment.run.outcome import use_threads
from gradwire.runtime.network.network import parse_duration
from gradwire.runtime.process.engine import ProcessEngine
from gradwire.runtime.process.transport import GOODBYE, Arrival
from gradwire.runtime.zeromq import ZmqTransport
from gradwire.runtime.zeromq.connections.sockets import is_loopback
from gradwire.runtime.zeromq.errors import JoinError, NoMemberError

Report = Callable[[str], None]


class _ServingEngine(ProcessEngine):
    """Reports workers that said goodbye like lost ones: in a user's loop they may end at different
    steps, and nobody must wait for them."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.on_gone: Callable[[list[int]], None] | None = None  # called with `gone_workers`
        self.gone_workers: list[int] = []  # in order

    @property
    def lost(self) -> frozenset[int]:
        return self.gone

    def _remove(self, arrival: Arrival) -> None:
        was_there = arrival.src not in self.gone
        super()._remove(arrival)
        if was_there and arrival.kind == GOODBYE and arrival.tag - 1 != arrival.src:
            self._report(arrival, False)
        if was_there and self.layout.is_worker(arrival.src):
            cause = arrival.tag - 1 if arrival.kind == GOODBYE else -1  # whose loss made it leave
            for rank in (cause, arrival.src):
                if self.layout.is_worker(rank) and rank not in self.gone_workers:
                    self.gone_workers.append(rank)
            if self.on_gone is not None:
                self.on_gone(self.gone_workers)


def serve(own: LoopNode, signals: Signals, report: Report = lambda text: None) -> None:
    """Takes part in a job as its scheduler or as one of its servers."""
    assert own.role in ("scheduler", "server")
    with use_threads(1):
        if own.role == "scheduler":
            _schedule(own, signals, report)
        else:
            _serve(own, signals, report)


def _schedule(own: LoopNode, signals: Signals, report: Report) -> None:
    job = own.job
    host, port = split_address(job.scheduler)
    listener = socket.create_server((host, port + 1 if port else 0))
    store_port = listener.getsockname()[1]
    store = rendezvous_store(listener)

    def on_bound(address: str) -> None:
        if is_launched():
            report_address(address, store_port)
        report(
            f"scheduler: waiting for {job.num_workers} workers and {job.num_servers} servers. "
            f"Start them with --workers {job.num_workers} --servers {job.num_servers} --scheduler "
            f"{address}, or DMLC_PS_ROOT_URI and DMLC_PS_ROOT_PORT"
        )
        if job.keys is None and not is_loopback(address):
            report("warning: without keys everybody on the network can join, and change the model")

    _run(own, signals, report, _wait, on_bound=on_bound)
    del store


def _serve(own: LoopNode, signals: Signals, report: Report) -> None:
    architecture = ParameterServer(own.job.num_servers)

    async def program(node: Node) -> None:
        await node.watch(REQUEST)
        await node.spawn(architecture.daemon(node, {}))
        await hold_models(node, own.job.num_servers, report_model if is_launched() else _nothing)

    def on_bound(address: str) -> None:
        report(f"server: at {address}, joining the scheduler at {own.job.scheduler}")

    bind = own.bind or default_bind(own.job.scheduler)
    options = {"rank": _rank(own), "bind": bind, "advertise": own.advertise or None}
    _run(own, signals, report, program, on_bound=on_bound, **options)


def _nothing() -> None:
    pass


async def _wait(node: Node) -> None:
    """The scheduler's transport does its work."""
    await node.recv_any("nothing")


def _rank(own: LoopNode) -> int | None:
    if own.number is None:
        return None
    servers = own.job.layout.servers
    if not 0 <= own.number < len(servers):
        raise ValueError(
            f"there is no server number {own.number}: there are {len(servers)}, from 0"
        )
    return servers[own.number]


def _run(own: LoopNode, signals: Signals, report: Report, program: Any, **options: Any) -> None:
    job, layout = own.job, own.job.layout
    try:
        transport = ZmqTransport(
            own.role,
            join_s=min(parse_duration(own.join_wait), threading.TIMEOUT_MAX),
            on_wait=lambda text: report(f"{own.role}: waiting, {text}"),
            **job.transport_options(),
            **options,
        )
    except JoinError as error:
        raise LostError(str(error), None) from error
    lost: int | None = transport.rank  # unless it ends well
    try:
        if is_launched():
            report_joined()
        name = layout.name_of(transport.rank)
        report(f"{name}: all are there")
        engine = _ServingEngine(transport, layout.num_workers)

        def on_change(rank: int, is_there: bool, why: str) -> None:
            if rank == layout.scheduler and not is_there:
                raise LostError(f"the scheduler was lost ({why})", rank)
            if not is_there:
                report(f"{name}: {layout.name_of(rank)} was lost ({why})")

        def on_wait() -> None:
            if signals.wanted:
                raise Interrupted(signals.wanted)

        engine.on_change, engine.on_wait = on_change, on_wait
        if is_launched() and own.role == "scheduler":
            engine.on_gone = report_gone
        with signals.waiting():
            engine.run(program)
        lost = None
        report(f"{name}: all workers have left")
    except NoMemberError as error:
        raise LostError(str(error), transport.rank) from error
    finally:
        transport.close(lost)
