import torch

from gradwire.kernels._notes import note
from gradwire.kernels.reference import gaps as reference
from kernels.triton_cases import Case, vector

# More than one program of indices, and of bytes of the quotients.
SIZES = ((1, 0), (1, 1), (8, 8), (100, 1), (1000, 999), (10**6, 3000), (20_000, 9_000))


def indices(universe, count):
    generator = torch.Generator().manual_seed(count)
    return torch.randperm(universe, generator=generator)[:count].sort().values


def clustered():
    """A run without gaps, and one index far behind."""
    return torch.cat([torch.arange(5000) + 100, torch.tensor([2**40])])


def cases():
    for universe, count in SIZES:
        yield from _of(indices(universe, count), universe, f"{count} of {universe}", count == 3000)
    yield from _of(clustered(), 2**40 + 1, "clustered", False)

    # Measured before, so that no result is needed to compile what encodes.
    given = indices(10**5, 3000)
    middle, sums, _ = reference.measure_gaps(given, 10**5)
    code = reference.encode_rice(given, middle, sums[1])
    yield Case(
        "gaps",
        "encode_rice",
        "measured before",
        lambda: (measured(given.clone(), 10**5), middle, sums[1]),
        compiled=True,
    )

    for lead in (b"\x05", b"\x00\xff\xc8\x05", b"\x80\x01\x00\xff\x00\x00\xfe\x05"):
        yield Case(
            "gaps",
            "write_entries",
            f"{len(lead)} bytes in front",
            lambda lead=lead: (*_payload(given), 4, lead, vector(3000), 3),
            compiled=len(lead) == 1,
        )
    for front in (0, 3):
        yield Case(
            "gaps",
            "scatter_rice",
            f"behind {front} bytes",
            lambda front=front: (
                torch.cat([torch.full((front,), 7, dtype=torch.uint8), code]),
                front,
                vector(3000),
                10**5,
                torch.full((10**5,), torch.nan),
            ),
            compiled=front == 0,
        )


def _payload(given):
    """Words for a payload, where the code begins, and the indices."""
    return torch.zeros(6000, dtype=torch.int32), 3005, measured(given.clone(), 10**5)


def measured(given, universe):
    """Indices with a note of their gaps, as a selection leaves them."""
    from gradwire.kernels.triton import gaps

    stats = torch.zeros(gaps.STATS, dtype=torch.int64)
    chunks = gaps.launch_measure(given, stats)
    middle, sums, lengths = reference.measure_gaps(given, universe)
    return note(given, gaps=(universe, gaps.Measurement(middle, sums, lengths, chunks)))


def _of(given, universe, name, compiled):
    count = len(given)
    yield Case("gaps", "measure_gaps", name, lambda: (given.clone(), universe), compiled)
    middle, sums, _ = reference.measure_gaps(given, universe)
    for quotients, r in zip(sums, range(max(middle - 1, 0), 32)):
        named = f"{name}, parameter {r}"
        yield Case("gaps", "encode_rice", named, lambda r=r, q=quotients: (given.clone(), r, q))
        body = reference.encode_rice(given, r, quotients)[1:]
        yield Case(
            "gaps",
            "decode_rice",
            named,
            lambda r=r, body=body: (body.clone(), r, universe, count),
            compiled,
        )
