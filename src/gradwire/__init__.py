"""Communication-efficient data-parallel training: every technique, real bytes, one simulator.

Names are imported when they are first asked for, so that `import gradwire` and the command line's
help need neither torch nor anything else that takes long to import.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.nn import SyncBatchNorm

    from gradwire.experiment.processes.ranks import run
    from gradwire.experiment.run.config import Config
    from gradwire.experiment.run.outcome import Run
    from gradwire.experiment.run.registries import register
    from gradwire.experiment.simulate.simulation import resume, simulate
    from gradwire.experiment.sweep.results import load
    from gradwire.experiment.sweep.sweep import sweep
    from gradwire.integration.collectives import (
        Adasum,
        Average,
        Compression,
        Sum,
        allgather,
        allreduce,
        allreduce_,
        allreduce_async,
        allreduce_async_,
        barrier,
        broadcast,
        broadcast_,
        byteps_push_pull,
        declare,
        poll,
        push_pull,
        push_pull_async,
        push_pull_inplace,
        synchronize,
    )
    from gradwire.integration.ddp import ddp_comm_hook
    from gradwire.integration.fsdp import compress_replicas
    from gradwire.integration.local_updates.decentralized import decentralized
    from gradwire.integration.local_updates.diloco import diloco
    from gradwire.integration.local_updates.local_sgd import local_sgd
    from gradwire.integration.optimizer import DistributedOptimizer
    from gradwire.integration.process import (
        broadcast_object,
        broadcast_optimizer_state,
        broadcast_parameters,
        cross_rank,
        cross_size,
        gloo_built,
        init,
        is_initialized,
        local_rank,
        local_size,
        mpi_built,
        mpi_threads_supported,
        nccl_built,
        rank,
        shutdown,
        size,
    )
    from gradwire.integration.stats import log_every

    __version__: str

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "Config",
    "DistributedOptimizer",
    "Run",
    "Sum",
    "SyncBatchNorm",
    "__version__",
    "allgather",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "byteps_push_pull",
    "compress_replicas",
    "cross_rank",
    "cross_size",
    "ddp_comm_hook",
    "decentralized",
    "declare",
    "diloco",
    "gloo_built",
    "init",
    "is_initialized",
    "load",
    "local_rank",
    "local_sgd",
    "local_size",
    "log_every",
    "mpi_built",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "push_pull",
    "push_pull_async",
    "push_pull_inplace",
    "rank",
    "register",
    "resume",
    "run",
    "shutdown",
    "simulate",
    "size",
    "sweep",
    "synchronize",
]

_COLLECTIVES = (
    "Adasum",
    "Average",
    "Compression",
    "Sum",
    "allgather",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "barrier",
    "broadcast",
    "broadcast_",
    "byteps_push_pull",
    "declare",
    "poll",
    "push_pull",
    "push_pull_async",
    "push_pull_inplace",
    "synchronize",
)

_PROCESS = (
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "cross_rank",
    "cross_size",
    "gloo_built",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "shutdown",
    "size",
)

_WHERE = {
    "Config": "gradwire.experiment.run.config",
    "DistributedOptimizer": "gradwire.integration.optimizer",
    "Run": "gradwire.experiment.run.outcome",
    "SyncBatchNorm": "torch.nn",
    "compress_replicas": "gradwire.integration.fsdp",
    "ddp_comm_hook": "gradwire.integration.ddp",
    "log_every": "gradwire.integration.stats",
    "decentralized": "gradwire.integration.local_updates.decentralized",
    "diloco": "gradwire.integration.local_updates.diloco",
    "local_sgd": "gradwire.integration.local_updates.local_sgd",
    "register": "gradwire.experiment.run.registries",
    "resume": "gradwire.experiment.simulate.simulation",
    "run": "gradwire.experiment.processes.ranks",
    "simulate": "gradwire.experiment.simulate.simulation",
    "load": "gradwire.experiment.sweep.results",
    "sweep": "gradwire.experiment.sweep.sweep",
    **dict.fromkeys(_COLLECTIVES, "gradwire.integration.collectives"),
    **dict.fromkeys(_PROCESS, "gradwire.integration.process"),
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        found: Any = _version()
    elif name in _WHERE:
        found = getattr(importlib.import_module(_WHERE[name]), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("gradwire")
    except PackageNotFoundError:  # running from a source tree that was never installed
        return "0+unknown"
