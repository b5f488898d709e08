import torch

from kernels.triton_cases import SEED, STREAM, Case, vector

# Rows, their elements, those of the sample, of it above the threshold, and those kept at most.
SAMPLED = [
    (1, 1, 1, 1, 1),
    (3, 257, 257, 30, 20),
    (2, 1000, 100, 3, 1000),
    (2, 17_000, 16_500, 90, 80),
]


def cases():
    for rows, n, *numbers in SAMPLED:
        for feedback in (True, False):
            yield Case(
                "selection_rows",
                "select_sampled_rows",
                f"{numbers} of {rows} x {n}, {feedback=}",
                lambda rows=rows, n=n, numbers=numbers, feedback=feedback: (
                    _rows(rows, n),
                    _rows(rows, n, 9) if feedback else None,
                    *numbers[:2],
                    [(SEED - r, (*STREAM[:2], r * 2**31)) for r in range(rows)],
                    numbers[2],
                    torch.full((rows, n), torch.nan) if feedback else None,
                ),
                compiled=feedback and n >= 1000,
            )


def _rows(rows, n, seed=0):
    return torch.stack([vector(n, seed + r) for r in range(rows)])
