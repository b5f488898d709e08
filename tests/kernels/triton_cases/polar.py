import torch

from gradwire.kernels import polar_kinds
from kernels.triton_cases import NUMELS, Case, vector

_FREE, _NONE, _RANDOM, _BY_WEIGHT = range(4)


def cases():
    for groups, n, lanes, free in (
        (1, 1, 8, _FREE),
        (2, 64, 16, _FREE),
        (1, 64, 8, _NONE),
        (1, 32, 8, _RANDOM),
        (1, 128, 8, _RANDOM),
        (2, 64, 8, _BY_WEIGHT),
        (1, 256, 8, _BY_WEIGHT),
    ):
        for corrected in (True, False):
            yield Case(
                "polar",
                "polar_quantise",
                f"[{groups}, {n}, {lanes}], free {free}, corrected {corrected}",
                lambda size=(groups, n, lanes), free=free, corrected=corrected: (
                    (_noise(*size) * 20).round().clamp(-127, 127).to(torch.int8),
                    _kinds(size[1], free),
                    corrected,
                ),
                compiled=n == 256 and corrected,
            )
    yield Case("polar", "polar_quantise", "large parity check", _large_parity_check)
    yield Case("polar", "polar_quantise", "large repetition", _large_repetition)
    yield Case("polar", "polar_quantise_bits", "[2, 32, 2]", _bits, compiled=True)
    for numel, blocks, lanes in ((63, 1, 8), (640, 10, 16), (637, 10, 16), (2300, 37, 16)):
        for operation in ("polar_signs", "polar_encode_signs"):
            yield Case(
                "polar",
                operation,
                f"{numel} in {blocks} blocks",
                _signs(operation, numel, blocks, lanes),
                compiled=numel == 637,
            )

    for groups, n, width in (
        (1, 1, 1),
        (3, 2, 2),
        (2, 64, 4),
        (2, 64, 8),
        (1, 8192, 8),
        (1, 16384, 2),
    ):
        yield Case(
            "polar",
            "polar_transform",
            f"[{groups}, {n}, {width}]",
            lambda size=(groups, n, width): (_bytes(*size),),
            compiled=width == 8,
        )
    for numel in NUMELS:
        yield Case(
            "polar", "polar_ratios", str(numel), lambda n=numel: (vector(n), -13.7), numel == 1000
        )
        yield Case("polar", "polar_lookup", str(numel), _lookup(numel), numel == 1000)
        yield Case("polar", "polar_label", str(numel), _label(numel), numel == 1000)
        yield Case("polar", "polar_points", str(numel), _points(numel), numel == 1000)


def _signs(operation, numel, blocks, lanes):
    def arguments():
        x, kinds = vector(numel).clamp(-1e3, 1e3), _kinds(64, _BY_WEIGHT)
        if operation == "polar_signs":
            return x, -13.7, 0.8, blocks, 64, lanes, kinds
        rows = torch.arange(3, 64, 2)
        out = torch.zeros(-(-len(rows) * blocks // 8), dtype=torch.uint8)
        return x, -13.7, 0.8, blocks, 64, lanes, kinds, rows, out

    return arguments


def _bytes(*size):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 256, size, dtype=torch.uint8, generator=generator)


def _lookup(numel):
    return lambda: (vector(numel), 113.5, _bytes(4, 101).view(torch.int8), _bytes(numel) % 4)


def _label(numel):
    return lambda: (_bytes(numel) & 3, _bytes(-(-numel // 8)), 2)


def _points(numel):
    return lambda: (_bytes(numel) & 15, vector(16))


def _noise(*size):
    return torch.randn(size, generator=torch.Generator().manual_seed(size[1]))


def _kinds(n, free):
    if free == _BY_WEIGHT:
        weight = torch.tensor([i.bit_count() + i / n for i in range(n)])
        return polar_kinds(weight >= weight.median())
    if free == _RANDOM:
        return polar_kinds(_noise(1, n, 1).reshape(-1) > 0)
    return polar_kinds(torch.full((n,), free == _FREE))


def _large_parity_check():
    free = torch.ones(256, dtype=torch.bool)
    free[0] = False
    llr = (_noise(1, 256, 8) * 4).round().to(torch.int8)  # many are equally unreliable
    return llr, polar_kinds(free), True


def _large_repetition():
    free = torch.zeros(256, dtype=torch.bool)
    free[-1] = True
    return (_noise(1, 256, 8) * 40).clamp(-127, 127).to(torch.int8), polar_kinds(free), True


def _bits():
    return _bytes(2, 32, 2), 7, _kinds(32, _BY_WEIGHT), True
