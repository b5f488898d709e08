from itertools import product

import torch

from kernels.triton_cases import NUMELS, Case, vector

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def cases():
    for numel, dtype in product((*NUMELS[1:], 4097, 300_000), FLOATS):
        if numel > 5000 and dtype != torch.float32:
            continue
        make = lambda numel=numel, dtype=dtype: vector(numel).clamp(-6e4, 6e4).to(dtype)  # noqa: E731
        name, compiled = f"{numel} x {dtype}", numel == 1000
        yield Case("moments", "moments", name, lambda make=make: (make(),), compiled)
        for threshold in (1e-45, 1.0) if numel < 5000 else (1.0,):
            yield Case(
                "moments",
                "tails",
                f"{name} at {threshold}",
                lambda make=make, threshold=threshold: (make(), threshold),
                compiled and threshold == 1,
            )
