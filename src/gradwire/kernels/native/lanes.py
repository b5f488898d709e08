"""Blocks in rows to 64 blocks side by side and back, in C."""

import torch
from torch import Tensor

from gradwire.kernels._pool import empty
from gradwire.kernels.native._library import dense, parallel
from gradwire.kernels.reference.lanes import LANES

_CPU = torch.device("cpu")


def bits_to_lanes(bits: Tensor) -> Tensor:
    lanes, bad = _to(bits, bits.shape[1], packed=False)
    if bad:
        raise ValueError("bits_to_lanes takes zeros and ones")
    return lanes


def bits_from_lanes(lanes: Tensor, blocks: int) -> Tensor:
    return _from(lanes, blocks, lanes.shape[1], packed=False)


def rows_to_lanes(rows: Tensor, n: int) -> Tensor:
    return _to(rows, n, packed=True)[0]


def rows_from_lanes(lanes: Tensor, blocks: int) -> Tensor:
    return _from(lanes, blocks, -(-lanes.shape[1] // 8), packed=True)


def ratios_to_lanes(ratios: Tensor, units: int) -> Tensor:
    ratios = dense(ratios)
    blocks, n = ratios.shape
    groups = -(-blocks // LANES)
    lanes = empty(groups * n * LANES, torch.int8).view(groups, n, LANES)
    if parallel().gw_ratios_to_lanes(ratios.data_ptr(), blocks, n, units, lanes.data_ptr()):
        raise ValueError("ratios_to_lanes takes finite ratios, got inf or NaN")
    return lanes


def polar_fill(ratios: Tensor, blocks: int, n: int, lanes: int, certain: int) -> Tensor:
    ratios, groups = dense(ratios), -(-blocks // lanes)
    used = -(-ratios.numel() // blocks)
    out = empty(groups * n * lanes, torch.int8).view(groups, n, lanes)
    parallel().gw_polar_fill(
        ratios.data_ptr(), ratios.numel(), blocks, used, n, lanes, certain, out.data_ptr()
    )
    return out


def join_lanes(rows: Tensor, blocks: int) -> Tensor:
    rows = dense(rows)
    groups, count, width = rows.shape
    out = empty(-(-count * blocks // 8), torch.uint8)
    parallel().gw_join_lanes(rows.data_ptr(), groups, count, blocks, 8 * width, out.data_ptr())
    return out


def cut_lanes(packed: Tensor, blocks: int, rows: int, lanes: int) -> Tensor:
    packed, groups = dense(packed), -(-blocks // lanes)
    out = empty(groups * rows * (lanes // 8), torch.uint8).view(groups, rows, lanes // 8)
    parallel().gw_cut_lanes(packed.data_ptr(), groups, rows, blocks, lanes, out.data_ptr())
    return out


def _to(rows: Tensor, n: int, packed: bool) -> tuple[Tensor, int]:
    rows = dense(rows)
    blocks = rows.shape[0]
    lanes = torch.empty(-(-blocks // LANES), n, LANES // 8, dtype=torch.uint8, device=_CPU)
    bad = parallel().gw_rows_to_lanes(rows.data_ptr(), blocks, n, packed, lanes.data_ptr())
    return lanes, bad


def _from(lanes: Tensor, blocks: int, width: int, packed: bool) -> Tensor:
    lanes = dense(lanes)
    rows = empty(blocks * width, torch.uint8).view(blocks, width)
    parallel().gw_lanes_to_rows(lanes.data_ptr(), blocks, lanes.shape[1], packed, rows.data_ptr())
    return rows
