"""Polar codes in C: the bits of reference/polar.py, exactly."""

import torch
from torch import Tensor

from gradwire.kernels._pool import empty
from gradwire.kernels.native._library import dense, load, parallel

_CPU = torch.device("cpu")


def polar_quantise(llr: Tensor, kinds: Tensor, corrected: bool) -> Tensor:
    llr, kinds = dense(llr), dense(kinds)
    groups, n, _ = llr.shape
    bits = torch.empty(groups, n, 8, dtype=torch.uint8, device=_CPU)
    _memory(
        parallel().gw_polar_quantise(
            llr.data_ptr(), groups, n, kinds.data_ptr(), corrected, bits.data_ptr()
        )
    )
    return bits


def polar_quantise_bits(bits: Tensor, magnitude: int, kinds: Tensor, corrected: bool) -> Tensor:
    bits, kinds = dense(bits), dense(kinds)
    groups, n, _ = bits.shape
    found = torch.empty_like(bits)
    _memory(
        parallel().gw_polar_quantise_bits(
            *(bits.data_ptr(), magnitude, groups, n, kinds.data_ptr(), corrected),
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
    bits = dense(bits)
    groups, n, _ = bits.shape
    out = torch.empty_like(bits)
    parallel().gw_polar_transform(bits.data_ptr(), groups, n, out.data_ptr())
    return out


def polar_ratios(x: Tensor, factor: float) -> Tensor:
    x = dense(x)
    out = empty(x.numel(), torch.int8)
    parallel().gw_polar_ratios(x.data_ptr(), factor, x.numel(), out.data_ptr())
    return out


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
