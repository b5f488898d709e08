import torch

from gradwire.kernels.reference import elias as reference
from kernels.triton_cases import Case

# More than one program, the longest codewords, and the shortest.
SIZES = ((1, 0), (1, 9), (40, 100), (2**56 - 1, 1000), (1000, 2500))


def integers(largest, count):
    generator = torch.Generator().manual_seed(count)
    spread = torch.rand(count, generator=generator, dtype=torch.float64)
    values = (float(largest) ** spread).to(torch.int64)
    values[::97] = largest
    return values.clamp(1, largest)


def symbols(alphabet, count):
    return torch.arange(count, dtype=torch.int32) * 7 % 11 % alphabet


def cases():
    for largest, count in SIZES:
        given, name = integers(largest, count), f"{count} up to {largest}"
        lengths = reference.elias_lengths(given)
        compiled = count == 2500
        yield Case("elias", "elias_lengths", name, lambda v=given: (v.clone(),), compiled)
        for delta in (False, True):
            code = reference.elias_encode(given, lengths, delta)
            yield Case(
                "elias",
                "elias_encode",
                f"{name}, {delta=}",
                lambda v=given, lengths=lengths, delta=delta: (v.clone(), lengths, delta),
                compiled,
            )
            behind = torch.cat([code, torch.tensor([255, 0], dtype=torch.uint8)])
            yield Case(
                "elias",
                "elias_decode",
                f"{name}, {delta=}",
                lambda b=behind, c=count, m=largest, delta=delta: (b.clone(), c, m, delta),
                compiled,
            )
    for alphabet, count, centre, dtype in (
        (2, 9, 0, torch.bool),
        (11, 3000, 5, torch.int32),
        (16, 100, 15, torch.uint8),
    ):
        given = symbols(alphabet, count).to(dtype)
        counts = torch.bincount(given.int(), minlength=alphabet)
        lengths = reference.elias_symbol_lengths(counts, centre)
        for delta in (False, True):
            name = f"{count} of {alphabet}, {delta=}"
            code = reference.elias_encode(given, lengths, delta, centre)
            yield Case(
                "elias",
                "elias_encode",
                name,
                lambda v=given, lengths=lengths, d=delta, c=centre: (v.clone(), lengths, d, c),
            )
            yield Case(
                "elias",
                "elias_decode_symbols",
                name,
                lambda b=code, n=count, a=alphabet, c=centre, d=delta: (b.clone(), n, a, c, d),
            )
