"""What ranks with an accelerator run. Nothing here may touch it before the ranks are forked."""

from collections.abc import Coroutine
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.core.node import Framed, Membership, Node
from gradwire.core.protocols import Replica
from gradwire.runtime.process.accelerator import device_of_rank, nccl_groups
from gradwire.runtime.process.engine import ProcessEngine
from gradwire.runtime.process.frames import Headers
from gradwire.runtime.process.gloo import GlooTransport
from gradwire.runtime.process.transport import FINISHED
from gradwire.testing import quadratics
from gradwire.training import program
from gradwire.training.gradient import GradientRequest, GradientResult
from gradwire.training.plan import Plan

STEPS = 5
LAYERS = (300_000, 999)  # in parts that have room in a block, and that have not
COMPRESSIONS = ("identity", "fp16", "ef(topk(0.01))", "sign", "ef(sign)", "ef(qsgd(4))")


class OnDevice(quadratics.Quadratics):
    """In float32, on the current accelerator."""

    def initial_params(self) -> Tensor:
        return self.start.to("cuda", torch.float32)

    def initial_buffers(self) -> dict[str, Tensor]:
        return {"running": torch.zeros((), device="cuda")}

    def _gradient(self, request: GradientRequest) -> GradientResult:
        x = request.params
        a, b = request.inputs.to(x), request.targets.to(x)
        gradient = a * (x - b)
        return GradientResult((gradient * gradient).sum(), gradient, dict(request.buffers))


def on_gloo(rank: int, folder: Path) -> dict[str, Any]:
    """Ranks that share accelerators; messages go through page-locked memory."""
    device = device_of_rank("cuda")
    transport = GlooTransport(headers=Headers(Membership), device=device)
    seen = {**_trained(transport), "messages": _messages(transport)}
    transport.close()
    return seen


def on_nccl(rank: int, folder: Path) -> dict[str, Any]:
    """A rank for each accelerator."""
    size = dist.get_world_size()
    dist.destroy_process_group()
    device = device_of_rank("cuda")
    dist.init_process_group(
        "cpu:gloo,cuda:nccl",
        init_method=f"file://{folder}/another_store",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=60),
    )
    groups = nccl_groups(device)
    assert groups is not None
    transport = GlooTransport(headers=Headers(Membership), device=device, payloads=groups)
    seen = {**_trained(transport), "messages": _messages(transport)}
    number = transport.native_mean(torch.full((1000,), 3.0, device=device))
    finished = transport.next(30.0)
    while finished is not None and finished.kind != FINISHED:  # what the last job left
        finished = transport.next(30.0)
    seen["native"] = (
        finished is not None and finished.tag == number and bool((finished.message == 3).all())
    )
    transport.close()
    return seen


def _trained(transport: GlooTransport) -> dict[str, Any]:
    """By compression, the largest difference to the simulator."""
    found = {}
    for number, case in enumerate(COMPRESSIONS):
        with patch.object(quadratics, "Quadratics", OnDevice):
            expected = quadratics.train(
                "bsp", "allreduce", case, workers=transport.size, steps=STEPS, layers=LAYERS
            )
        for job, native in enumerate((False, True), 2 * number):
            plan, there = expected.plan, expected.replicas[transport.rank].params
            engine = ProcessEngine(
                transport, evaluate=plan.task.gradients, timeout_s=60, job=job, native=native
            )
            replica = plan.initial_replicas()[transport.rank]
            result = engine.run(partial(_training, plan, replica))
            assert result is not None
            assert result.params.is_cuda
            assert there.is_cuda
            assert not torch.equal(result.params, replica.params)
            difference = float((result.params - there).abs().max())
            found[f"{case}{', native' if native else ''}"] = difference
            ledger = expected.engine.ledger
            assert engine.ledger.link_bytes[transport.rank] == ledger.link_bytes[transport.rank]
    return found


def _training(plan: Plan, replica: Replica, node: Node) -> Coroutine[Any, Any, Replica]:
    return program.train(plan, node, replica, 0, STEPS)


def _messages(transport: GlooTransport) -> bool:
    """On both devices, in turns, of all lengths; each made on the accelerator just before."""

    async def exchange(node: Node) -> bool:
        lengths = (0, 1, 1_000, 300_000, 3_000_000)
        for i, length in enumerate(lengths * 3):
            x = torch.ones(length, device="cuda").cumsum(0) + node.rank
            for peer in range(node.size):
                await node.send(peer, ("cuda", i), x)
                await node.send(peer, ("cpu", i), torch.ones(length))
        framed = Framed(Membership(node.rank, True), torch.ones(7, device="cuda", dtype=torch.bool))
        for peer in range(node.size):
            await node.send_framed(peer, "framed", framed, 4)
        good = True
        for i, length in reversed(list(enumerate(lengths * 3))):
            for peer in range(node.size):
                got = await node.recv(peer, ("cuda", i))
                good &= got.is_cuda
                good &= torch.equal(got, torch.ones(length, device="cuda").cumsum(0) + peer)
                got = await node.recv(peer, ("cpu", i))
                good &= not got.is_cuda and torch.equal(got, torch.ones(length))
        for _ in range(node.size):
            _, message = await node.recv_each("framed")
            good &= message.data.is_cuda and bool(message.data.all())
        return good

    return bool(ProcessEngine(transport, timeout_s=60, job=100).run(exchange))
