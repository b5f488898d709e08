"""How many bits and how long do positions take?

The positions of 238,000 of 23.8 million elements, chosen at random, and of a tenth as many: bits
per position off the wire against the entropy of such a set, and the best of several times on one
thread.

Answer: 8.11 bits (entropy 8.08) and under a millisecond at density 0.01; see README.md.
"""

from functools import partial

import torch

from gradwire.coding.indices import decode_indices, encode_indices, index_entropy_bits
from gradwire.core.key import Key
from timing import best_s

UNIVERSE = 23_830_600


def main() -> None:
    torch.set_num_threads(1)
    columns = ("positions", "bits", "entropy", "encode ms", "decode ms")
    print("density" + "".join(f"{name:>11}" for name in columns))
    for density in (0.01, 0.001):
        chosen = (Key(1).uniform(UNIVERSE) < density).nonzero().reshape(-1)
        packed = encode_indices(chosen, UNIVERSE)
        bits = 8 * packed.numel() / len(chosen)
        entropy = index_entropy_bits(UNIVERSE, len(chosen)) / len(chosen)
        encode_s = best_s(partial(encode_indices, chosen, UNIVERSE), 20)
        decode_s = best_s(partial(decode_indices, packed, UNIVERSE, len(chosen)), 20)
        print(
            f"{density:7}{len(chosen):11}{bits:11.2f}{entropy:11.2f}"
            f"{1e3 * encode_s:11.2f}{1e3 * decode_s:11.2f}"
        )


if __name__ == "__main__":
    main()
