"""What does compression do for DDP on slow links, and how far is a step from its ideal time?

Four ranks train an mlp of 4,208,650 parameters, each on a host of its own (a network namespace)
whose link to the switch carries so many Mbit/s each way (shaped.py; needs to be root). All share
the cores of this machine, one thread each, so processor time counts twice on two cores. In one run
for each rate, every method takes its steps one after the other: nothing but the gradient ("compute
only", before and after), DDP as it is, DDP with torch's own hooks, operations of torch with an
all-gather as in older frameworks, and gradwire through DDP's hook and through DistributedOptimizer.

A row has the median time of a step of the slowest rank; the bytes that left the busiest host in a
step, with all headers, as `tc -s` counts them; the ideal time, which is compute only and these
bytes at 0.956 of the rate; the step's ratio to it, and to DDP's step. Then one rank without peers
takes steps of DDP with and without gradwire's hook in turns: what the hook itself costs.

    python benchmarks/shaped_training.py --json benchmarks/shaped_training.json

takes about ten minutes. docs/training_loops.md shows the committed results, by
experiments/training_loops.py.
"""

import argparse
import copy
import json
import os
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import gradwire
from ranks import on_ranks
from shaped import enter, missing, num_bytes_sent, shaped

BATCH, WIDTH, CLASSES = 64, 1024, 10
# Steps: buckets are rebuilt, connections made, memory allocated. As many again if they are fast.
WARM_UP = 3
LEAST, MOST = 4, 40  # steps that are measured
EFFICIENCY = 0.956  # of a link's rate that a stream of TCP over Ethernet can carry
BURST = {1000.0: "256kb"}  # with less, gloo reaches half of the rate
SMALL_BURST = "16kb"  # with more, small messages would not be limited

Step = Callable[[], Any]
Method = Callable[[nn.Module], Step]


# Methods: each makes a step from a module.


def batches() -> Callable[[], tuple[Tensor, Tensor]]:
    inputs = torch.randn(8 * BATCH, WIDTH)
    targets = torch.randint(0, CLASSES, (8 * BATCH,))
    number = 0

    def following() -> tuple[Tensor, Tensor]:
        nonlocal number
        number = (number + 1) % 8
        part = slice(number * BATCH, (number + 1) * BATCH)
        return inputs[part], targets[part]

    return following


def steps_of(module: nn.Module, optimizer: torch.optim.Optimizer, after: Any = None) -> Step:
    following, loss = batches(), nn.CrossEntropyLoss()

    def step() -> None:
        inputs, targets = following()
        optimizer.zero_grad()
        loss(module(inputs), targets).backward()
        optimizer.step()
        if after is not None:
            after()

    return step


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.01)


def compute_only(module: nn.Module) -> Step:
    return steps_of(module, sgd(module))


def ddp(hook: Any, bucket_mb: float | None, module: nn.Module) -> Step:
    """`hook` makes a state and a hook, or is None."""
    wrapped = DistributedDataParallel(module, bucket_cap_mb=bucket_mb)
    if hook is not None:
        wrapped.register_comm_hook(*hook())
    return steps_of(wrapped, sgd(wrapped))


def nothing_exchanged() -> tuple[Any, Any]:
    """What DDP itself takes to copy gradients into buckets and back."""

    def hook(_: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    return None, hook


def torch_powersgd(rank: int) -> tuple[Any, Any]:
    # float() ... rounds: it starts at once, and buckets are rebuilt before.
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=rank, start_powerSGD_iter=2, min_compression_rate=1
    )
    return state, powerSGD_hook.powerSGD_hook


def torch_post_local_sgd(module: nn.Module) -> Step:
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

    averager = PeriodicModelAverager(period=16, warmup_steps=0)
    return steps_of(module, sgd(module), lambda: averager.average_parameters(module.parameters()))


def gathered(encode: Any, decode: Any) -> tuple[Any, Any]:
    """Compression with operations of torch, gathered by all ranks, with error feedback."""
    residuals: dict[int, Tensor] = {}

    def hook(_: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        x = bucket.buffer()
        if x.numel() == getattr(residuals.get(bucket.index()), "numel", lambda: 0)():
            x = x + residuals[bucket.index()]
        parts = encode(x)
        residuals[bucket.index()] = x - decode(parts, x)
        size = dist.get_world_size()
        total = torch.zeros_like(x)
        received = []
        for part in parts:
            every = [torch.empty_like(part) for _ in range(size)]
            dist.all_gather(every, part)
            received.append(every)
        for rank in range(size):
            total += decode([every[rank] for every in received], x)
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(total.div_(size))
        return done

    return None, hook


def sign_encode(x: Tensor) -> list[Tensor]:
    bits = (x >= 0).to(torch.uint8)
    padded = torch.zeros(-(-x.numel() // 8) * 8, dtype=torch.uint8)
    padded[: x.numel()] = bits
    weights = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8)
    return [(padded.view(-1, 8) * weights).sum(1).to(torch.uint8), x.abs().mean().reshape(1)]


def sign_decode(parts: Sequence[Tensor], x: Tensor) -> Tensor:
    packed, scale = parts
    bits = (packed[:, None] >> torch.arange(8, dtype=torch.uint8)) & 1
    return (bits.reshape(-1)[: x.numel()].to(x.dtype) * 2 - 1) * scale


def topk_encode(x: Tensor) -> list[Tensor]:
    _, where = x.abs().topk(max(1, x.numel() // 100))
    return [x[where], where.to(torch.int32)]


def topk_decode(parts: Sequence[Tensor], x: Tensor) -> Tensor:
    values, where = parts
    return torch.zeros_like(x).index_copy_(0, where.long(), values)


def distributed_optimizer(compression: str, options: Any, module: nn.Module) -> Step:
    optimizer = gradwire.DistributedOptimizer(
        sgd(module), module.named_parameters(), compression, **options
    )
    return steps_of(module, optimizer)


CODECS = (
    "identity",
    "fp16",
    "ef(sign)",
    "ef(topk(0.01) >> fp16)",
    "ef(topk(0.001) >> fp16)",
    "ef(powersgd(1))",
)


# Those that are also measured with other buckets than DDP's own: for each layer, and in one.
BUCKETED = CODECS[2:]
# Those whose payloads are gathered by default: scattered they have fewer bytes and more coding.
SCATTERED = CODECS[3:4]
BUCKETS_MB = {"buckets of 4 MB": 4.0, "one bucket": 100.0}


def methods() -> dict[str, Method]:
    found: dict[str, Method] = {
        "compute only": compute_only,
        "DDP, nothing exchanged": partial(ddp, nothing_exchanged, None),
        "DDP fp32": partial(ddp, None, None),
        "DDP fp16 hook": partial(ddp, lambda: (None, default_hooks.fp16_compress_hook), None),
        "DDP PowerSGD 1": partial(ddp, partial(torch_powersgd, 1), 100),
        "DDP PowerSGD 4": partial(ddp, partial(torch_powersgd, 4), 100),
        "torch local SGD 16": torch_post_local_sgd,
        "torch ops sign": partial(ddp, partial(gathered, sign_encode, sign_decode), None),
        "torch ops top-k 1%": partial(ddp, partial(gathered, topk_encode, topk_decode), None),
    }
    for codec in CODECS:
        hook = partial(gradwire.ddp_comm_hook, codec)
        found[f"hook {codec}"] = partial(ddp, hook, None)
        for name, bucket_mb in BUCKETS_MB.items() if codec in BUCKETED else ():
            found[f"hook {codec}, {name}"] = partial(ddp, hook, bucket_mb)
        if codec in SCATTERED:
            scattering = partial(hook, architecture='allreduce(route="scatter")')
            found[f"hook {codec}, one bucket, scattered"] = partial(ddp, scattering, 100.0)
    for codec in CODECS:
        found[f"optimizer {codec}"] = partial(distributed_optimizer, codec, {})
    found["compute only, after"] = compute_only
    return found


# Measuring, on every rank.


def measure(rank: int, chosen: Sequence[str], budget_s: float) -> dict[str, Any]:
    """Seconds of each step, and bytes sent in a step, by method."""
    torch.manual_seed(rank)
    module = mlp()
    for parameter in module.parameters():
        dist.broadcast(parameter.data, 0)
    every = methods()
    found = {}
    for name in chosen:
        step = every[name](copy.deepcopy(module))
        took_s = [timed(step) for _ in range(WARM_UP)]
        count = torch.tensor(budget_s / min(took_s)).clamp(LEAST, MOST).long()
        dist.broadcast(count, 0)
        for _ in range(WARM_UP if int(count) > LEAST else 0):
            step()
        before = num_bytes_sent()
        dist.barrier()
        took_s = [timed(step) for _ in range(int(count))]
        dist.barrier()
        sent = num_bytes_sent() - before
        found[name] = {"step_s": took_s, "bytes": sent / int(count)}
        del step
    return found


def overhead(rank: int, num_steps: int) -> list[list[float]]:
    """Seconds of steps on one rank: DDP, and DDP with the hook, in turns."""
    module = mlp()
    steps = [
        ddp(None, None, copy.deepcopy(module)),
        ddp(partial(gradwire.ddp_comm_hook, "identity"), None, copy.deepcopy(module)),
    ]
    took_s = [[timed(step) for step in steps] for _ in range(WARM_UP + num_steps)]
    return took_s[WARM_UP:]


def mlp() -> nn.Module:
    layers = [part for _ in range(4) for part in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES))


def timed(step: Step) -> float:
    began = time.perf_counter()
    step()
    return time.perf_counter() - began


def tcp_rate(hosts: Sequence[Any], mbit: float) -> float:
    """Bits per second that one stream of TCP carries from the first host to the second."""
    nbytes = int(mbit * 1e6 / 8)  # a second's worth
    listener_r, listener_w = os.pipe()
    child = os.fork()
    if child == 0:
        enter(hosts[1])
        server = socket.create_server((hosts[1].address, 0))
        os.write(listener_w, str(server.getsockname()[1]).encode())
        stream, _ = server.accept()
        left = nbytes
        while left:
            left -= len(stream.recv(1 << 20))
        stream.sendall(b".")
        os._exit(0)
    port = int(os.read(listener_r, 16))
    sender_r, sender_w = os.pipe()
    other = os.fork()
    if other == 0:
        enter(hosts[0])
        stream = socket.create_connection((hosts[1].address, port))
        began = time.perf_counter()
        stream.sendall(bytes(nbytes))
        stream.recv(1)
        os.write(sender_w, json.dumps(8 * nbytes / (time.perf_counter() - began)).encode())
        os._exit(0)
    os.waitpid(other, 0)
    os.waitpid(child, 0)
    rate = json.loads(os.read(sender_r, 64))
    for end in (listener_r, listener_w, sender_r, sender_w):
        os.close(end)
    return float(rate)


# Tables.


def row_of(results: Sequence[dict[str, Any]], name: str) -> tuple[float, float]:
    """The median step of the slowest rank, and the bytes of the busiest."""
    slowest = [max(steps) for steps in zip(*(result[name]["step_s"] for result in results))]
    return median(slowest), max(result[name]["bytes"] for result in results)


def table(mbit: float | None, results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    names = list(results[0])
    compute = [row_of(results, name)[0] for name in names if name.startswith("compute only")]
    compute_s = sum(compute) / len(compute) if compute else float("nan")
    base_s = row_of(results, "DDP fp32")[0] if "DDP fp32" in names else float("nan")
    rows = []
    for name in names:
        step_s, nbytes = row_of(results, name)
        wire_s = 0.0 if mbit is None else 8 * nbytes / (EFFICIENCY * mbit * 1e6)
        rows.append(
            {
                "mbit": mbit,
                "method": name,
                "step_ms": 1e3 * step_s,
                "bytes": nbytes,
                "ideal_ms": 1e3 * (compute_s + wire_s),
                "of_ideal": step_s / (compute_s + wire_s),
                "of_ddp": step_s / base_s,
                "steps": len(results[0][name]["step_s"]),
            }
        )
    return rows


def show(rows: Sequence[dict[str, Any]]) -> None:
    head = f"{'':46} {'step ms':>8} {'MB sent':>8} {'ideal':>7} {'ratio':>6} {'of DDP':>7} steps"
    print(head)
    for row in rows:
        print(
            f"{row['method']:46} {row['step_ms']:8.1f} {row['bytes'] / 1e6:8.3f} "
            f"{row['ideal_ms']:7.1f} {row['of_ideal']:6.2f} {row['of_ddp']:7.3f} {row['steps']:5}"
        )
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rates", nargs="+", default=["50", "100", "1000", "none"])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--budget", type=float, default=4.0, help="seconds for each method")
    parser.add_argument("--only", nargs="+", help="methods whose names contain one of these")
    parser.add_argument("--overhead-steps", type=int, default=200, help="of one rank")
    parser.add_argument("--processor", default=platform.machine(), help="named in the results")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    problem = missing()
    if problem is not None:
        print(f"skipped: {problem}")
        return
    chosen = [
        name for name in methods() if not args.only or any(part in name for part in args.only)
    ]
    every = []
    for text in args.rates:
        mbit = None if text == "none" else float(text)
        burst = SMALL_BURST if mbit is None else BURST.get(mbit, SMALL_BURST)
        with shaped(mbit, args.ranks, burst, card="limit 64mb") as (_, hosts):
            carried = "no limit"
            if mbit is not None:
                rate = tcp_rate(hosts, mbit)
                share = rate / mbit / 1e6
                carried = f"{text} Mbit/s, of which one stream of TCP carries {share:.3f}"
            print(f"\n{args.ranks} ranks, {carried}")
            results = on_ranks(args.ranks, measure, chosen, args.budget, hosts=hosts)
        rows = table(mbit, results)
        show(rows)
        every += rows
    (took_s,) = on_ranks(1, overhead, args.overhead_steps)
    plain_s, hooked_s = (median(times) for times in zip(*took_s))
    print(
        f"\n1 rank: DDP {1e3 * plain_s:.2f} ms, with the hook {1e3 * hooked_s:.2f} ms: "
        f"{hooked_s / plain_s - 1:+.1%}"
    )
    if args.json is not None:
        about = {
            "hardware": f"{args.processor}, {os.cpu_count()} cores",
            "torch": torch.__version__,
            "commit": subprocess.getoutput("git rev-parse --short HEAD"),
            "ranks": args.ranks,
            "hook_on_one_rank": hooked_s / plain_s,
        }
        args.json.write_text(json.dumps({**about, "rows": every}, indent=1) + "\n")


if __name__ == "__main__":
    main()
