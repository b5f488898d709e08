import torch

from kernels.triton_cases import Case, vector


def hashes(rows):
    generator = torch.Generator().manual_seed(rows)
    return torch.randint(-(2**63), 2**63 - 1, (2, rows), generator=generator)


def cases():
    for numel in (0, 1, 257, 1000):
        for rows, columns in ((1, 1), (3, 10), (5, 200)):
            name = f"{numel} into {rows} x {columns}"
            yield Case(
                "sketch",
                "sketch",
                name,
                lambda n=numel, rows=rows, columns=columns: (vector(n), hashes(rows), columns),
                compiled=numel == 1000 and rows == 5,
            )
            yield Case(
                "sketch",
                "sketch_medians",
                name,
                lambda n=numel, rows=rows, columns=columns: (
                    vector(rows * columns).view(rows, columns),
                    hashes(rows),
                    n,
                ),
                compiled=numel == 1000 and rows == 5,
            )
