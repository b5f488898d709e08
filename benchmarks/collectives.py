"""How much slower are collectives through the engine for real processes than bare ones?

Ranks are processes of one thread on one machine; gloo on the loopback. What is compared, in turns,
in one run: the best of the slowest rank's times, and the ratio of their medians besides, which
other work on the machine disturbs:

- mean: `await group.mean(x)` of `allreduce`, with and without native collectives, against
  `dist.all_reduce` and the division;
- gather: `await group.all_gather(payload)` of packed payloads whose lengths differ between ranks,
  against `dist.all_gather` of as many bytes as the longest has, which knows the lengths beforehand;
- all_to_all: `await group.all_to_all(messages)`, against `dist.all_to_all_single`.

`--shaped 100`: direct exchange or ring, where every rank is on a host of its own whose link carries
100 Mbit/s each way (shaped.py; needs to be root)? All ways of a question in turns. `ratio` is that
of the medians to the first way; `of line` what the bytes that a rank sends would take at the link's
rate, as a share of the median.

- gather: of payloads of equal length, bare, by `allreduce` (direct) and around the `ring`;
- sign: the mean of 4.2 million elements in one bit each, coding included, by gathering and by
  scattering (core/lifted.py) directly, and by gathering around the ring;
- mean: of float32, bare, by messages of `allreduce`, around the `ring`, and native.

Answer, on 16 cores at rest (Intel Xeon, torch 2.11, 2 and 4 ranks), ratios of medians. Mean,
native: 0.85 to 1.11 from 400 KB on, 1.12 to 1.26 at 40 KB. Mean by messages, which has the
simulator's bits: 1.04 to 1.95 from 4 MB on, up to 2.2 below. Gather: 0.3 to 0.75 from 4 MB on, 1.08
to 1.36 at 400 KB, 1.38 to 1.59 at 40 KB: a receiving thread has to wake up, and the lengths are not
known beforehand. All_to_all: 0.97 to 1.52 from 4 MB on, 1.8 to 3.3 below. On 2 cores beside other
work (load 8 to 10) best times were 0.79 to 1.20 for native means and 0.54 to 0.70 for gathers from
4 MB on, and medians of small ones up to 4.6.

Answer on links of 100 Mbit/s (2 cores, AMD EPYC, torch 2.13, TCP with bbr, beside other work):
shares of the line, medians of two runs, one of them with 3 ranks, too:

    ranks       way     gather 500 KB  gather 526 KB  gather 4 MB  mean 4 MB
      2         bare      .70 - .72         .69           .63       .94 - .95
                direct       .95            .95        .85 - .95    .90 - .91
                ring         .95            .95        .94 - .95    .91 - .92
      3         bare         .89            .94           .94          .94
                direct       .84            .89           .76          .75
                ring         .94            .95           .93          .94
      4         bare      .88 - .92      .93 - .95     .92 - .93       .94
                direct    .80 - .82      .81 - .82     .72 - .77    .66 - .70
                ring      .93 - .95      .95 - .97        .87       .86 - .87

and the native mean .94 to .95. So between two ranks direct exchange is as fast as a ring, and
faster than a bare gather; among three and four the ring is 1.1 to 1.3 times as fast, since there
all send to all at once, and what each link carries at a time is left to TCP. Before receives were
posted ahead (runtime/process/expected.py) messages above 512 KiB got half of the line, .48 to .59,
by direct exchange.

The mean of signs: 52 to 60 ms gathered, 64 to 127 scattered, 52 to 68 gathered around the ring (2
ranks); 103, 88 and 95 (3); 167 to 171, 114 to 158, and 167 to 204 (4).
"""

import argparse
import time
from collections.abc import Awaitable, Callable
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from gradwire.architecture.allreduce.allreduce import AllReduce
from gradwire.architecture.allreduce.ring import Ring
from gradwire.compression.quantization.sign import Sign
from gradwire.core.group import Group
from gradwire.core.key import Key
from gradwire.core.lifted import lift
from gradwire.core.node import Node
from gradwire.core.spec import Spec
from gradwire.runtime.ledger import Ledger
from gradwire.runtime.process.engine import ProcessEngine
from gradwire.runtime.process.gloo import GlooTransport
from ranks import on_ranks
from shaped import shaped

SIZES_NBYTES = (40_000, 400_000, 4_000_000, 40_000_000)
WAYS = ("mean", "mean, native", "gather", "all_to_all")

# On a shaped link: what the transport sends in one piece (up to 512 KiB, see gloo.py), the payload
# of 4.2 million signs, which it does not, and something longer.
GATHERED_NBYTES, MEAN_NBYTES, NUM_SIGNS = (500_000, 526_000, 4_000_000), 4_000_000, 4_200_000

NUM_WARM_UP = 3
Ways = dict[str, Callable[[], Awaitable[object]]]


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

    async def bare() -> None:
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

    ms = await in_turns({"bare": bare, "ours": ours}, seconds)
    ratio = median(ms["ours"]) / median(ms["bare"])
    return [min(ms["bare"]), min(ms["ours"]), ratio]


async def in_turns(ways: Ways, seconds: float) -> dict[str, list[float]]:
    """By way: the milliseconds of the slowest rank, each time. It takes about so many seconds."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    num_done, repeats = 0, NUM_WARM_UP
    while num_done < repeats:
        for name, way in ways.items():
            dist.barrier()
            began = time.perf_counter()
            await way()
            times[name].append(time.perf_counter() - began)
        num_done += 1
        if num_done == NUM_WARM_UP:  # and to know for how many there is time
            one = torch.tensor([sum(taken[-1] for taken in times.values())])
            dist.all_reduce(one, dist.ReduceOp.MAX)
            repeats += min(200, max(5, int(seconds / float(one))))
    slowest = torch.tensor(list(times.values()))[:, NUM_WARM_UP:]
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return dict(zip(ways, (1e3 * slowest).tolist()))


# On a shaped link.


def gathers(node: Node, nbytes: int) -> Ways:
    payload = torch.ones(nbytes, dtype=torch.uint8)
    heard = [torch.empty_like(payload) for _ in range(node.size)]

    async def bare() -> None:
        dist.all_gather(heard, payload)

    direct, ring = AllReduce().group(node, "allreduce"), Ring().group(node, "ring")
    return {
        "bare": bare,
        "allreduce": lambda: direct.all_gather(payload),
        "ring": lambda: ring.all_gather(payload),
    }


def means(node: Node, nbytes: int) -> Ways:
    x = torch.ones(nbytes // 4)

    async def bare() -> None:
        total = x.clone()
        dist.all_reduce(total)
        total.div_(node.size)

    groups = {
        "allreduce": AllReduce().group(Node(node.rank, node.size), "allreduce"),
        "ring": Ring().group(node, "ring"),
        "native": AllReduce().group(node, "native"),
    }
    return {"bare": bare, **{name: partial(group.mean, x) for name, group in groups.items()}}


def sign_means(node: Node, numel: int) -> Ways:
    """Encoding and decoding are part of it."""
    x = torch.randn(numel, generator=torch.Generator().manual_seed(node.rank))
    reducer, key = lift(Sign()), Key(0).private(node.rank)

    def averaging(group: Group) -> Callable[[], Awaitable[object]]:
        state = reducer.init(Spec.of(x), node.size)

        async def average() -> None:
            nonlocal state
            state = (await reducer.mean(x, state, key, group)).state

        return average

    groups = {
        "gather": AllReduce("gather").group(node, "gather"),
        "scatter": AllReduce("scatter").group(node, "scatter"),
        "ring": Ring().group(node, "ring"),
    }
    return {name: averaging(group) for name, group in groups.items()}


SHAPED: dict[str, Callable[[Node], Ways]] = {
    **{f"gather {nbytes:,} B": partial(gathers, nbytes=nbytes) for nbytes in GATHERED_NBYTES},
    f"sign {NUM_SIGNS:,}": partial(sign_means, numel=NUM_SIGNS),
    f"mean {MEAN_NBYTES:,} B": partial(means, nbytes=MEAN_NBYTES),
}


async def compare_shaped(
    node: Node, ways: Callable[[Node], Ways], seconds: float
) -> dict[str, list[float]]:
    return await in_turns(ways(node), seconds)


def measure_shaped(rank: int, seconds: float) -> dict[str, list[list[Any]]]:
    """By question, for each way: its name, the bytes that a rank sends, the milliseconds."""
    transport = GlooTransport()
    engine = ProcessEngine(transport, native=True)
    figures: dict[str, list[list[Any]]] = {}
    for question, ways in SHAPED.items():
        engine.ledger = Ledger(engine.size)
        ms = engine.run(partial(compare_shaped, ways=ways, seconds=seconds))
        assert ms is not None
        sent = engine.ledger.tensor_bytes  # groups are named as the ways
        num_times = NUM_WARM_UP + len(next(iter(ms.values())))
        nbytes = {name: sent[name] / num_times for name in ms}
        # A bare collective is not in the ledger: it must send as much as ours.
        figures[question] = [
            [name, nbytes[name] or nbytes["allreduce"], taken] for name, taken in ms.items()
        ]
    transport.close()
    return figures


def print_shaped(sizes: list[int], mbit: float, seconds: float) -> None:
    heads = ("bytes sent", "best ms", "median", "ratio", "of line")
    print(f"{'ranks':>5} {'':18} {'way':10}", *(f"{head:>10}" for head in heads))
    for size in sizes:
        with shaped(mbit, size) as (_, hosts):
            figures = on_ranks(size, measure_shaped, seconds, hosts=hosts)[0]
        for question, rows in figures.items():
            first = median(rows[0][2])
            for name, nbytes, ms in rows:
                line_ms = 8e-3 * nbytes / mbit
                columns = (f"{min(ms):10.1f}", f"{median(ms):10.1f}", f"{median(ms) / first:10.2f}")
                share = f"{line_ms / median(ms):10.2f}"
                print(
                    f"{size:5} {question:18} {name:10} {nbytes:10,.0f}", *columns, share, flush=True
                )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--nbytes", type=int, nargs="*", default=list(SIZES_NBYTES))
    parser.add_argument("--seconds", type=float, default=1.0, help="per figure")
    parser.add_argument("--shaped", type=float, metavar="MBIT", help="each rank's own link")
    args = parser.parse_args()
    if args.shaped is not None:
        print_shaped(args.ranks, args.shaped, args.seconds)
        return
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
