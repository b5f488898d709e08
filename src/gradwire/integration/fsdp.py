"""Compression between the replicas of a model that FSDP2 shards inside each node.

    names = ("replicate", "shard")
    mesh = init_device_mesh("cuda", (num_nodes, gpus_per_node), mesh_dim_names=names)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    gradwire.compress_replicas(model, mesh["replicate"].get_group(), "ef(topk(0.01))")

FSDP averages gradients inside a node, at full precision, and hands each rank its shard; this hook
then averages shards with those of the same rank in the other nodes. The state of compression is
sharded like the gradients.

FSDP waits for the hook of a module before it goes on with the backward pass of the next one. On the
CPU the hook returns at once where the gradients will be views of the shard: then the mean may be
written into it at the end of the backward pass. Whether they are is looked at in the first backward
pass, in which the hook waits. It also waits where gradients add up over backward passes, where they
are cast, divided or moved, and where hooks of the user read them earlier. On an accelerator it
always waits, but work that was queued before goes on.

A shard that has NaN or infinity on one replica is NaN on all of them.
"""

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.autograd import Variable
from torch.distributed.tensor import DTensor

from gradwire.core.codec import Compression
from gradwire.core.spec import Placed
from gradwire.integration.communicator import communicator_of
from gradwire.integration.described import as_tensors, from_tensors
from gradwire.integration.exchange import Exchange, Layout
from gradwire.integration.names import check_rules, named_tensors
from gradwire.integration.saved_states import states_in
from gradwire.integration.settings import Settings
from gradwire.integration.stats import Meter, Stats

_HAS_FAILED = (
    "an earlier backward pass has failed when some of its gradients had been sent: shard the model "
    "again, call compress_replicas, and start from a checkpoint. If none has failed, checkpoint "
    "activations with use_reentrant=False"
)


class CompressedReplicas:
    """What `compress_replicas` returns: figures and state.

    It is `Stateful`, so torch.distributed.checkpoint saves and loads it. The state of a rank has a
    key of its own. What a method keeps has other shapes than at its start, which the checkpoint
    cannot know before it loads; so the value is one tuple of tensors, of which the first describes
    the others.
    """

    def __init__(
        self,
        exchange: Exchange,
        shard: int,
        device: torch.device,
        named: Sequence[tuple[str, Tensor]],
    ) -> None:
        self._exchange = exchange
        self._named = list(named)  # kept, so that no other parameter gets the id of one of them
        self._names = {id(parameter): name for name, parameter in named}
        self._shard, self._device = shard, device  # the first of the ranks with this shard
        self._meter = Meter()
        self._meter.begin(exchange.communicator, exchange.label)
        self._backward: int | None = None  # the backward pass under way
        self._pending: list[_Shard] = []  # shards that are looked at when it ends
        self._num_shards = 0  # that were exchanged in it
        self._may_wait: dict[str, bool] = {}  # by module: whether gradients are views of the shard
        self._waited_s = 0.0  # in this step

    def stats(self) -> Stats:
        """What was sent between replicas so far, and what that took."""
        return self._meter.stats()

    def state_dict(self) -> dict[str, Any]:
        """What this rank keeps from step to step: residuals, momenta. Every rank has its own."""
        key = self._key(self._exchange.communicator.rank)
        return {key: as_tensors(self._exchange.state_dict(), key)}

    def load_state_dict(self, saved: "Mapping[str, Any] | Sequence[Mapping[str, Any]]") -> None:
        """Continues from a saved state of the same rank, or from those of all ranks as a list.

        The number of replicas may have changed, not that of the shards of each.
        """
        found: dict[str, Any] = {}
        for part in states_in(saved):
            found.update(part)
        own, size = self._exchange.communicator.rank, self._exchange.communicator.size
        rows: list[Any] = []
        while (key := self._key(len(rows))) in found:
            rows.append(from_tensors(found[key], self._device, key))
        if rows and len(rows) == rows[0]["size"] != size:
            self._exchange.load_state_dict(rows)
            return
        key = self._key(own)
        if key not in found:
            raise ValueError(
                f"the saved state has {', '.join(found) or 'nothing'}, this rank needs {key}: give "
                "the states of all ranks as a list"
            )
        row = from_tensors(found[key], self._device, key)
        if row["size"] != size:
            count = row["size"]
            raise ValueError(
                f"the saved state is of {count} replicas, this model has {size}: load "
                f"replicas.saved_by({count}) in place of replicas, or give the states of all ranks "
                "as a list"
            )
        self._exchange.load_state_dict(row)

    def saved_by(self, num_replicas: int) -> "SavedReplicas":
        """To load what another number of replicas has saved, with torch.distributed.checkpoint.

        What was still to be sent is kept: `dcp.load({"replicas": replicas.saved_by(4)}, ...)`.
        """
        return SavedReplicas(self, [self._key(replica) for replica in range(num_replicas)])

    def _key(self, replica: int) -> str:
        return f"shard {self._shard} replica {replica}"

    def average(self, name: str, module: nn.Module, shard: Tensor) -> None:
        """The hook of a module: `shard` becomes the mean of all replicas, now or later."""
        backward = torch._C._current_graph_task_id()
        if backward != self._backward:
            if self._backward is not None:  # means of its shards may still be under way
                raise RuntimeError(_HAS_FAILED)
            self._backward = backward
            Variable._execution_engine.queue_callback(self._finish)
        after = torch.cuda.current_stream(shard.device).record_event() if shard.is_cuda else None
        self._meter.add_bucket(shard)
        self._num_shards += 1
        is_later = self._may_wait.get(name, False) and _takes_views(module)
        sent = shard.clone() if is_later else shard
        future = self._exchange.mean(
            name, _layout(name, module, shard, self._names), sent, is_last=True, after=after
        )
        if is_later:
            self._pending.append(_Shard(name, module, shard, sent, future))
            return
        mean = self._wait(future)
        stream = self._exchange.communicator.stream
        if stream is not None:
            torch.cuda.current_stream(shard.device).wait_stream(stream)
        shard.copy_(mean)
        if not shard.is_cuda and name not in self._may_wait:
            self._pending.append(_Shard(name, module, shard, mean, None))

    def _wait(self, future: "Future[Tensor]") -> Tensor:
        began = time.perf_counter()
        mean = future.result()  # raises what went wrong
        self._waited_s += time.perf_counter() - began
        return mean

    def _finish(self) -> None:
        """At the end of the backward pass, when FSDP has made gradients of all shards."""
        self._backward = None
        pending, self._pending = self._pending, []
        if not self._num_shards:
            return
        self._num_shards = 0
        for own in pending:
            is_view = own.is_unchanged() and _are_views(own)
            if own.future is None:
                self._may_wait[own.name] = is_view
                continue
            mean = self._wait(own.future)
            if not is_view:
                raise RuntimeError(
                    f"FSDP has changed or copied the gradients of {own.name} after it handed them "
                    "over, which it did not do before, so they are not averaged. Call "
                    "compress_replicas again after the settings of FSDP were changed"
                )
            own.shard.copy_(mean)
        self._exchange.finish_step()
        self._meter.add_step(self._waited_s)
        self._waited_s = 0.0


class _Shard(NamedTuple):
    """A shard of gradients in a backward pass."""

    name: str
    module: nn.Module
    shard: Tensor  # of which FSDP makes gradients
    left: Tensor  # what was in it when the hook returned
    future: "Future[Tensor] | None"  # of the mean; None: it is in the shard already

    def is_unchanged(self) -> bool:
        """Whether FSDP has left the bits of the shard as they were."""
        return torch.equal(self.shard.view(torch.uint8), self.left.view(torch.uint8))


class SavedReplicas:
    """The states of all replicas in a checkpoint (`saved_by`)."""

    def __init__(self, replicas: CompressedReplicas, keys: Sequence[str]) -> None:
        self._replicas, self._keys = replicas, keys

    def state_dict(self) -> dict[str, Any]:
        """What is to be loaded; the values are not used."""
        return dict.fromkeys(self._keys, ())

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        self._replicas.load_state_dict(saved)


def compress_replicas(
    model: nn.Module,
    group: dist.ProcessGroup,
    compression: str | Compression,
    *,
    seed: int = 0,
    steps_per_epoch: float | None = None,
    timeout_s: float = 300.0,
    native: bool = True,
    scaler: GradScaler | None = None,
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
    named = named_tensors(model.named_parameters())
    _check_group(named, group)
    settings = Settings.parse(compression, "allreduce", seed, steps_per_epoch)
    check_rules(settings.compression, [name for name, p in named if p.requires_grad])
    device = named[0][1].device
    communicator = communicator_of(group, timeout_s=timeout_s, native=native, device=device)
    exchange = Exchange(communicator, settings, communicator.new_label(), scaler)
    exchange.agree_on({"parameters": [[name, list(p.shape)] for name, p in named]})
    shard = min(dist.get_process_group_ranks(group))
    replicas = CompressedReplicas(exchange, shard, device, named)
    for name, module in sharded:
        _set_hook(replicas, name or "model", module)
    return replicas


def _check_group(named: Sequence[tuple[str, Tensor]], group: dist.ProcessGroup) -> None:
    """Raises if the group has ranks whose shards are others, or which FSDP averages itself."""
    own, ranks = dist.get_rank(), dist.get_process_group_ranks(group)
    for name, parameter in named:
        if not isinstance(parameter, DTensor):
            continue
        mesh = parameter.device_mesh
        on_mesh = mesh.mesh.flatten().tolist()
        if set(on_mesh) & set(ranks) == {own}:
            continue
        if any(placed.is_replicate() for placed in parameter.placements):
            raise ValueError(
                f"FSDP itself averages the replicas of {name}: it is on the mesh "
                f"{mesh.mesh.tolist()} {mesh.mesh_dim_names or ''}, which has the ranks {ranks} of "
                "group as well, so nothing would be saved. Shard the model on the inner dimension "
                'only, fully_shard(model, mesh=mesh["shard"])'
            )
        raise ValueError(
            f"group has the ranks {ranks}, and {name} is sharded over the ranks {on_mesh} (this is "
            f"rank {own}), so different shards would be averaged. group has one rank of each "
            'replica, those that hold the same shard: mesh["replicate"].get_group()'
        )


def _set_hook(replicas: CompressedReplicas, name: str, module: Any) -> None:
    def hook(shard: Tensor) -> None:
        replicas.average(name, module, shard)

    module.set_all_reduce_hook(hook)


def _fsdp_params(module: Any) -> list[Any]:
    """FSDP's parameters whose gradients are in the shards of a module; none if it has changed."""
    try:
        state = module._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None)  # several in newer versions
        (group,) = [state._fsdp_param_group] if groups is None else groups
        return list(group.fsdp_params)
    except (AttributeError, ValueError):
        return []


def _takes_views(module: Any) -> bool:
    """Whether nothing adds to the gradients of a module, or reads them early."""
    params = [getattr(own, "sharded_param", None) for own in _fsdp_params(module)]
    return bool(params) and all(
        isinstance(p, Tensor) and p.grad is None and not getattr(p, _HOOKS, None) for p in params
    )


_HOOKS = "_post_accumulate_grad_hooks"


def _are_views(own: _Shard) -> bool:
    """Whether the gradients of a module are views of its shard."""
    params = _fsdp_params(own.module)
    place = own.shard.untyped_storage().data_ptr()
    grads = [getattr(getattr(p, "sharded_param", None), "grad", None) for p in params]
    locals_ = [grad.to_local() for grad in grads if isinstance(grad, DTensor)]
    return bool(locals_) and all(x.untyped_storage().data_ptr() == place for x in locals_)


def _layout(name: str, module: Any, shard: Tensor, names: Mapping[int, str]) -> Layout:
    """The tensors in a shard, as far as FSDP tells; else one vector.

    `names`: those in the model, by parameter. FSDP's own begin at the outermost module that it
    shards, of which a model may have several.
    """
    whole: Layout = ((name, 0, shard.numel(), (shard.numel(),)),)
    try:
        found = [
            (
                names.get(id(getattr(p, "sharded_param", None)), f"{name} {p._param_fqn}"),
                p.sharded_size,
                p.padded_sharded_param_size,
            )
            for p in _fsdp_params(module)
        ]
    except AttributeError:
        return whole
    placed: list[Placed] = []
    start = 0
    for own, size, padded in found:
        stop = start + padded.numel()
        shape = tuple(size) if size.numel() == padded.numel() else (padded.numel(),)
        placed.append((own, start, stop, shape))
        start = stop
    return tuple(placed) if start == shard.numel() else whole
