"""Which inputs of the common polar codes are free? Writes src/gradwire/coding/polar/free_sets.npz.

    python experiments/make_free_sets.py

For each length and rate R of the grid (gradwire.coding.polar.free_sets): Monte-Carlo constructions
for BSC(D) with 1 - h2(D) = R, and for rates a little lower and higher, because a decision may be
wrong for what it does to later ones, which the construction does not see; the set that turns the
fewest of 2^25 random bits is kept. All is integers drawn from fixed keys, so the file comes
out the same on every machine. It prints the hash that belongs into free_sets.py.

Answer: the neighbours of R lower D by up to 0.0003 at N <= 1024 and hardly beyond, and drawing four
times as often changes nothing in the fourth digit.
"""

import numpy as np
import torch

from gradwire import kernels
from gradwire.coding.polar import free_sets, monte_carlo
from gradwire.coding.polar.channel import bsc_ratio, distortion_bound
from gradwire.coding.polar.construction import lowest
from gradwire.core.key import Key

OFFSETS = (0.0, -0.02, 0.02, -0.04, 0.04)  # of equals the first
NUM_BITS = 1 << 25
POSITIONS = 1 << 26  # drawn for a construction, 512 blocks or more
MOST_GROUPS = 1 << 12


def free_set(n: int, k: int) -> torch.Tensor:
    """bool [n]."""
    best, fewest = torch.zeros(n, dtype=torch.bool), NUM_BITS
    for offset in OFFSETS:
        distortion = distortion_bound(min(max(k / n + offset, 0.02), 0.98))
        groups = max(8, min(MOST_GROUPS, POSITIONS // (64 * n)))
        free = lowest(monte_carlo.scores(n, distortion, groups), k)
        wrong = count_wrong(free)
        if wrong < fewest:
            best, fewest = free, wrong
    return best


def count_wrong(free: torch.Tensor) -> int:
    """How many of NUM_BITS random bits successive cancellation turns."""
    n = free.numel()
    magnitude = bsc_ratio(distortion_bound(int(free.sum()) / n))
    kinds = kernels.polar_kinds(free)
    total, groups = 0, NUM_BITS // (64 * n)
    at_once = min(groups, max(1, 2**22 // (64 * n)))
    for start in range(0, groups, at_once):
        words = Key(0).child("polar sets").child(start).words(at_once * n * 2)
        bits = words.view(torch.uint8).view(at_once, n, 8)
        turned = kernels.polar_quantise_bits(bits, magnitude, kinds) ^ bits
        total += len(kernels.ones_positions(turned.reshape(-1), turned.numel() * 8))
    return total


def main() -> None:
    parts = []
    for n, k in free_sets.grid():
        free = free_set(n, k)
        parts.append(kernels.pack_uints(free, 1).numpy())
        print(f"N {n:6d}  K {k:6d}  D {count_wrong(free) / NUM_BITS:.5f}", flush=True)
    whole = np.concatenate(parts)
    np.savez_compressed(free_sets.FILE, version=np.array(free_sets.VERSION), free=whole)
    size = free_sets.FILE.stat().st_size
    print(f"version {free_sets.VERSION}, sha256 {free_sets.digest(whole)}, {size} B")


if __name__ == "__main__":
    main()
