from itertools import product

import torch

from kernels.triton_cases import NUMELS, Case, spoiled, vector

BUCKETS = (8, 64, 256, 264, 512, 1000, 4096, 2**40)


def _encode(numel, bucket, fed, rows=0):
    shape = (rows, numel) if rows else (numel,)
    size = max(1, rows) * numel
    x, out = vector(size).reshape(shape), torch.full(shape, torch.nan)
    residual, bucket = vector(size, 1).reshape(shape) if fed else None, min(bucket, max(1, numel))
    return x, residual, bucket, out if fed else None


def cases():
    yield Case("signs", "encode_signs", "16384", lambda: _encode(16384, 16384, True), True)
    for numel, bucket, fed in product((*NUMELS, 20_011), BUCKETS, (False, True)):
        if fed or bucket == 2**40:
            compiled = numel in (1000, 20_011) and bucket in (64, 512, 2**40)
            yield Case(
                "signs",
                "encode_signs",
                f"{numel} by {bucket}, fed: {fed}",
                lambda a=(numel, bucket, fed): _encode(*a),
                compiled,
            )
    yield Case("signs", "encode_signs", "of 4200", lambda: _encode(9000, 4200, True), True)
    for numel in (525_313,):  # more sums than one program adds
        yield Case("signs", "encode_signs", str(numel), lambda n=numel: _encode(n, n, False), True)
    for numel, bucket in product((0, 1, 257, 5000), (64, 512, 5000)):
        yield Case(
            "signs",
            "encode_signs_rows",
            f"3 x {numel} by {bucket}",
            lambda a=(numel, bucket, True, 3): _encode(*a),
        )
    for numel, bucket in product(NUMELS, (5, 64, 256, 300, 5000)):
        for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            yield Case(
                "signs",
                "mean_magnitudes",
                f"{numel} x {dtype} by {bucket}",
                lambda numel=numel, dtype=dtype, bucket=bucket: (
                    vector(numel, 0, dtype).clamp(-6e4, 6e4),
                    bucket,
                ),
                numel == 1000 and bucket == 5000,
            )
    for bad in (float("nan"), float("inf"), -float("inf")):
        for numel in (9, 1000, 5000):
            yield Case(
                "signs",
                "encode_signs",
                f"{numel} with {bad}",
                lambda n=numel, bad=bad: (spoiled(n, bad), None, n, None),
            )
    for numel, number, bucket in product((*NUMELS, 5000), (1, 3, 4, 9), (8, 264, 2**40)):
        yield Case(
            "signs",
            "mean_signs",
            f"{number} of {numel} by {bucket}",
            lambda a=(numel, number, bucket): _mean(*a),
            numel == 1000 and bucket > 8,
        )

    for numel, bucket, fed in product(
        (1, 257, 5000, 9001), (8, 264, 512, 4200, 2**40), (False, True)
    ):
        yield Case(
            "signs",
            "encode_signs_in",
            f"{numel} by {bucket}, fed: {fed}",
            lambda a=(numel, bucket, fed): _encode_in(*a),
            fed and (numel, bucket) in ((257, 8), (9001, 512), (9001, 4200), (9001, 2**40)),
        )
    for numel, number, bucket in product((1, 257, 5000), (1, 3, 4, 9), (8, 264, 2**40)):
        yield Case(
            "signs",
            "mean_signs_in",
            f"{number} of {numel} by {bucket}",
            lambda a=(numel, number, bucket): _mean_in(*a),
            numel == 5000 and bucket > 8,
        )


def _places(numel, bucket):
    """Of scales and signs, which are not aligned to words where there are few; all bytes."""
    scale_at = 12
    packed_at = scale_at + 4 * -(-numel // bucket) + numel % 2
    return scale_at, packed_at, packed_at - (-numel // 8) + 3


def _encode_in(numel, bucket, fed):
    x, residual, bucket, out = _encode(numel, bucket, fed)
    scale_at, packed_at, nbytes = _places(numel, bucket)
    buffer = torch.full((nbytes,), 0xA5, dtype=torch.uint8)
    return x, residual, bucket, out, buffer, scale_at, packed_at


def _mean_in(numel, number, bucket):
    packed, scale, _, bucket, out = _mean(numel, number, bucket)
    scale_at, packed_at, nbytes = _places(numel, bucket)
    buffers = []
    for bits, each in zip(packed, scale):
        buffer = torch.zeros(nbytes, dtype=torch.uint8)
        buffer[scale_at : scale_at + 4 * len(each)] = each.view(torch.uint8)
        buffer[packed_at : packed_at + len(bits)] = bits
        buffers.append(buffer)
    return buffers, scale_at, packed_at, numel, bucket, out


def _mean(numel, number, bucket):
    generator = torch.Generator().manual_seed(7)
    packed = [
        torch.randint(256, (-(-numel // 8),), dtype=torch.uint8, generator=generator)
        for _ in range(number)
    ]
    bucket = min(bucket, max(8, numel))
    num_buckets = -(-numel // bucket)
    scale = [vector(num_buckets, rank).abs() for rank in range(number)]
    return packed, scale, numel, bucket, torch.full((numel,), torch.nan)
