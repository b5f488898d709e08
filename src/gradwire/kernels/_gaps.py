"""The gaps of a sorted set: how long their codes would be, and Rice's code of them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.kernels._checks import check_count
from gradwire.kernels._dispatch import InTriton, pick, runs_triton
from gradwire.kernels._notes import noted
from gradwire.kernels.native import gaps as native
from gradwire.kernels.reference import gaps as reference

triton = InTriton("gaps")

_LARGEST_UNIVERSE = 2**61


@dataclass(frozen=True, slots=True)
class Gaps:
    """What decides the length of every code of a set's gaps."""

    quotients: dict[int, int]  # the sum of gap >> r, for parameters r next to log2 of the mean gap
    lengths: list[int]  # how many gaps plus one have 1, 2, .. 64 bits


def measure_gaps(indices: Tensor, universe: int) -> Gaps:
    """Of strictly increasing int64 indices in 0 .. universe - 1; others are a ValueError."""
    if indices.dtype != torch.int64 or indices.dim() != 1:
        raise ValueError(f"indices are int64 [count], got {indices.dtype} {list(indices.shape)}")
    if not 0 <= universe <= _LARGEST_UNIVERSE:
        raise ValueError(f"a universe has 0 .. 2^61 elements, got {universe}")
    run = pick(indices.device, native.measure_gaps, reference.measure_gaps, triton.measure_gaps)
    middle, sums, lengths = run(indices, universe)
    first = max(middle - 1, 0)
    parameters = range(first, min(middle + 1, reference.LARGEST_PARAMETER) + 1)
    return Gaps({r: sums[r - first] for r in parameters}, lengths)


def encode_rice(indices: Tensor, parameter: int, quotients: int) -> Tensor:
    """Rice's code of the gaps as uint8, the parameter plus one in front.

    `quotients` is the value that `measure_gaps` returns for this parameter.
    """
    run = pick(indices.device, native.encode_rice, reference.encode_rice, triton.encode_rice)
    return run(indices, parameter, quotients)


def decode_rice(body: Tensor, parameter: int, universe: int, count: int) -> Tensor:
    """The indices (int64 [count]) in the bytes behind the parameter; others are a ValueError."""
    check_count("decode_rice", "count", count)
    if not 0 <= parameter <= reference.LARGEST_PARAMETER:
        raise ValueError(f"decode_rice takes a parameter of 0 .. 31, got {parameter}")
    if universe > _LARGEST_UNIVERSE or count << parameter > 2 * _LARGEST_UNIVERSE:
        raise ValueError(f"decode_rice cannot count to {universe} in steps of 2^{parameter}")
    low_bytes = -(-count * parameter // 8)
    if body.dtype != torch.uint8 or body.dim() != 1 or body.numel() < low_bytes:
        raise ValueError(f"{body.numel()} x {body.dtype}, expected {low_bytes} bytes of low parts")
    run = pick(body.device, native.decode_rice, reference.decode_rice, triton.decode_rice)
    return run(body, parameter, universe, count)


def writes_entries(indices: Tensor, values: Tensor) -> bool:
    """Whether there is a `write_entries` for these: of a selection on an accelerator."""
    return (
        runs_triton(indices.device)
        and values.dtype == torch.float32
        and indices.is_contiguous()
        and values.is_contiguous()
        and noted(indices, "gaps") is not None
    )


def write_entries(
    words: Tensor,
    code_at: int,
    indices: Tensor,
    parameter: int,
    lead: bytes,
    values: Tensor,
    values_at: int,
) -> bool:
    """Rice's code of the indices into a payload of zeros, behind at most 8 bytes, and the values.

    `words` is the payload as int32, the numbers are where bytes and values begin in it. False if
    nothing was written, because the parameter is none of those that `measure_gaps` returns.
    """
    if words.dtype != torch.int32 or values.dtype != torch.float32:
        raise ValueError(
            f"write_entries takes float32 values for int32 words, got {values.dtype} for "
            f"{words.dtype}"
        )
    if indices.numel() != values.numel() or not 1 <= len(lead) <= 8:
        raise ValueError(
            f"write_entries takes as many indices as values and 1 to 8 bytes in front, got "
            f"{len(indices)}, {len(values)} and {len(lead)}"
        )
    run = pick(words.device, reference.write_entries, reference.write_entries, triton.write_entries)
    return run(words, code_at, indices, parameter, lead, values, values_at)


def scatters_entries(packed: Tensor, values: Tensor) -> bool:
    """Whether there is a `scatter_rice` for these."""
    return (
        runs_triton(packed.device)
        and values.dtype == torch.float32
        and packed.is_contiguous()
        and values.is_contiguous()
    )


def scatter_rice(
    packed: Tensor,
    front: int,
    values: Tensor,
    universe: int,
    out: Tensor,
    known: int | None = None,
) -> int | None:
    """Writes values to the indices in the bytes of Rice's code from `front` on, the parameter plus
    one first, without waiting for that, and zeros elsewhere.

    Returns the parameter; None if the code is another or invalid. Then `out` is spoiled. Of bytes
    that `write_entries` wrote it is `known`, and nothing is waited for.
    """
    if packed.dtype != torch.uint8 or packed.dim() != 1 or packed.numel() <= front + 1:
        raise ValueError(
            f"scatter_rice takes more than {front + 1} bytes as uint8, got {len(packed)} x "
            f"{packed.dtype}"
        )
    if out.shape != (universe,) or out.dtype != values.dtype or not out.is_contiguous():
        raise ValueError(
            f"scatter_rice needs a contiguous {values.dtype} [{universe}] for its result, got "
            f"{out.dtype} {list(out.shape)}"
        )
    if not values.numel() or universe > _LARGEST_UNIVERSE:
        raise ValueError(f"scatter_rice cannot put {len(values)} values into {universe} elements")
    run = pick(packed.device, reference.scatter_rice, reference.scatter_rice, triton.scatter_rice)
    return run(packed, front, values, universe, out, known)
