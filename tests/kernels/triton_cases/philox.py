import torch

from kernels.triton_cases import NUMELS, STREAM, Case

_CPU = torch.device("cpu")


def cases():
    for count in (*NUMELS, 4097):
        for first in (0, 2**32 - 3):
            for seed in (5, 2**64 - 1):
                yield Case(
                    "philox",
                    "philox_words",
                    f"{count}, from {first}, seed {seed}",
                    lambda count=count, first=first, seed=seed: (seed, STREAM, count, _CPU, first),
                    compiled=count == 1000 and first == 0,
                )
