from itertools import product

import torch

from kernels.triton_cases import SEED, STREAM, Case, vector

DRAW = (SEED, STREAM)
BUCKETS = (1, 5, 64, 600, 2**40)
FLOATS = (torch.float32, torch.float64)


def _x(numel, dtype):
    return vector(numel).clamp(-1e30, 1e30).to(dtype)


def _scale(numel, bucket, dtype, seed=3):
    scale = vector(-(-numel // bucket), seed).abs().to(dtype)
    scale[::7] = 0
    return scale


def _bytes(count, packing):
    alphabet, width, digits = packing
    generator = torch.Generator().manual_seed(5)
    if digits:
        most, size = alphabet**digits, -(-count // digits)
        return torch.randint(most, (size,), generator=generator, dtype=torch.uint8)
    assert alphabet == 1 << width
    return torch.randint(256, (-(-count * width // 8),), generator=generator, dtype=torch.uint8)


def cases():
    shapes = [(numel, bucket, torch.float32) for numel in (0, 1, 9, 257) for bucket in BUCKETS]
    shapes += product((1000,), (5, 64, 600, 2**40), FLOATS)
    shapes += [(5000, 600, torch.float32), (5000, 2**40, torch.float32)]
    for numel, bucket, dtype in shapes:
        bucket = min(bucket, max(1, numel))
        name = f"{numel} x {dtype} by {bucket}"
        for operation in ("bucket_maxima", "bucket_extremes", "bucket_squares", "bucket_sides"):
            yield Case(
                "tables",
                operation,
                name,
                lambda n=numel, d=dtype, b=bucket: (_x(n, d), b),
                numel == 1000 and bucket == 1000,
            )
        yield from _rounding(numel, bucket, dtype, name)
        yield from _decoding(numel, bucket, dtype, name)
    for numel in (70_000, 300_000):  # more blocks than one program reduces
        for operation in ("bucket_maxima", "bucket_extremes", "bucket_squares", "bucket_sides"):
            make = lambda n=numel: (_x(n, torch.float32), n)  # noqa: E731
            yield Case("tables", operation, str(numel), make)


def _rounding(numel, bucket, dtype, name):
    compiled = numel == 1000 and bucket in (64, 600)
    levels = torch.tensor([0.0, *(2.0**e for e in range(-6, 1))], dtype=dtype)
    natural = torch.tensor([0.0, *(2.0**e for e in range(-126, 128))], dtype=dtype)
    trits = torch.tensor([0.0, 1.0], dtype=dtype)
    for table, packing, scaled in (
        (levels, (15, 4, 0), True),
        (natural, (511, 9, 0), False),
        (trits, (3, 2, 5), True),
    ):
        yield Case(
            "tables",
            "to_levels",
            f"{name} to {len(table)}",
            lambda table=table, packing=packing, scaled=scaled: (
                _x(numel, dtype),
                _scale(numel, bucket, dtype) if scaled else None,
                bucket,
                table,
                DRAW,
                packing,
            ),
            compiled,
        )
    for draw, most, packing in product(
        (DRAW, None), (3, 127, 1000), ((7, 3, 0), (255, 8, 0), (2001, 11, 0))
    ):
        if packing[0] == 2 * most + 1:
            yield Case(
                "tables",
                "to_whole",
                f"{name} to {most}, {draw}",
                lambda draw=draw, most=most, packing=packing: (
                    _x(numel, dtype),
                    _scale(numel, bucket, dtype),
                    _scale(numel, bucket, dtype, 4) if most > 3 else None,
                    bucket,
                    -most,
                    most,
                    draw,
                    packing,
                ),
                compiled,
            )
    edges = torch.tensor([-1.5, -0.5, 0.0, 0.0, 0.5, 2.0, 9.0], dtype=dtype)
    yield Case(
        "tables",
        "to_cells",
        name,
        lambda: (_x(numel, dtype), _scale(numel, bucket, dtype), bucket, edges, (8, 3, 0)),
        compiled,
    )
    for target in (torch.float8_e4m3fn, torch.float8_e5m2):
        yield Case(
            "tables",
            "to_fp8",
            f"{name} to {target}",
            lambda target=target: (
                _x(numel, dtype),
                _scale(numel, bucket, dtype),
                bucket,
                target,
            ),
            compiled,
        )


def _decoding(numel, bucket, dtype, name):
    compiled = numel == 1000 and bucket in (64, 600)
    for packing in ((8, 3, 0), (16, 4, 0), (512, 9, 0), (2048, 11, 0), (3, 2, 5), (5, 3, 3)):
        table = vector(packing[0], 9).to(dtype)
        scale, start = _scale(numel, bucket, dtype), _scale(numel, bucket, dtype, 4)
        for given in ((scale, start), (None, None)):
            yield Case(
                "tables",
                "from_table",
                f"{name}, {packing}",
                lambda packing=packing, table=table, given=given: (
                    _bytes(numel, packing),
                    packing,
                    table,
                    *given,
                    bucket,
                    numel,
                ),
                compiled and given[0] is not None,
            )
        if packing[0] < 600:
            yield Case(
                "tables",
                "cell_products",
                f"{name}, {packing}",
                lambda packing=packing, table=table: (
                    _x(numel, dtype),
                    _bytes(numel, packing),
                    bucket,
                    table.clamp(-1e6, 1e6),
                    packing,
                ),
                compiled and packing[0] == 8,
            )
    yield Case(
        "tables",
        "from_pairs",
        name,
        lambda: (
            _bytes(numel, (2, 1, 0)),
            vector(2 * -(-numel // bucket), 2).to(dtype).reshape(-1, 2),
            bucket,
            numel,
        ),
        compiled,
    )
