from itertools import product

import torch

from kernels.triton_cases import NUMELS, Case, vector


def _mean(numel, number, dtype):
    pieces = [vector(numel, i).clamp(-6e4, 6e4).to(dtype) for i in range(number)]
    return pieces, number, torch.full((numel,), torch.nan, dtype=dtype)


def cases():
    for numel, dtype in product((*NUMELS, 5000), (torch.float16, torch.bfloat16)):
        yield Case(
            "halves",
            "narrow",
            f"{numel} x {dtype}",
            lambda n=numel, d=dtype: (vector(n), torch.empty(n, dtype=d)),
            numel == 1000,
            returns=False,
        )
        yield Case(
            "halves",
            "narrow_sum",
            f"{numel} x {dtype}",
            lambda n=numel, d=dtype: (
                vector(n),
                vector(n, 1),
                torch.empty(n, dtype=d),
                torch.full((n,), torch.nan),
            ),
            numel == 1000,
            returns=False,
        )
    for numel, number, dtype in product(
        (*NUMELS, 5000), (1, 2, 3, 4, 5, 9), (torch.float16, torch.bfloat16)
    ):
        yield Case(
            "halves",
            "mean_halves",
            f"{number} x {numel} x {dtype}",
            lambda a=(numel, number, dtype): _mean(*a),
            numel == 1000,
        )
