from itertools import product

import torch

from kernels.triton_cases import NUMELS, SEED, STREAM, Case, vector

WIDTHS = ((1, 2), (3, 3), (7, 4), (20, 6), (127, 8))


def _encode(numel, bucket, how, fed, rows=0):
    shape = (rows, numel) if rows else (numel,)
    size = max(1, rows) * numel
    x, out = vector(size).reshape(shape), torch.full(shape, torch.nan)
    residual = vector(size, 1).reshape(shape) if fed else None
    return x, residual, how[0], bucket, how[1], SEED, STREAM, out if fed else None


def _tiny(bucket):
    # Maxima from below the smallest normal number to well above 2^-100, and buckets of zeros.
    exponents = torch.linspace(-145, -60, 500).repeat_interleave(8)
    x = vector(4000) * torch.exp2(exponents.double()).float()
    x[:1024] = 0
    return x, x.flip(0) / 4, 7, bucket, 4, SEED, STREAM, torch.empty(4000)


def _decode(numel, bucket, how):
    generator = torch.Generator().manual_seed(7)
    packed = torch.randint(256, (-(-numel * how[1] // 8),), dtype=torch.uint8, generator=generator)
    scale = vector(-(-numel // bucket), 3).abs()
    return packed, scale, how[0], bucket, how[1], numel, torch.full((numel,), torch.nan)


def cases():
    yield Case("levels", "encode_levels", "8192", lambda: _encode(8192, 512, (7, 4), True), True)
    for numel, how, bucket in product((*NUMELS, 5000), WIDTHS, (8, 512, 1000, 2**14)):
        if (numel in (9, 5000) and bucket in (8, 1000)) or how[1] == 4:
            compiled = numel == 1000 and bucket in (512, 1000)
            for fed in (False, True) if how[1] == 4 else (True,):
                yield Case(
                    "levels",
                    "encode_levels",
                    f"{numel} by {bucket}, {how}, fed: {fed}",
                    lambda a=(numel, bucket, how, fed): _encode(*a),
                    compiled,
                )
            yield Case(
                "levels",
                "decode_levels",
                f"{numel} by {bucket}, {how}",
                lambda a=(numel, bucket, how): _decode(*a),
                compiled,
            )
    for bucket in (512, 1000):  # arguments that are one are constants for the compiler
        given = _encode(1000, bucket, (1, 2), True)
        ones = (*given[:5], 1 + (1 << 32), (1, 1, 1), given[7])
        yield Case("levels", "encode_levels", f"ones by {bucket}", lambda ones=ones: ones, True)
    for how in WIDTHS[1:4:2]:
        yield Case(
            "levels",
            "encode_levels",
            f"of {how}",
            lambda how=how: _encode(1000, 64, how, True),
            True,
        )
    for bucket in (8, 512, 2**14):
        yield Case("levels", "encode_levels", f"tiny {bucket}", lambda b=bucket: _tiny(b))
    for numel, bucket in product((0, 1, 257, 3000), (64, 1000)):
        yield Case(
            "levels",
            "encode_levels_rows",
            f"3 x {numel} by {bucket}",
            lambda a=(numel, bucket, (7, 4), True, 3): _encode(*a),
        )
