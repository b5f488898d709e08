from kernels.triton_cases import NUMELS, SEED, STREAM, Case, vector


def cases():
    for numel in (*NUMELS, 5000):
        for factor in (0.0, 3000.0):
            yield Case(
                "drawn",
                "draw_candidates",
                f"{numel}, {factor=}",
                lambda numel=numel, factor=factor: (vector(numel), factor, SEED, STREAM, 100),
                compiled=numel == 5000,
            )
