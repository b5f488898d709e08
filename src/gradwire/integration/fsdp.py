"""Compression between the replicas of a model that FSDP2 shards inside each node.

    names = ("replicate", "shard")
    mesh = init_device_mesh("cuda", (num_nodes, gpus_per_node), mesh_dim_names=names)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    gradwire.compress_replicas(model, mesh["replicate"].get_group(), "ef(topk(0.01))")

FSDP averages gradients inside a node, at full precision, and hands each rank its shard; this hook
then averages shards with those of the same rank in the other nodes. The state of compression is
sharded like the gradients. FSDP waits for the hook of a module before it goes on with the backward
pass of the next one on the CPU; on an accelerator work that was queued before goes on.

A shard that has NaN or infinity on one replica is NaN on all of them.
"""

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable

from gradwire.core.codec import Compression
from gradwire.core.spec import Placed
from gradwire.integration.communicator import communicator_of
from gradwire.integration.exchange import Exchange, Layout
from gradwire.integration.settings import Settings
from gradwire.integration.stats import Meter, Stats


class CompressedReplicas:
    """What `compress_replicas` returns: figures and state."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._meter = Meter()
        self._meter.begin(exchange.communicator, exchange.label)
        self._is_in_backward = False
        self._waited_s = 0.0  # in this step

    def stats(self) -> Stats:
        """What was sent between replicas so far, and what that took."""
        return self._meter.stats()

    def state_dict(self) -> dict[str, Any]:
        """What this rank keeps from step to step: residuals, momenta. Every rank has its own."""
        return self._exchange.state_dict()

    def load_state_dict(self, saved: Any) -> None:
        """Continues from a saved state of the same rank, or from those of all ranks as a list."""
        self._exchange.load_state_dict(saved)

    def average(self, name: str, module: nn.Module, shard: Tensor) -> None:
        """The hook of a module: `shard` becomes the mean of all replicas."""
        if not self._is_in_backward:
            self._is_in_backward = True
            Variable._execution_engine.queue_callback(self._finish)
        after = torch.cuda.current_stream(shard.device).record_event() if shard.is_cuda else None
        self._meter.add_bucket(shard)
        began = time.perf_counter()
        future = self._exchange.mean(
            name, _layout(name, module, shard), shard, is_last=True, after=after
        )
        mean = future.result()  # raises what went wrong
        self._waited_s += time.perf_counter() - began
        stream = self._exchange.communicator.stream
        if stream is not None:
            torch.cuda.current_stream(shard.device).wait_stream(stream)
        shard.copy_(mean)

    def _finish(self) -> None:
        self._is_in_backward = False
        self._exchange.finish_step()
        self._meter.add_step(self._waited_s)
        self._waited_s = 0.0


def compress_replicas(
    model: nn.Module,
    group: dist.ProcessGroup,
    compression: str | Compression,
    *,
    seed: int = 0,
    steps_per_epoch: float | None = None,
    timeout_s: float = 300.0,
    native: bool = True,
) -> CompressedReplicas:
    """Averages the gradients of a model that FSDP2 has sharded with those of other replicas.

    `group`: the ranks that hold the same shard, `mesh["replicate"].get_group()`. Other settings are
    those of `ddp_comm_hook`. Every rank of every group calls it.
    """
    try:
        from torch.distributed.fsdp import FSDPModule
    except ImportError:
        raise RuntimeError(
            f"compress_replicas needs FSDP2's all-reduce hook, which torch {torch.__version__} "
            "does not have: install torch 2.7 or newer"
        ) from None
    sharded = [(n, m) for n, m in model.named_modules() if isinstance(m, FSDPModule)]
    if not sharded:
        raise ValueError(
            f"{type(model).__name__} has no FSDP module: shard it first, fully_shard(model, "
            'mesh=mesh["shard"])'
        )
    if not hasattr(sharded[0][1], "set_all_reduce_hook"):
        raise RuntimeError(
            f"torch {torch.__version__} has no FSDPModule.set_all_reduce_hook: install torch 2.7 "
            "or newer"
        )
    settings = Settings.parse(compression, "allreduce", seed, steps_per_epoch)
    device = next(model.parameters()).device
    communicator = communicator_of(group, timeout_s=timeout_s, native=native, device=device)
    exchange = Exchange(communicator, settings, communicator.new_label())
    replicas = CompressedReplicas(exchange)
    for name, module in sharded:
        _set_hook(replicas, name or "model", module)
    return replicas


def _set_hook(replicas: CompressedReplicas, name: str, module: Any) -> None:
    def hook(shard: Tensor) -> None:
        replicas.average(name, module, shard)

    module.set_all_reduce_hook(hook)


def _layout(name: str, module: Any, shard: Tensor) -> Layout:
    """The tensors in a shard, as far as FSDP tells; else one vector."""
    whole: Layout = ((name, 0, shard.numel(), (shard.numel(),)),)
    try:
        (group,) = module._get_fsdp_state()._fsdp_param_groups
        found = [
            (p._param_fqn, p.sharded_size, p.padded_sharded_param_size) for p in group.fsdp_params
        ]
    except (AttributeError, ValueError):
        return whole
    placed: list[Placed] = []
    start = 0
    for own, size, padded in found:
        stop = start + padded.numel()
        shape = tuple(size) if size.numel() == padded.numel() else (padded.numel(),)
        placed.append((str(own), start, stop, shape))
        start = stop
    return tuple(placed) if start == shard.numel() else whole
