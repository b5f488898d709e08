"""The gaps of a sorted set: how long their codes would be, and Rice's code of them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.kernels._checks import check_count
from gradwire.kernels._dispatch import InTriton, pick
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
