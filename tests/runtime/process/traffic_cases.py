"""What the ranks of the test of traffic run: a few means of a long vector."""

from pathlib import Path

import torch.distributed as dist

from gradwire.architecture import ARCHITECTURE
from gradwire.compression import COMPRESSION
from gradwire.core.key import Key
from gradwire.core.lifted import lift
from gradwire.core.node import Node
from gradwire.core.spec import Spec
from gradwire.runtime.process.engine import ProcessEngine
from gradwire.runtime.process.gloo import GlooTransport
from runtime.process.parity_cases import connect

CASES = (
    ("ring", "identity", 1 << 21),
    ("allreduce", "topk(0.1)", 1 << 22),
    ("ring", "sign", 1 << 24),
)
SERVED_NUMEL = 1 << 22
_COUNTER = Path("/sys/class/net/lo/statistics/tx_bytes")


def run(rank: int, folder: Path) -> list[dict[str, int]]:
    transport = GlooTransport()
    seen = [_traffic(transport, job, *case) for job, case in enumerate(CASES)]
    transport.close()
    return seen


def run_served(rank: int, folder: Path) -> list[dict[str, int]]:
    """Two workers, a server and the scheduler over ZeroMQ."""
    transport = connect(rank, 2, 1, folder)
    architecture = ARCHITECTURE.parse("parameter_server")
    x = Key(0).private(rank).normal(1 << 20).repeat(SERVED_NUMEL >> 20)

    async def program(node: Node) -> None:
        if node.rank >= node.size:
            await architecture.daemon(node, {})
        else:
            await architecture.group(node, "x").mean(x)

    dist.barrier()
    before = int(_COUNTER.read_text()), transport.num_bytes_sent
    dist.barrier()
    engine = ProcessEngine(transport, 2, timeout_s=20)
    engine.run(program)
    dist.barrier()
    interface = int(_COUNTER.read_text()) - before[0]
    sent = transport.num_bytes_sent - before[1]
    dist.barrier()
    transport.close()
    return [{"ledger": engine.ledger.total_bytes, "transport": sent, "interface": interface}]


def _traffic(
    transport: GlooTransport, job: int, architecture: str, compression: str, numel: int
) -> dict[str, int]:
    """Bytes by the ledger, by the transport and (of all ranks together) on the interface."""
    chosen, reducer = ARCHITECTURE.parse(architecture), lift(COMPRESSION.parse(compression))
    x = Key(0).private(transport.rank).normal(1 << 20).repeat(numel >> 20)
    state = reducer.init(Spec.of(x), transport.size)

    async def program(node: Node) -> None:
        await reducer.mean(x, state, Key(1).private(node.rank), chosen.group(node, "x"))

    dist.barrier()
    before = int(_COUNTER.read_text()), transport.num_bytes_sent
    dist.barrier()
    engine = ProcessEngine(transport, timeout_s=20, job=job)
    engine.run(program)
    dist.barrier()
    interface = int(_COUNTER.read_text()) - before[0]
    dist.barrier()
    return {
        "ledger": engine.ledger.total_bytes,
        "transport": transport.num_bytes_sent - before[1],
        "interface": interface,
    }
