import torch

from gradwire import kernels
from kernels.triton_cases import SEED, STREAM, Case, vector

# Rows, their elements, the bucket, levels and bits of a symbol.
SHAPES = [(1, 1, 8, 1, 2), (3, 257, 64, 7, 4), (2, 1000, 24, 127, 8), (3, 4100, 512, 7, 4)]


def cases():
    for rows, n, bucket, levels, width in SHAPES:
        yield Case(
            "levels_rows",
            "decode_levels_rows",
            f"{rows} x {n} in buckets of {bucket}",
            lambda rows=rows, n=n, how=(levels, bucket, width): (*_encoded(rows, n, how), *how, n),
            compiled=n >= 1000,
        )


def _encoded(rows, n, how):
    pairs = [
        kernels.encode_levels(vector(n, r), None, *how, SEED, (*STREAM[:2], r)) for r in range(rows)
    ]
    scale, packed = (torch.stack(own) for own in zip(*pairs))
    return packed, scale
