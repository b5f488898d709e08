import torch

from kernels.triton_cases import Case, vector

_SHAPES = ((1, 1), (3, 2), (5, 4), (3, 8), (200, 8), (3, 64), (2, 1024), (2, 4096), (2, 8192))
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


def _in_place():
    x = _moderate(2, 1024, torch.float32)
    return x, None, _bits(2048, 1), x
