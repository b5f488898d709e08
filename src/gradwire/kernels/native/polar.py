"""Polar codes in C: the bits of reference/polar.py, exactly."""

import torch
from torch import Tensor

from gradwire.kernels._pool import empty
from gradwire.kernels.native._library import dense, load, parallel
from gradwire.kernels.reference import polar as reference

_CPU = torch.device("cpu")


def polar_quantise(llr: Tensor, kinds: Tensor, corrected: bool) -> Tensor:
    llr, kinds = dense(llr), dense(kinds)
    groups, n, lanes = llr.shape
    bits = torch.empty(groups, n, lanes // 8, dtype=torch.uint8, device=_CPU)
    _memory(
        parallel().gw_polar_quantise_lanes(
            llr.data_ptr(), groups, n, lanes, kinds.data_ptr(), corrected, bits.data_ptr()
        )
    )
    return bits


def polar_quantise_bits(bits: Tensor, magnitude: int, kinds: Tensor, corrected: bool) -> Tensor:
    bits, kinds = dense(bits), dense(kinds)
    groups, n, width = bits.shape
    found = torch.empty_like(bits)
    _memory(
        parallel().gw_polar_quantise_signs(
            *(bits.data_ptr(), magnitude, groups, n, 8 * width, kinds.data_ptr(), corrected),
            found.data_ptr(),
        )
    )
    return found


def polar_list(
    llr: Tensor,
    kinds: Tensor,
    corrected: bool,
    size: int,
    softplus: Tensor,
    free_patterns: Tensor,
    parity_patterns: Tensor,
) -> Tensor:
    llr, kinds = dense(llr), dense(kinds)
    groups, n, _ = llr.shape
    bits = torch.empty(groups, n, 8, dtype=torch.uint8, device=_CPU)
    _memory(
        parallel().gw_polar_list(
            *(llr.data_ptr(), groups, n, kinds.data_ptr(), corrected, size, softplus.data_ptr()),
            *(free_patterns.data_ptr(), free_patterns.numel()),
            *(parity_patterns.data_ptr(), parity_patterns.numel()),
            bits.data_ptr(),
        )
    )
    return bits


def polar_genie(llr: Tensor, cost: Tensor) -> Tensor:
    llr, cost = dense(llr), dense(cost)
    groups, n, _ = llr.shape
    total = torch.zeros(n, dtype=torch.int64, device=_CPU)
    _memory(load().gw_polar_genie(llr.data_ptr(), groups, n, cost.data_ptr(), total.data_ptr()))
    return total


def polar_transform(bits: Tensor) -> Tensor:
    groups, n, width = bits.shape
    if n * width % 8:  # no whole words
        return reference.polar_transform(bits)
    bits = dense(bits)
    if bits.data_ptr() % 8:
        bits = bits.clone()
    out = torch.empty_like(bits)
    parallel().gw_polar_transform_lanes(bits.data_ptr(), groups, n, 8 * width, out.data_ptr())
    return out


def polar_ratios(x: Tensor, factor: float) -> Tensor:
    x = dense(x)
    out = empty(x.numel(), torch.int8)
    parallel().gw_polar_ratios(x.data_ptr(), factor, x.numel(), out.data_ptr())
    return out


def polar_signs(
    x: Tensor, factor: float, value: float, blocks: int, n: int, lanes: int, kinds: Tensor
) -> tuple[Tensor, Tensor]:
    x, kinds, groups = dense(x), dense(kinds), -(-blocks // lanes)
    values = torch.tensor([-value, value], dtype=torch.float32, device=_CPU)
    bits = torch.empty(groups, n, lanes // 8, dtype=torch.uint8, device=_CPU)
    along = torch.empty(groups, dtype=torch.float64, device=_CPU)
    _memory(
        parallel().gw_polar_signs(
            *(x.data_ptr(), x.numel(), factor, values.data_ptr(), blocks, n, lanes),
            *(kinds.data_ptr(), bits.data_ptr(), along.data_ptr()),
        )
    )
    load().gw_sum_rows(along.data_ptr(), 1, groups)
    return bits, along[0].clone()


def polar_lookup(x: Tensor, factor: float, table: Tensor, labels: Tensor) -> Tensor:
    x, table = dense(x), dense(table)
    out = empty(x.numel(), torch.int8)
    parallel().gw_polar_lookup(
        x.data_ptr(),
        factor,
        table.shape[1],
        table.data_ptr(),
        labels.data_ptr(),
        x.numel(),
        out.data_ptr(),
    )
    return out


def polar_label(labels: Tensor, bits: Tensor, plane: int) -> None:
    bits = dense(bits)
    parallel().gw_polar_label(bits.data_ptr(), plane, labels.numel(), labels.data_ptr())


def polar_points(labels: Tensor, points: Tensor) -> Tensor:
    labels = dense(labels)
    table = torch.zeros(256, dtype=torch.float32, device=_CPU)
    table[: len(points)] = points
    out = empty(labels.numel())
    parallel().gw_polar_points(labels.data_ptr(), table.data_ptr(), labels.numel(), out.data_ptr())
    return out


def _memory(failed: int) -> None:
    if failed:
        raise MemoryError("no memory for the polar code's tree")
