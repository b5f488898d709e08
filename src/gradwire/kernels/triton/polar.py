"""What surrounds successive cancellation (`polar_cancel.py`): ratios, labels and points."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels.triton._common import (
    cdiv,
    launch,
    load_block,
    program_start,
    store_block,
)
from gradwire.kernels.triton.polar_cancel import (
    cancel_bits,
    cancel_numbers,
    cancel_ratios,
    rounded_ratio,
)
from gradwire.kernels.triton.polar_code import join_inputs, point_products
from gradwire.kernels.triton.polar_transform import polar_transform as polar_transform

_BLOCK = 2048  # elements of a program


def polar_quantise(llr: Tensor, kinds: Tensor, corrected: bool) -> Tensor:
    return cancel_ratios(llr, kinds, corrected)


def polar_quantise_bits(bits: Tensor, magnitude: int, kinds: Tensor, corrected: bool) -> Tensor:
    return cancel_bits(bits, magnitude, kinds, corrected)


def polar_signs(
    x: Tensor, factor: float, value: float, blocks: int, n: int, lanes: int, kinds: Tensor
) -> tuple[Tensor, Tensor]:
    x = x.contiguous()
    word = cancel_numbers(x, factor, blocks, n, lanes, kinds)
    return word, point_products(x, word, value, blocks)


def polar_encode_signs(
    x: Tensor,
    factor: float,
    value: float,
    blocks: int,
    n: int,
    lanes: int,
    kinds: Tensor,
    rows: Tensor,
    out: Tensor,
) -> Tensor:
    x = x.contiguous()
    word = cancel_numbers(x, factor, blocks, n, lanes, kinds)
    join_inputs(polar_transform(word), rows.to(x.device), blocks, out)
    return point_products(x, word, value, blocks)


def polar_ratios(x: Tensor, factor: float) -> Tensor:
    out = torch.empty(x.numel(), dtype=torch.int8, device=x.device)
    grid = (cdiv(len(out), _BLOCK),)
    launch(_ratios, grid, x.contiguous(), float(factor), out, len(out), BLOCK=_BLOCK)
    return out


def polar_lookup(x: Tensor, factor: float, table: Tensor, labels: Tensor) -> Tensor:
    out = torch.empty(x.numel(), dtype=torch.int8, device=x.device)
    launch(
        _lookup,
        (cdiv(len(out), _BLOCK),),
        x.contiguous(),
        float(factor),
        table.contiguous(),
        *table.shape,
        labels,
        out,
        len(out),
        BLOCK=_BLOCK,
    )
    return out


def polar_label(labels: Tensor, bits: Tensor, plane: int) -> None:
    count = labels.numel()
    launch(_label, (cdiv(count, _BLOCK),), labels, bits.contiguous(), plane, count, BLOCK=_BLOCK)


def polar_points(labels: Tensor, points: Tensor) -> Tensor:
    out = torch.empty(labels.numel(), dtype=torch.float32, device=labels.device)
    launch(
        _points,
        (cdiv(len(out), _BLOCK),),
        labels,
        points.contiguous(),
        len(points),
        out,
        len(out),
        BLOCK=_BLOCK,
    )
    return out


@triton.jit
def _ratios(x, factor, out, count, BLOCK: tl.constexpr):
    start = program_start(BLOCK)
    at, is_whole = start + tl.arange(0, BLOCK), start + BLOCK <= count
    ratio = rounded_ratio(load_block(x, at, count, is_whole) * factor)
    store_block(out, at, ratio.to(tl.int8), count, is_whole)


@triton.jit
def _lookup(x, factor, table, rows, bins, labels, out, count, BLOCK: tl.constexpr):
    start = program_start(BLOCK)
    at, is_whole = start + tl.arange(0, BLOCK), start + BLOCK <= count
    last = tl.full((1,), 0, tl.float32) + (bins - 1)
    half = (tl.full((1,), 0, tl.float32) + bins) * 0.5
    place = load_block(x, at, count, is_whole) * factor + half
    place = tl.minimum(tl.maximum(place, 0.0), last).to(tl.int32)
    label = load_block(labels, at, count, is_whole).to(tl.int32)
    ratio = tl.load(table + label * bins + place, mask=label < rows, other=0)
    store_block(out, at, ratio, count, is_whole)


@triton.jit(do_not_specialize=["plane"])
def _label(labels, bits, plane, count, BLOCK: tl.constexpr):
    start = program_start(BLOCK)
    at, is_whole = start + tl.arange(0, BLOCK), start + BLOCK <= count
    byte = tl.load(bits + (at >> 3), mask=at < count, other=0).to(tl.int32)
    one = ((byte >> (at & 7).to(tl.int32)) & 1) << plane
    label = load_block(labels, at, count, is_whole).to(tl.int32)
    store_block(labels, at, (label | one).to(tl.uint8), count, is_whole)


@triton.jit
def _points(labels, points, num_points, out, count, BLOCK: tl.constexpr):
    start = program_start(BLOCK)
    at, is_whole = start + tl.arange(0, BLOCK), start + BLOCK <= count
    label = load_block(labels, at, count, is_whole).to(tl.int32)
    point = tl.load(points + label, mask=label < num_points, other=0)
    store_block(out, at, point, count, is_whole)
