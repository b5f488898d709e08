"""How the ranks of a run find each other: a process group of their own on the store of torchrun.

torchrun keeps its store when it starts ranks again, with the addresses of those that are dead. So
each attempt gets a name that nobody had before. Rank 0 chooses it, and only
ranks of this attempt may learn it: each rank stores a random token, and rank 0 answers under it.
"""

import time
from collections.abc import Callable
from datetime import timedelta
from uuid import uuid4

import torch.distributed as dist

from gradwire.experiment.processes.launch.children import is_launched, tell_joined

_POLL_S = 0.01


def meet(timeout_s: float, news: str = "", backend: str = "gloo") -> str:
    """Makes the default process group as the environment describes it. Returns rank 0's `news`."""
    timeout = timedelta(seconds=timeout_s)
    store, rank, size = next(iter(dist.rendezvous("env://", timeout=timeout)))
    name, news = name_attempt(store, rank, size, news, timeout_s)
    own = dist.PrefixStore(f"gradwire/{name}", store)
    dist.init_process_group(backend, store=own, rank=rank, world_size=size, timeout=timeout)
    if is_launched():
        tell_joined()
    return news


def name_attempt(
    store: dist.Store, rank: int, size: int, news: str, timeout_s: float
) -> tuple[str, str]:
    """A name that the ranks of this attempt share and nobody else knows; and rank 0's `news`."""
    until = time.monotonic() + timeout_s
    if rank == 0:
        name = uuid4().hex
        _invite(store, size, name, news, until)
        return name, news
    token = uuid4().hex
    store.set(f"gradwire/token/{rank}", token)
    invitation = f"gradwire/invitation/{token}"
    _wait(lambda: store.check([invitation]), until, "rank 0 has not come")
    name, _, news = store.get(invitation).decode().partition(" ")
    store.set(f"gradwire/{name}/{rank}", "here")
    return name, news


def _invite(store: dist.Store, size: int, name: str, news: str, until: float) -> None:
    invited: set[str] = set()
    missing = set(range(1, size))

    def are_here() -> bool:
        for rank in sorted(missing):
            if store.check([f"gradwire/{name}/{rank}"]):
                missing.remove(rank)
            elif store.check([f"gradwire/token/{rank}"]):
                token = store.get(f"gradwire/token/{rank}").decode()  # maybe of one that is dead
                if token not in invited:
                    invited.add(token)
                    store.set(f"gradwire/invitation/{token}", f"{name} {news}")
        return not missing

    _wait(are_here, until, lambda: f"rank {min(missing)} has not come")


def _wait(is_so: Callable[[], bool], until: float, otherwise: str | Callable[[], str]) -> None:
    began = time.monotonic()
    while not is_so():
        if time.monotonic() > until:
            why = otherwise if isinstance(otherwise, str) else otherwise()
            raise TimeoutError(f"{why} after {time.monotonic() - began:.0f} s")
        time.sleep(_POLL_S)
