"""How far from memcpy are the kernels?

Each row is the time of one operation on 2^22 elements over the time of copying the 16 MiB
that its unpacked side (float32 or int32) occupies, on one thread, best of several in one run.
Outputs are allocated per call, as callers see it; the copy goes to a buffer that exists.

Answer: packing and unpacking cost 0.5 to 0.9 copies in C, 11 to 21 in the torch reference; a
Philox word costs 2.7 copies in C (half that where 16 bits suffice), 160 to 200 in torch. From
32 MiB on, malloc maps fresh pages for every output: at 64 MiB packing stays at 0.4, but
unpacking takes 9 copies where it takes 0.5 into a buffer that is kept (16385 page faults
against none), so large outputs want kept buffers or pieces. AMD EPYC with AVX-512, 2 cores
shared with other work, gcc 12, torch 2.13, memcpy at 25 GB/s; commit 141ad87.
"""

import os
from collections.abc import Callable

import torch

from gradwire import kernels
from timing import best_s

COUNT = 2**22
CPU = torch.device("cpu")


def main() -> None:
    torch.set_num_threads(1)
    words = kernels.philox_words(1, (0, 0, 0), COUNT, CPU)
    x, levels = words.to(torch.float32), words & 15
    signs, packed = kernels.pack_signs(x), kernels.pack_uints(levels, 4)
    copy = torch.empty_like(x)
    operations: dict[str, Callable[[], object]] = {
        "philox_words": lambda: kernels.philox_words(1, (0, 0, 0), COUNT, CPU),
        "pack_signs": lambda: kernels.pack_signs(x),
        "unpack_signs": lambda: kernels.unpack_signs(signs, COUNT),
        "pack_uints, 4 bits": lambda: kernels.pack_uints(levels, 4),
        "unpack_uints, 4 bits": lambda: kernels.unpack_uints(packed, 4, COUNT),
    }
    memcpy_s = best_s(lambda: copy.copy_(x), repeats=20)
    print(f"memcpy of {4 * COUNT / 2**20:.0f} MiB: {memcpy_s * 1e3:.2f} ms")
    for backend in ("native", "reference"):
        os.environ["GRADWIRE_KERNELS"] = backend
        for name, operation in operations.items():
            print(f"{backend:10} {name:21} {best_s(operation, 7) / memcpy_s:7.1f} x memcpy")


if __name__ == "__main__":
    main()
