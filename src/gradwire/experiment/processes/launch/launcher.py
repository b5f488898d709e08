"""Starts the ranks of a run on this machine, watches them, and restarts them if asked to.

The ranks find each other through a store in this process, on a free port of the loopback interface.
The port is bound before it is used, so there is no race for it.
"""

import contextlib
import os
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

from gradwire.experiment.processes.launch.children import (
    Children,
    Failure,
    failure_of,
    ignore_running,
)
from gradwire.experiment.processes.launch.scratch import scratch_folder
from gradwire.experiment.processes.launch.signals import Interrupted, Signals

_LEAVE_LIMIT_S = 15.0  # how long ranks may take to end after one of them has failed
_STOP_LIMIT_S = 60.0  # how long they may take to end after a signal
_POLL_S = 0.02


def launch(
    size: int,
    command: Callable[[int], Sequence[str]],
    restarts: int = 0,
    say: Callable[[str], None] = lambda text: None,
) -> Failure | None:
    """Runs `command(attempt)` as ranks 0 .. size - 1 until all have ended well."""
    with Signals().caught() as signals, signals.waiting():
        for attempt in range(restarts + 1):
            failure = _attempt(size, command(attempt), attempt, signals)
            if failure is None or not failure.may_retry or attempt == restarts:
                return failure
            say(f"{failure.message}\nstarting again ({attempt + 1} of {restarts})")
    raise AssertionError


def _attempt(size: int, command: Sequence[str], attempt: int, signals: Signals) -> Failure | None:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    with scratch_folder() as place:
        store = rendezvous_store(listener)
        environment = {
            **os.environ,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(size),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # rank 0, too, is a client of the store
            "TORCHELASTIC_RESTART_COUNT": str(attempt),
            "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", loopback()),
        }
        ranks = Children(place, size)
        try:
            for rank in range(size):
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                ranks.start(rank, command, environment | own)
            failure = _watch(ranks, signals)
        finally:
            ranks.kill()
            del store
    return failure


def rendezvous_store(listener: socket.socket) -> Any:
    """The store through which ranks find each other, on a socket that listens."""
    import torch.distributed as dist

    host, port = listener.getsockname()[:2]
    return dist.TCPStore(
        host,
        port,
        None,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
        use_libuv=False,  # in torch 2.6 that server does not take a socket that listens
    )


def loopback() -> str:
    """The name of the loopback interface."""
    return next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")


def _watch(ranks: Children, signals: Signals) -> Failure | None:
    """Waits until all ranks have ended. If one fails, the others are killed: at once if not all
    have joined, since there is nothing to save yet; else after a while."""
    until, first, forwarded, have_joined = float("inf"), None, 0, True
    with contextlib.suppress(Interrupted):  # a second signal: the ranks end at once, too
        while None in (codes := ranks.poll()):
            now = time.monotonic()
            if signals.wanted and not forwarded:
                forwarded, until = signals.wanted, now + _STOP_LIMIT_S
                ranks.signal(forwarded)
            if first is None:
                first = next((rank for rank, code in enumerate(codes) if code), None)
                if first is not None:
                    have_joined = all(map(ranks.has_joined, range(ranks.size)))
                    until = min(until, now + _LEAVE_LIMIT_S)
            if now > until or not have_joined:
                break
            time.sleep(_POLL_S)
    codes = ranks.poll()
    ranks.kill()
    if all(code == 0 for code in codes):
        return None
    if first is None:
        first = next((rank for rank, code in enumerate(codes) if code), None)
    if not have_joined:
        codes = ignore_running(codes)
    return failure_of(ranks, codes, first, forwarded)
