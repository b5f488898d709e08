from itertools import product

import torch

from kernels.triton_cases import NUMELS, Case, vector

DIGITS = ((3, 5), (5, 3), (6, 3), (16, 2))
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def _integers(numel, high, dtype):
    generator = torch.Generator().manual_seed(numel)
    return torch.randint(high, (numel,), generator=generator).to(dtype)


def cases():
    for numel, width in product((*NUMELS, 3000), (1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 24, 25, 31, 32)):
        if numel not in (0, 9, 257, 1000) and width not in (1, 5, 32):
            continue
        dtypes = [torch.int64]
        dtypes += [torch.int32] if width < 32 else []
        dtypes += [torch.uint8] if width <= 8 else []
        dtypes += [torch.bool] if width == 1 else []
        for dtype in dtypes if numel in (0, 1000) else dtypes[:1]:
            yield Case(
                "bits",
                "pack_uints",
                f"{numel} x {dtype} at {width}",
                lambda a=(numel, 1 << width, dtype), width=width: (_integers(*a), width),
                numel == 1000 and width in (1, 5, 32),
            )
        yield Case(
            "bits",
            "unpack_uints",
            f"{numel} at {width}",
            lambda n=numel, w=width: (_integers(-(-n * w // 8), 256, torch.uint8), w, n),
            numel == 1000 and width in (1, 5, 32),
        )
    for numel, dtype in product((*NUMELS, 3000), FLOATS):
        yield Case(
            "bits",
            "pack_signs",
            f"{numel} x {dtype}",
            lambda a=(numel, 0, dtype): (vector(*a),),
            numel == 1000,
        )
        yield Case(
            "bits",
            "unpack_signs",
            f"{numel} x {dtype}",
            lambda n=numel, d=dtype: (_integers(-(-n // 8), 256, torch.uint8), n, d),
            numel == 1000,
        )
    for numel in (*NUMELS, 3000):
        yield Case(
            "bits",
            "pack_ones",
            str(numel),
            lambda n=numel: (_integers(n // 3, max(1, n), torch.int64), n),
            numel == 1000,
        )
        yield Case(
            "bits",
            "ones_positions",
            str(numel),
            lambda n=numel: (_integers(-(-n // 8), 256, torch.uint8), n),
        )
        for base, digits in DIGITS:
            yield Case(
                "bits",
                "pack_digits",
                f"{numel} of base {base}",
                lambda n=numel, b=base, d=digits: (_integers(n, b, torch.int32), b, d),
                numel == 1000,
            )
            yield Case(
                "bits",
                "unpack_digits",
                f"{numel} of base {base}",
                lambda n=numel, b=base, d=digits: (
                    _integers(-(-n // d), b**d, torch.uint8),
                    b,
                    d,
                    n,
                ),
                numel == 1000,
            )
