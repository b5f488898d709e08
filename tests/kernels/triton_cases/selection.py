import torch

from kernels.triton_cases import NUMELS, SEED, STREAM, Case, spoiled, vector

# Of the last two the candidates are few and many.
LARGEST = [*((n, k) for n in NUMELS for k in {0, n // 9, n // 2, n}), (17_000, 170), (70_000, 9000)]
ABOVE = [(0, 1.0), (1, 0.0), (257, 0.5), (257, torch.inf), (1000, 0.0), (17_000, 2.5)]
# Numbers of elements, of the sample, of those of it above the threshold, and of those kept at most.
SAMPLED = [
    (1, 1, 1, 1),
    (257, 257, 30, 20),
    (1000, 100, 3, 1000),
    (17_000, 16_500, 90, 80),
    # Samples and candidates that are too many for one program, some or all of which are kept.
    (40_000, 33_000, 90, 80),
    (40_000, 33_000, 33_000, 80),
    (40_000, 33_000, 33_000, 40_000),
]


def cases():
    for n, k in LARGEST:
        for feedback in (True, False):
            name = f"{k} of {n}, {feedback=}"
            yield Case(
                "selection",
                "select_largest",
                name,
                lambda n=n, k=k, feedback=feedback: (*_inputs(n, feedback), k, _left(n, feedback)),
                compiled=feedback and n >= 1000 and k > 0,
            )
    for bad in (torch.nan, torch.inf):
        yield Case(
            "selection",
            "select_largest",
            f"{bad} is the largest",
            lambda bad=bad: (spoiled(9, bad), None, 1, torch.zeros(9)),
        )
    for n, threshold in ABOVE:
        for feedback in (True, False):
            yield Case(
                "selection",
                "select_above",
                f"{threshold} of {n}, {feedback=}",
                lambda n=n, threshold=threshold, feedback=feedback: (
                    *_inputs(n, feedback),
                    threshold,
                    100,
                    _left(n, feedback),
                ),
                compiled=feedback and n == 17_000,
            )
    for n, sample, rank, most in SAMPLED:
        for feedback in (True, False):
            yield Case(
                "selection",
                "select_sampled",
                f"{rank} of {sample} of {n}, {feedback=}",
                lambda n=n, numbers=(sample, rank, SEED, STREAM, most), feedback=feedback: (
                    *_inputs(n, feedback),
                    *numbers,
                    _left(n, feedback),
                ),
                compiled=feedback and n >= 1000,
            )


def _inputs(numel, feedback):
    return vector(numel), vector(numel, 1) if feedback else None


def _left(numel, feedback):
    return torch.full((numel,), torch.nan) if feedback else None
