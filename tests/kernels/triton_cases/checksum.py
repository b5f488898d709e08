import torch

from kernels.triton_cases import Case

LENGTHS = (0, 1, 3, 4, 5, 15, 16, 17, 63, 64, 70, 16_383, 16_384, 16_385, 40_003)
STARTS = (0, 3, 8, 21)


def _bytes(numel):
    generator = torch.Generator().manual_seed(numel)
    return torch.randint(256, (numel,), dtype=torch.uint8, generator=generator)


def cases():
    for number, numel in enumerate(LENGTHS):
        for start in STARTS if numel in (70, 16_385) else (min(numel, STARTS[number % 4]),):
            yield Case(
                "checksum",
                "crc32",
                f"{numel} bytes from {start}",
                lambda n=numel, s=start: (_bytes(n), s, 0x9E3779B9 * s % 2**32, 2 * s),
                numel == 40_003,
            )
