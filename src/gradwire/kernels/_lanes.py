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


def polar_fill(ratios: Tensor, blocks: int, n: int, lanes: int, certain: int) -> Tensor:
    """int8 [count] as [ceil(blocks / lanes), n, lanes]: the first positions of all blocks.

    All blocks use their first ceil(count / blocks) positions: in a group, element i * present + b
    is position i of block b, `present` being its number of blocks. Positions from there on say
    `certain`, lanes without a block, and what fewer than `blocks` positions leave, 0.
    """
    count = ratios.numel()
    if ratios.dtype != torch.int8 or ratios.dim() != 1 or not -128 <= certain <= 127:
        raise ValueError(f"polar_fill takes int8 [count], got {ratios.dtype} {list(ratios.shape)}")
    check_places("polar_fill", count, blocks, n, lanes)
    run = pick(ratios.device, native.polar_fill, reference.polar_fill)
    return run(ratios, blocks, n, lanes, certain)


def join_lanes(rows: Tensor, blocks: int) -> Tensor:
    """uint8 [groups, rows, lanes / 8] as bits, without those of lanes that hold no block."""
    if rows.dtype != torch.uint8 or rows.dim() != 3:
        raise ValueError(
            f"join_lanes takes uint8 [groups, rows, lanes / 8], got {rows.dtype} {list(rows.shape)}"
        )
    lanes = 8 * rows.shape[2]
    _check_groups("join_lanes", blocks, lanes)
    if rows.shape[0] != -(-blocks // lanes):
        raise ValueError(
            f"join_lanes takes {-(-blocks // lanes)} groups for {blocks} blocks, got "
            f"{rows.shape[0]}"
        )
    return pick(rows.device, native.join_lanes, reference.join_lanes)(rows, blocks)


def cut_lanes(packed: Tensor, blocks: int, rows: int, lanes: int) -> Tensor:
    """The inverse of `join_lanes`: uint8 [groups, rows, lanes / 8]; lanes without a block are 0."""
    _check_groups("cut_lanes", blocks, lanes)
    check_count("cut_lanes", "rows", rows)
    if packed.dtype != torch.uint8 or packed.dim() != 1 or len(packed) != -(-rows * blocks // 8):
        raise ValueError(
            f"cut_lanes takes {-(-rows * blocks // 8)} bytes of uint8 for {rows} rows of {blocks} "
            f"blocks, got {packed.dtype} {list(packed.shape)}"
        )
    return pick(packed.device, native.cut_lanes, reference.cut_lanes)(packed, blocks, rows, lanes)


def check_places(operation: str, count: int, blocks: int, n: int, lanes: int) -> None:
    """That so many elements can be placed as `polar_fill` does."""
    _check_groups(operation, blocks, lanes)
    used = -(-count // blocks)
    if not 1 <= used <= n or count <= (-(-blocks // lanes) - 1) * lanes * used:
        raise ValueError(f"{operation}: {count} elements do not fill {blocks} blocks of up to {n}")


def _check_groups(operation: str, blocks: int, lanes: int) -> None:
    if blocks < 1 or lanes not in (8, 16, 32, LANES):
        raise ValueError(
            f"{operation} takes a block or more in 8, 16, 32 or {LANES} lanes, got {blocks} in "
            f"{lanes}"
        )


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
