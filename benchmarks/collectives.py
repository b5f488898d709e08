"""How much slower are collectives through the engine for real processes than bare ones?

Ranks are processes of one thread on one machine; gloo on the loopback. What is compared, in turns,
in one run: the best of the slowest rank's times, and the ratio of their medians besides, which
other work on the machine disturbs:

- mean: `await group.mean(x)` of `allreduce`, with and without native collectives, against
  `dist.all_reduce` and the division;
- gather: `await group.all_gather(payload)` of packed payloads whose lengths differ between ranks,
  against `dist.all_gather` of as many bytes as the longest has, which knows the lengths beforehand;
- all_to_all: `await group.all_to_all(messages)`, against `dist.all_to_all_single`.

Answer, on 16 cores at rest (Intel Xeon, torch 2.11, 2 and 4 ranks), ratios of medians. Mean,
native: 0.85 to 1.11 from 400 KB on, 1.12 to 1.26 at 40 KB. Mean by messages, which has the
simulator's bits: 1.04 to 1.95 from 4 MB on, up to 2.2 below. Gather: 0.3 to 0.75 from 4 MB on, 1.08
to 1.36 at 400 KB, 1.38 to 1.59 at 40 KB: a receiving thread has to wake up, and the lengths are not
known beforehand. All_to_all: 0.97 to 1.52 from 4 MB on, 1.8 to 3.3 below. On 2 cores beside other
work (load 8 to 10) best times were 0.79 to 1.20 for native means and 0.54 to 0.70 for gathers from
4 MB on, and medians of small ones up to 4.6.
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
