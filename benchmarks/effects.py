"""How many effects per second does the simulator interpret?

An effect is a send, a receive, a pause: what a program awaits. The messages are one byte long and
nothing is computed, so this is the simulator's own cost. Two patterns:

- ring: every rank sends to its right neighbour and waits for its left one, over and over;
- all-to-all: every rank sends to all others, then receives from all others, over and over.

Answer: 580,000 to 630,000 on one core, hardly fewer with 32 nodes than with 4 (ring 604,000 and
627,000, all-to-all 635,000 and 579,000).
2-core AMD EPYC virtual machine, Python 3.11; commit 837ec9f.
"""

import gc
import time

import torch

from gradwire.core.node import Node
from gradwire.runtime.network.network import Network
from gradwire.runtime.virtual.engine import VirtualEngine

NUM_EFFECTS = 200_000
NUM_TRIALS = 5
MESSAGE = torch.zeros(1, dtype=torch.uint8)


async def ring(node: Node) -> None:
    right, left = (node.rank + 1) % node.size, (node.rank - 1) % node.size
    for _ in range(NUM_EFFECTS // (2 * node.size)):
        await node.send(right, "x", MESSAGE)
        await node.recv(left, "x")


async def all_to_all(node: Node) -> None:
    others = [(node.rank + shift) % node.size for shift in range(1, node.size)]
    for _ in range(NUM_EFFECTS // (2 * node.size * len(others))):
        for peer in others:
            await node.send(peer, "x", MESSAGE)
        for peer in reversed(others):
            await node.recv(peer, "x")


def effects_per_second(program, size: int) -> float:
    """The best of some trials: the others were disturbed."""
    best = 0.0
    for _ in range(NUM_TRIALS):
        engine = VirtualEngine(Network.uniform(size))
        gc.collect()
        start = time.perf_counter()
        engine.run([program] * size)
        best = max(best, engine.num_effects / (time.perf_counter() - start))
    return best


def main() -> None:
    print(f"{'pattern':12} {'nodes':>5} {'effects/s':>12}")
    for program in (ring, all_to_all):
        for size in (4, 32):
            rate = effects_per_second(program, size)
            print(f"{program.__name__:12} {size:5} {rate:12,.0f}")


if __name__ == "__main__":
    main()
