"""Blocks in rows to 64 blocks side by side, bit i of each in eight bytes, and back."""

import torch
from torch import Tensor

from gradwire.kernels._checks import check_count
from gradwire.kernels._dispatch import pick
from gradwire.kernels.native import lanes as native
from gradwire.kernels.reference import lanes as reference
from gradwire.kernels.reference.lanes import LANES


def bits_to_lanes(bits: Tensor) -> Tensor:
    """Blocks of zeros and ones, uint8 or bool [blocks, n], as uint8 [ceil(blocks / 64), n, 8].

    Blocks that fill the last 64 are zero. Other values are a ValueError.
    """
    if bits.dtype not in (torch.bool, torch.uint8) or bits.dim() != 2:
        raise ValueError(
            f"bits_to_lanes takes uint8 or bool [blocks, n], got {bits.dtype} {list(bits.shape)}"
        )
    run = pick(bits.device, native.bits_to_lanes, reference.bits_to_lanes)
    return run(bits.view(torch.uint8))


def bits_from_lanes(lanes: Tensor, blocks: int) -> Tensor:
    """The inverse of `bits_to_lanes`, uint8 [blocks, n]."""
    _check_lanes("bits_from_lanes", lanes, blocks)
    run = pick(lanes.device, native.bits_from_lanes, reference.bits_from_lanes)
    return run(lanes, blocks)


def rows_to_lanes(rows: Tensor, n: int) -> Tensor:
    """As `bits_to_lanes`, of packed bits, uint8 [blocks, ceil(n / 8)]; padding is ignored."""
    check_count("rows_to_lanes", "n", n)
    if rows.dtype != torch.uint8 or rows.dim() != 2 or rows.shape[1] != -(-n // 8):
        raise ValueError(
            f"rows_to_lanes takes uint8 [blocks, {-(-n // 8)}] for {n} bits, got {rows.dtype} "
            f"{list(rows.shape)}"
        )
    run = pick(rows.device, native.rows_to_lanes, reference.rows_to_lanes)
    return run(rows, n)


def rows_from_lanes(lanes: Tensor, blocks: int) -> Tensor:
    """The inverse of `rows_to_lanes`, uint8 [blocks, ceil(n / 8)]."""
    _check_lanes("rows_from_lanes", lanes, blocks)
    run = pick(lanes.device, native.rows_from_lanes, reference.rows_from_lanes)
    return run(lanes, blocks)


def ratios_to_lanes(ratios: Tensor, units: int) -> Tensor:
    """Float32 [blocks, n] in whole 1 / units, at most 127 of them: int8 [ceil(blocks / 64), n, 64].

    Blocks that fill the last 64 are zero. What is not finite is a ValueError.
    """
    if ratios.dtype != torch.float32 or ratios.dim() != 2:
        raise ValueError(
            f"ratios_to_lanes takes float32 [blocks, n], got {ratios.dtype} {list(ratios.shape)}"
        )
    run = pick(ratios.device, native.ratios_to_lanes, reference.ratios_to_lanes)
    return run(ratios, units)


def _check_lanes(operation: str, lanes: Tensor, blocks: int) -> None:
    check_count(operation, "blocks", blocks)
    if lanes.dtype != torch.uint8 or lanes.dim() != 3 or lanes.shape[2] != LANES // 8:
        raise ValueError(
            f"{operation} takes uint8 [groups, n, 8], got {lanes.dtype} {list(lanes.shape)}"
        )
    if lanes.shape[0] != -(-blocks // LANES):
        raise ValueError(
            f"{operation} takes {-(-blocks // LANES)} groups for {blocks} blocks, got "
            f"{lanes.shape[0]}"
        )
