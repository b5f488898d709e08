import torch

from kernels.triton_cases import SEED, STREAM, Case, vector

_SHAPES = ((1, 1), (3, 2), (5, 4), (3, 8), (200, 8), (3, 64), (2, 1024), (2, 4096), (2, 8192))
_ENCODED = ((8, 8), (9, 8), (1000, 8), (1500, 64), (2048, 1024), (3000, 1024), (9000, 4096))
_FACTORS = (1.0, 0.0, 2.0**-70, 2.0**-100, 2.0**-140, 2.0**100, 2.0**117)
_DTYPES = (torch.float32, torch.float64)


def cases():
    for dtype in _DTYPES:
        for rows, n in _SHAPES:
            name, compiled = f"[{rows}, {n}] of {dtype}", n in (64, 4096, 8192)
            yield Case("hadamard", "hadamard", name, _both_flips(rows, n, dtype), compiled)
            yield Case("hadamard", "rotated_signs", name, _before(rows, n, dtype), compiled)
            if rows * n % 8 == 0:
                yield Case("hadamard", "unrotated_signs", name, _signs(rows, n, dtype), compiled)
        for n in (1, 3, 100, 4096, 4097, 30000):
            yield Case(
                "hadamard",
                "row_norms",
                f"[2, {n}] of {dtype}",
                lambda n=n, dtype=dtype: (_moderate(2, n, dtype),),
                compiled=n == 30000,
            )
    for numel, n in _ENCODED:
        for unbiased in (True, False):
            for factor in _FACTORS if numel in (9, 1500) else (1.0,):
                yield Case(
                    "hadamard",
                    "encode_rotated_signs",
                    f"{numel} in rows of {n}, unbiased {unbiased}, times {factor}",
                    _encoded(numel, n, unbiased, factor),
                    compiled=(numel, factor) == (9000, 1.0),
                )
    for bad in (float("nan"), float("inf")):
        for where in (0, 2999):
            yield Case("hadamard", "encode_rotated_signs", f"{bad} at {where}", _bad(bad, where))
    yield Case("hadamard", "hadamard", "no row", lambda: (torch.empty(0, 8), None, None))
    yield Case("hadamard", "hadamard", "in place", _in_place)


def _moderate(rows, n, dtype):
    """Without the magnitudes whose sums and squares leave float32: callers scale those."""
    return vector(rows * n, n).clamp(-1e3, 1e3).to(dtype).reshape(rows, n)


def _bits(count, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (-(-count // 8),), dtype=torch.uint8, generator=generator)


def _both_flips(rows, n, dtype):
    return lambda: (_moderate(rows, n, dtype), _bits(rows * n, 1), _bits(rows * n, 2))


def _before(rows, n, dtype):
    return lambda: (_moderate(rows, n, dtype), _bits(rows * n, 1))


def _signs(rows, n, dtype):
    scale = vector(rows, 3).abs().clamp(max=1e3).to(dtype)
    return lambda: (_bits(rows * n, 1), scale, n, _bits(rows * n, 2))


def _encoded(numel, n, unbiased, factor):
    def arguments():
        x = vector(numel, n).clamp(-1e3, 1e3) * factor
        into = torch.empty(-(-numel // n)), torch.empty(-(-numel // 8), dtype=torch.uint8)
        return x, n, SEED, (STREAM, (3, 5, 4)), unbiased, (-80, 88), into

    return arguments


def _bad(value, where):
    def arguments():
        x, *rest = _encoded(3000, 1024, True, 1.0)()
        x[where] = value
        into = torch.empty(3), torch.empty(375, dtype=torch.uint8)
        return x, *rest[:-1], into

    return arguments


def _in_place():
    x = _moderate(2, 1024, torch.float32)
    return x, None, _bits(2048, 1), x
