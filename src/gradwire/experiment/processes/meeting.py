"""How the ranks of a run find each other: a process group of their own on the store of torchrun.

When torchrun restarts ranks, its store still has the addresses of dead processes. So each attempt
gets a new name. Rank 0 chooses it, and only ranks of this attempt may learn it: each rank stores a
random token, and rank 0 answers under that token.
"""

import time
from collections.abc import Callable
from datetime import timedelta
from uuid import uuid4

import torch.distributed as dist

from gradwire.experiment.processes.launch.children import is_launched, report_joined

_POLL_S = 0.01


def meet(timeout_s: float, text: str = "", backend: str = "gloo") -> str:
    """Makes the default process group as the environment describes it. Returns rank 0's `text`."""
    timeout = timedelta(seconds=timeout_s)
    store, rank, size = next(iter(dist.rendezvous("env://", timeout=timeout)))
    name, text = name_attempt(store, rank, size, text, timeout_s)
    own = dist.PrefixStore(f"gradwire/{name}", store)
    dist.init_process_group(backend, store=own, rank=rank, world_size=size, timeout=timeout)
    if is_launched():
        report_joined()
    return text


def name_attempt(
    store: dist.Store, rank: int, size: int, text: str, timeout_s: float
) -> tuple[str, str]:
    """A name that only the ranks of this attempt know; and rank 0's `text`."""
    until = time.monotonic() + timeout_s
    if rank == 0:
        name = uuid4().hex
        _invite(store, size, name, text, until)
        return name, text
    token = uuid4().hex
    store.set(f"gradwire/token/{rank}", token)
    invitation = f"gradwire/invitation/{token}"
    _wait(lambda: store.check([invitation]), until, "rank 0 has not joined")
    name, _, text = store.get(invitation).decode().partition(" ")
    store.set(f"gradwire/{name}/{rank}", "here")
    return name, text


def _invite(store: dist.Store, size: int, name: str, text: str, until: float) -> None:
    invited: set[str] = set()
    missing = set(range(1, size))

    def have_joined() -> bool:
        for rank in sorted(missing):
            if store.check([f"gradwire/{name}/{rank}"]):
                missing.remove(rank)
            elif store.check([f"gradwire/token/{rank}"]):
                token = store.get(f"gradwire/token/{rank}").decode()  # perhaps of a dead process
                if token not in invited:
                    invited.add(token)
                    store.set(f"gradwire/invitation/{token}", f"{name} {text}")
        return not missing

    _wait(have_joined, until, lambda: f"rank {min(missing)} has not joined")


def _wait(condition: Callable[[], bool], until: float, problem: str | Callable[[], str]) -> None:
    began = time.monotonic()
    while not condition():
        if time.monotonic() > until:
            why = problem if isinstance(problem, str) else problem()
            raise TimeoutError(f"{why} after {time.monotonic() - began:.0f} s")
        time.sleep(_POLL_S)
