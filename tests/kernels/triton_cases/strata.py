import torch

from kernels.triton_cases import SEED, STREAM, Case, vector

_CPU = torch.device("cpu")
SIZES = ((0, 0), (1, 1), (9, 2), (1000, 7), (1000, 1000), (5000, 1025))


def cases():
    for numel, count in (*SIZES, (2**40, 3)):
        yield Case(
            "strata",
            "strata_positions",
            f"{count} of {numel}",
            lambda numel=numel, count=count: (numel, count, SEED, STREAM, _CPU),
            compiled=count == 1025,
        )
    for numel, count in SIZES:
        for scaled in (False, True):
            yield Case(
                "strata",
                "strata_values",
                f"{count} of {numel}, {scaled=}",
                lambda numel=numel, count=count, scaled=scaled: (
                    vector(numel),
                    count,
                    SEED,
                    STREAM,
                    scaled,
                ),
                compiled=count == 1025,
            )
