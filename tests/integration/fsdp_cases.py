"""What the ranks of test_fsdp.py run: two nodes of two ranks, compressed between nodes."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

import gradwire
from gradwire.integration.described import from_tensors
from gradwire.integration.fsdp import _set_hook as set_hook
from integration.loops import batch, make_model

SIZE = 4
LOOPS = ("added up", "cast", "hooked")
SAVED = ("ef(topk(0.2))", "powersgd(1)", "ef(qsgd(bits=4))", "identity")


def run(rank: int, folder: Path) -> Any:
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    found: dict[str, Any] = {"rank": rank}
    native = sharded(mesh)
    _train(native, range(4), rank)
    for name in ("identity", "ef(topk(0.2))", "powersgd(1)", "ef(sign)"):
        model = sharded(mesh["shard"])
        replicas = gradwire.compress_replicas(
            model, mesh["replicate"].get_group(), name, timeout_s=60
        )
        _train(model, range(4), rank)
        difference = float((_local(model) - _local(native)).abs().max())
        stats = replicas.stats()
        found[name] = [difference, _is_same_on_replicas(model, mesh), stats.steps, stats.bytes_sent]
    found["overlaps"] = _overlaps(mesh, rank)
    found["alike"] = {name: _against_native(mesh, rank, name) for name in LOOPS}
    found["interrupted"] = _interrupted(mesh, rank)
    found["refused"] = _refused(mesh)
    found["groups"] = _wrong_groups(mesh)
    found["names"] = _names(mesh, rank)
    found["continued"] = _continued(mesh, rank, folder)
    found["checkpoint"] = {m: _checkpoint(mesh, rank, folder / m, m) for m in SAVED}
    found["fewer"] = _fewer(mesh, rank, folder / SAVED[0])
    dist.barrier()  # the process ends at once: the others may still wait for what it sent
    return found


def sharded(mesh: Any, **options: Any) -> nn.Module:
    model = make_model()
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def _train(model: nn.Module, steps: range, rank: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in steps:
        optimizer.zero_grad()
        inputs, targets = batch(rank, step)
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()


def _local(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().to_local().reshape(-1) for p in model.parameters()])


def _is_same_on_replicas(model: nn.Module, mesh: Any) -> bool:
    own, group = _local(model), mesh["replicate"].get_group()
    others = [torch.empty_like(own) for _ in range(2)]
    dist.all_gather(others, own, group=group)
    return all(torch.equal(other, own) for other in others)


def _overlaps(mesh: Any, rank: int) -> bool:
    """One replica goes on with its backward pass before the other begins: without overlap the first
    would wait for the other, and the other for the first."""
    group = mesh["replicate"].get_group()
    model = sharded(mesh["shard"])
    gradwire.compress_replicas(model, group, "ef(topk(0.2))", timeout_s=60)
    _train(model, range(2), rank)
    layer = model[1] if rank < 2 else model[3]  # after, or before, the backward pass of model[2]
    waits = layer.register_forward_hook(
        lambda module, inputs, output: (
            output.register_hook(lambda grad: dist.barrier(group)) and None
        )
    )
    _train(model, range(2, 4), rank)
    waits.remove()
    return _is_same_on_replicas(model, mesh)


def _interrupted(mesh: Any, rank: int) -> list[Any]:
    """A backward pass that the user's code ends on all ranks, after a shard has left."""

    def fail(grad: Tensor) -> None:
        raise KeyError("the user's own")

    model = sharded(mesh["shard"])
    group = mesh["replicate"].get_group()
    replicas = gradwire.compress_replicas(model, group, "ef(topk(0.2))", timeout_s=60)
    _train(model, range(2), rank)
    hook = model[1].register_forward_hook(
        lambda module, inputs, output: output.register_hook(fail) and None
    )
    model.zero_grad()
    inputs, targets = batch(rank, 2)
    was_raised = False
    try:
        nn.functional.cross_entropy(model(inputs), targets).backward()
    except KeyError:
        was_raised = bool(replicas._pending)
    hook.remove()
    # FSDP itself does not continue with that model.
    again = sharded(mesh["shard"])
    for name, module in again.named_modules():
        if isinstance(module, FSDPModule):
            set_hook(replicas, name or "model", module)
    refused = ""
    try:
        _train(again, range(2, 3), rank)
    except RuntimeError as error:
        refused = str(error)
    again = sharded(mesh["shard"])
    replicas = gradwire.compress_replicas(again, group, "ef(topk(0.2))", timeout_s=60)
    _train(again, range(2, 5), rank)
    return [was_raised, refused, _is_same_on_replicas(again, mesh), replicas.stats().steps]


def _against_native(mesh: Any, rank: int, loop: str) -> list[Any]:
    """Where the hook must wait: the difference to FSDP's own hybrid sharding."""
    policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
    options = {"mp_policy": policy} if loop == "cast" else {}
    models, seen = [], []
    for own in (mesh, mesh["shard"]):
        model = sharded(own, **options)
        if own is not mesh:
            group = mesh["replicate"].get_group()
            gradwire.compress_replicas(model, group, "identity", timeout_s=60)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        norms: list[Tensor] = []
        for step in range(6):
            if loop == "hooked" and step == 3:
                model[0].weight.register_post_accumulate_grad_hook(
                    lambda p, norms=norms: norms.append(p.grad.to_local().norm())
                )
            if loop != "added up" or step % 2 == 0:
                optimizer.zero_grad()
            inputs, targets = batch(rank, step)
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
        models.append(_local(model))
        seen.append(torch.stack(norms) if norms else torch.zeros(1))
    difference = float((models[0] - models[1]).abs().max())
    return [difference, float((seen[0] - seen[1]).abs().max()), float(seen[0].max())]


def _refused(mesh: Any) -> str:
    try:
        gradwire.compress_replicas(make_model(), mesh["replicate"].get_group(), "ef(sign)")
    except ValueError as error:
        return str(error)
    return ""


def _wrong_groups(mesh: Any) -> dict[str, str]:
    """What is refused: groups by name, each with the mesh that FSDP got."""
    given = {
        "shard": (mesh["shard"], mesh["shard"].get_group()),
        "hybrid": (mesh, mesh["replicate"].get_group()),
        "world": (mesh["shard"], dist.group.WORLD),
    }
    found = {}
    for name, (own, group) in given.items():
        try:
            gradwire.compress_replicas(sharded(own), group, "ef(sign)")
        except ValueError as error:
            found[name] = str(error)
    return found


def _names(mesh: Any, rank: int) -> list[list[str]]:
    """By rules for names: the tensors that each module has sent."""
    model = sharded(mesh["shard"])
    rules = 'partition({"0.*": ef(sign), "*": ef(topk(0.2))})'
    replicas = gradwire.compress_replicas(model, mesh["replicate"].get_group(), rules)
    _train(model, range(2), rank)
    assert _is_same_on_replicas(model, mesh)
    (saved,) = (
        from_tensors(row, torch.device("cpu"), "") for row in replicas.state_dict().values()
    )
    return sorted([name for name, *_ in row["tensors"]] for row in saved["buckets"])


def _continued(mesh: Any, rank: int, folder: Path) -> float:
    group = mesh["replicate"].get_group()
    whole, parts = sharded(mesh["shard"]), sharded(mesh["shard"])
    gradwire.compress_replicas(whole, group, "ef(topk(0.2))")
    _train(whole, range(6), rank)
    replicas = gradwire.compress_replicas(parts, group, "ef(topk(0.2))")
    _train(parts, range(3), rank)
    path = folder / f"fsdp{rank}.pt"
    torch.save(replicas.state_dict(), path)
    replicas = gradwire.compress_replicas(parts, group, "ef(topk(0.2))")
    replicas.load_state_dict(torch.load(path, weights_only=True))
    _train(parts, range(3, 6), rank)
    return float((_local(whole) - _local(parts)).abs().max())


def _checkpoint(mesh: Any, rank: int, folder: Path, method: str) -> list[Any]:
    """A run that is saved and loaded by torch.distributed.checkpoint, and one that is not."""
    group = mesh["replicate"].get_group()
    whole, parts, again = (sharded(mesh["shard"]) for _ in range(3))
    gradwire.compress_replicas(whole, group, method, timeout_s=60)
    _train(whole, range(6), rank)
    replicas = gradwire.compress_replicas(parts, group, method, timeout_s=60)
    _train(parts, range(3), rank)
    dcp.save({"model": parts.state_dict(), "replicas": replicas}, checkpoint_id=folder)
    with torch.no_grad():
        for parameter in again.parameters():
            parameter.zero_()
    replicas = gradwire.compress_replicas(again, group, method, timeout_s=60)
    dcp.load({"model": again.state_dict(), "replicas": replicas}, checkpoint_id=folder)
    _train(again, range(3, 6), rank)
    is_same = _is_same_on_replicas(again, mesh)
    return [
        torch.equal(_local(whole), _local(again)),
        torch.equal(_local(whole), _local(parts)),
        is_same,
    ]


def _fewer(mesh: Any, rank: int, folder: Path) -> list[Any]:
    """Two replicas have saved, one loads: what each shard had still to send is all there."""
    alone = [dist.new_group([other]) for other in range(SIZE)]
    if rank >= 2:
        return []
    model = sharded(mesh["shard"])
    replicas = gradwire.compress_replicas(model, alone[rank], SAVED[0], timeout_s=60)
    found: list[Any] = []
    for given in (replicas, replicas.saved_by(2)):
        try:
            dcp.load({"replicas": given}, checkpoint_id=folder, no_dist=True)
            found.append("")
        except Exception as error:
            found.append(f"{error} {error.__cause__}")
    saved: dict[str, Any] = {"replicas": replicas.saved_by(2).state_dict()}
    dcp.load(saved, checkpoint_id=folder, no_dist=True)
    before = sum(_residuals(row) for row in saved["replicas"].values())
    after = _residuals(*replicas.state_dict().values())
    return [*found, float((before - after).abs().max()), float(after.abs().max()) > 0]


def _residuals(row: Any) -> Tensor:
    saved = from_tensors(row, torch.device("cpu"), "a state")
    return torch.cat([bucket["state"]["residual"] for bucket in saved["buckets"]])
