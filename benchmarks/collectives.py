"""How much slower are collectives through the engine for real processes than bare ones?

Ranks are processes of one thread on one machine; gloo on the loopback. What is compared, in turns,
in one run: the best of the slowest rank's times, and the ratio of their medians besides, which
other work on the machine disturbs:

- mean: `await group.mean(x)` of `allreduce`, with and without native collectives, against
  `dist.all_reduce` and the division;
- gather: `await group.all_gather(payload)` of packed payloads whose lengths differ between ranks,
  against `dist.all_gather` of as many bytes as the longest has, which knows the lengths beforehand;
- all_to_all: `await group.all_to_all(messages)`, against `dist.all_to_all_single`.

Answer: not settled, since the machine was never at rest (load 8 to 10 on 2 cores; the benchmark ran
with nice -18). One whole run, best times, medians in brackets. Mean, native: 0.79 to 1.20 (0.97 to
1.37). Mean by messages: 0.66 to 2.18 (1.24 to 4.28). Gather: 0.54 to 0.70 (0.55 to 1.02) from 4 MB
on, 0.54 to 1.36 (1.11 to 4.60) below. All_to_all: 0.40 to 1.49 from 4 MB on, 2.2 to 2.8 below.
Shorter runs before and after it had up to 3.8 for native means of 40 KB and less, 1.3 at 4 MB, and
up to 1.7 for gathers of 40 and 400 KB. What was packed has been used again for the next peer only
since that run. To be repeated at rest.
2-core AMD EPYC virtual machine, torch 2.13.
"""

import argparse
import time
from statistics import median

import torch
import torch.distributed as dist

from gradwire.architecture.allreduce.allreduce import AllReduce
from gradwire.core.node import Node
from gradwire.runtime.process.engine import ProcessEngine
from gradwire.runtime.process.gloo import GlooTransport
from ranks import on_ranks

SIZES_NBYTES = (40_000, 400_000, 4_000_000, 40_000_000)
WAYS = ("mean", "mean, native", "gather", "all_to_all")


def measure(rank: int, sizes: list[int], seconds: float) -> dict[str, list[list[float]]]:
    """By way and size: milliseconds of the bare collective and of ours, and a ratio."""
    transport = GlooTransport()
    figures: dict[str, list[list[float]]] = {way: [] for way in WAYS}
    for job, way in enumerate(WAYS):
        engine = ProcessEngine(transport, job=job, native=way.endswith("native"))
        for nbytes in sizes:
            found = engine.run(lambda node, w=way, n=nbytes: compare(node, w, n, seconds))
            assert found is not None
            figures[way].append(found)
    transport.close()
    return figures


async def compare(node: Node, way: str, nbytes: int, seconds: float) -> list[float]:
    group = AllReduce().group(node, "x")
    x = torch.ones(nbytes // 4)
    # Payloads get shorter by a percent from rank to rank.
    payload = torch.ones(nbytes - nbytes // 100 * node.rank, dtype=torch.uint8)
    longest = torch.ones(nbytes, dtype=torch.uint8)
    heard = [torch.empty_like(longest) for _ in range(node.size)]
    whole = torch.ones(nbytes // node.size * node.size, dtype=torch.uint8)
    other = torch.empty_like(whole)

    def bare() -> None:
        if way.startswith("mean"):
            total = x.clone()
            dist.all_reduce(total)
            total.div_(node.size)
        elif way == "gather":
            dist.all_gather(heard, longest)
        else:
            dist.all_to_all_single(other, whole)

    async def ours() -> None:
        if way.startswith("mean"):
            await group.mean(x)
        elif way == "gather":
            await group.all_gather(payload)
        else:
            await group.all_to_all(whole.tensor_split(node.size))

    times: tuple[list[float], list[float]] = ([], [])
    repeats = 3
    while len(times[0]) < repeats:
        dist.barrier()
        began = time.perf_counter()
        bare()
        times[0].append(time.perf_counter() - began)
        dist.barrier()
        began = time.perf_counter()
        await ours()
        times[1].append(time.perf_counter() - began)
        if len(times[0]) == 3:  # to warm up, and to know for how many there is time
            one = torch.tensor([times[0][-1] + times[1][-1]])
            dist.all_reduce(one, dist.ReduceOp.MAX)
            repeats = 3 + min(200, max(5, int(seconds / float(one))))
    slowest = torch.tensor(times)[:, 3:]
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    ms = (1e3 * slowest).tolist()
    return [min(ms[0]), min(ms[1]), median(ms[1]) / median(ms[0])]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--nbytes", type=int, nargs="*", default=list(SIZES_NBYTES))
    parser.add_argument("--seconds", type=float, default=1.0, help="per figure")
    args = parser.parse_args()
    heads = ("bare ms", "ours ms", "ratio", "median")
    print(f"{'ranks':>5} {'collective':14} {'bytes':>12}", *(f"{head:>9}" for head in heads))
    for size in args.ranks:
        figures = on_ranks(size, measure, args.nbytes, args.seconds)[0]
        for way, rows in figures.items():
            for nbytes, (bare, ours, ratio) in zip(args.nbytes, rows):
                columns = (f"{bare:9.3f}", f"{ours:9.3f}", f"{ours / bare:9.2f}", f"{ratio:9.2f}")
                print(f"{size:5} {way:14} {nbytes:12,}", *columns, flush=True)


if __name__ == "__main__":
    main()
