"""Polar codes: successive cancellation as a quantiser, its genie, and the transform."""

from collections.abc import Callable
from ctypes import c_float
from functools import partial

import torch
from torch import Tensor

from gradwire.kernels._checks import check_packed
from gradwire.kernels._dispatch import InTriton, pick, pick_stepwise, runs_triton
from gradwire.kernels._lanes import check_places, join_lanes
from gradwire.kernels._notes import note, noted
from gradwire.kernels.native import polar as native
from gradwire.kernels.reference import polar as reference
from gradwire.kernels.reference.lanes import LANES
from gradwire.kernels.reference.polar import FREE, FROZEN, MIXED, PARITY, REPETITION

_triton = InTriton("polar")

POLAR_LANES = LANES
_WIDTHS = (8, 16, 32, LANES)
_BYTES = (1, 2, 4, LANES // 8)
POLAR_FROZEN, POLAR_FREE, POLAR_REPETITION, POLAR_PARITY = FROZEN, FREE, REPETITION, PARITY


def polar_width(blocks: int) -> int:
    """Lanes for so many blocks: 8, 16 or 32 if they are enough, else 64 and several groups."""
    return next((width for width in _WIDTHS if blocks <= width), LANES)


def polar_kinds(free: Tensor) -> Tensor:
    """What `polar_quantise` does at each node of the tree over `free` (bool [n]), uint8 [2n].

    A heap: the root at 1, the halves of node k at 2k and 2k + 1.
    """
    n = free.numel()
    if free.dtype != torch.bool or free.dim() != 1 or n < 1 or n & (n - 1):
        raise ValueError(f"polar_kinds takes bool [2^k], got {free.dtype} {list(free.shape)}")
    kinds = torch.full((2 * n,), MIXED, dtype=torch.uint8, device=free.device)
    for size in (1 << level for level in range(n.bit_length())):
        nodes = free.reshape(-1, size)
        count = nodes.sum(dim=1)
        kind = kinds[n // size : 2 * (n // size)]
        kind[(count == size - 1) & ~nodes[:, 0] & (size > 2)] = PARITY
        kind[(count == 1) & nodes[:, -1]] = REPETITION
        kind[count == size] = FREE
        kind[count == 0] = FROZEN
    return kinds


def polar_quantise(llr: Tensor, kinds: Tensor, corrected: bool = True) -> Tensor:
    """The codewords that successive cancellation finds for log-likelihood ratios, 64 at a time.

    `llr` is int8 [groups, n, 64], eight units to a nat, positive where a zero is likelier, not
    below -127; `kinds` is what `polar_kinds` makes of the free positions, frozen ones are zero.
    The result is uint8 [groups, n, 8], a bit for each ratio. Ties decide zero. `corrected`
    improves on the minimum where two magnitudes meet: see reference/polar.py. Fewer blocks may
    have fewer lanes, `polar_width` of them, which is faster; each is found as if it were alone.
    """
    _check_rows("polar_quantise", llr, torch.int8, *_WIDTHS)
    _check_kinds("polar_quantise", kinds, llr.shape[1])
    return _quantise(llr.device)(llr, kinds, corrected)


def polar_quantise_bits(
    bits: Tensor, magnitude: int, kinds: Tensor, corrected: bool = True
) -> Tensor:
    """`polar_quantise` of ratios that differ in sign alone.

    They are -magnitude where a bit of `bits` (uint8 [groups, n, 8]) is one, else magnitude.
    """
    _check_rows("polar_quantise_bits", bits, torch.uint8, *_BYTES)
    _check_kinds("polar_quantise_bits", kinds, bits.shape[1])
    if not 0 <= magnitude <= 127:
        raise ValueError(f"polar_quantise_bits takes a magnitude of 0 .. 127, got {magnitude}")
    run = pick_stepwise(
        bits.device,
        native.polar_quantise_bits,
        reference.polar_quantise_bits,
        _triton.polar_quantise_bits,
    )
    return run(bits, magnitude, kinds, corrected)


def polar_list(
    llr: Tensor,
    kinds: Tensor,
    corrected: bool,
    size: int,
    softplus: Tensor,
    free_patterns: Tensor,
    parity_patterns: Tensor,
) -> Tensor:
    """`polar_quantise` with lists of `size` = 2, 4 .. 32 paths, in C alone.

    `coding/polar/search.py`, which calls it, does the same in torch and makes its tables:
    `softplus` uint8 [128], patterns as int32 with a bit for each of the weakest positions.
    """
    _check_rows("polar_list", llr, torch.int8, LANES)
    _check_kinds("polar_list", kinds, llr.shape[1])
    if size not in (2, 4, 8, 16, 32) or softplus.dtype != torch.uint8 or softplus.numel() != 128:
        raise ValueError(f"polar_list takes a size of 2, 4 .. 32, got {size}, and uint8 [128]")
    for patterns in (free_patterns, parity_patterns):
        if patterns.dtype != torch.int32 or not 1 <= patterns.numel() <= 256:
            raise ValueError(f"polar_list takes 1 .. 256 patterns of int32, got {patterns.dtype}")
    return native.polar_list(
        llr, kinds, corrected, size, softplus, free_patterns.contiguous(), parity_patterns
    )


def polar_genie(llr: Tensor, cost: Tensor) -> Tensor:
    """For each input bit, cost[ratio + 127] summed over all blocks, int64 [n].

    Its ratio is what successive cancellation sees of it if it knows that all before it are zero.
    `llr` is as in `polar_quantise`, `cost` int32 [255].
    """
    _check_rows("polar_genie", llr, torch.int8, LANES)
    if cost.dtype != torch.int32 or cost.shape != (255,):
        raise ValueError(
            f"polar_genie takes int32 [255] for cost, got {cost.dtype} {list(cost.shape)}"
        )
    if llr.numel() and int(llr.min()) < -127:
        raise ValueError("polar_genie takes ratios within -127 .. 127, got -128")
    run = pick(llr.device, native.polar_genie, reference.polar_genie)
    return run(llr, cost.to(llr.device))


def polar_transform(bits: Tensor) -> Tensor:
    """x = u F^(n) of 64 blocks side by side: uint8 [groups, n, 8] to the same; its own inverse.

    Or of fewer, as in `polar_quantise`.
    """
    _check_rows("polar_transform", bits, torch.uint8, *_BYTES)
    run = pick(
        bits.device, native.polar_transform, reference.polar_transform, _triton.polar_transform
    )
    return run(bits)


def _quantise(device: torch.device) -> Callable[[Tensor, Tensor, bool], Tensor]:
    return pick_stepwise(
        device, native.polar_quantise, reference.polar_quantise, _triton.polar_quantise
    )


def _check_kinds(operation: str, kinds: Tensor, n: int) -> None:
    if kinds.dtype != torch.uint8 or kinds.shape != (2 * n,):
        raise ValueError(
            f"{operation} takes uint8 [{2 * n}] for kinds, got {kinds.dtype} {list(kinds.shape)}"
        )
    if noted(kinds, "are_kinds"):  # to look at them takes longer than to start a kernel
        return
    if bool((kinds > MIXED).any()) or bool((kinds[n:] > FREE).any()):
        raise ValueError(f"{operation}: kinds are those that polar_kinds makes, got others")
    note(kinds, are_kinds=True, steps={})


def polar_ratios(x: Tensor, factor: float) -> Tensor:
    """x * factor (float32) as whole numbers within -127 .. 127, int8, ties to even."""
    _check_floats("polar_ratios", x)
    run = pick(x.device, native.polar_ratios, reference.polar_ratios, _triton.polar_ratios)
    return run(x.reshape(-1), _single(factor))


def polar_signs(
    x: Tensor, factor: float, value: float, blocks: int, lanes: int, kinds: Tensor
) -> tuple[Tensor, Tensor]:
    """A code of two points, -value and value, for all elements: its codewords and how x fits them.

    The codewords, uint8 [groups, n, lanes / 8], are what `polar_quantise` finds for the ratios
    x * factor (float32) of elements placed by `polar_fill`; the other, float64, is the sum of
    x * point, over each group and then over groups, along the tree of `bucket_squares`.
    """
    _check_floats("polar_signs", x)
    x, n = x.reshape(-1), kinds.numel() // 2
    check_places("polar_signs", x.numel(), blocks, n, lanes)
    _check_kinds("polar_signs", kinds, n)
    run = pick(x.device, native.polar_signs, _composed_signs(x.device), _triton.polar_signs)
    return run(x, _single(factor), _single(value), blocks, n, lanes, kinds)


def polar_encode_signs(
    x: Tensor,
    factor: float,
    value: float,
    blocks: int,
    lanes: int,
    kinds: Tensor,
    rows: Tensor,
    out: Tensor,
) -> Tensor:
    """`polar_signs`, whose second result it returns, and what of the codewords is sent.

    `out`, uint8, gets the inputs `rows` (int64, ascending) of all codewords, as `join_lanes` packs
    them.
    """
    _check_floats("polar_encode_signs", x)
    x, n = x.reshape(-1), kinds.numel() // 2
    check_places("polar_encode_signs", x.numel(), blocks, n, lanes)
    _check_kinds("polar_encode_signs", kinds, n)
    check_packed("polar_encode_signs", out, len(rows) * blocks)
    if rows.dtype != torch.int64 or rows.dim() != 1:
        raise ValueError(
            f"polar_encode_signs takes rows as int64 [count], got {rows.dtype} {list(rows.shape)}"
        )
    signs = pick(x.device, native.polar_signs, _composed_signs(x.device), _triton.polar_signs)
    transform = pick(
        x.device, native.polar_transform, reference.polar_transform, _triton.polar_transform
    )
    composed = partial(
        reference.polar_encode_signs, signs=signs, transform=transform, join=join_lanes
    )
    run = pick(x.device, composed, composed, _triton.polar_encode_signs)
    return run(x, _single(factor), _single(value), blocks, n, lanes, kinds, rows, out)


def _composed_signs(device: torch.device) -> Callable[..., tuple[Tensor, Tensor]]:
    return partial(reference.polar_signs, quantise=_quantise(device))


def polar_lookup(x: Tensor, factor: float, table: Tensor, labels: Tensor) -> Tensor:
    """table[label, floor(x * factor + bins / 2)] for each x (float32), int8.

    `table` is int8 [labels, bins], labels are uint8; x beyond the bins takes the outermost.
    """
    _check_floats("polar_lookup", x)
    if table.dtype != torch.int8 or table.dim() != 2:
        raise ValueError(
            f"polar_lookup takes int8 [labels, bins], got {table.dtype} {list(table.shape)}"
        )
    _check_labels("polar_lookup", labels, x.numel())
    _check_most("polar_lookup", labels, len(table))
    run = pick(x.device, native.polar_lookup, reference.polar_lookup, _triton.polar_lookup)
    return run(x.reshape(-1), _single(factor), table.to(x.device), labels)


def polar_label(labels: Tensor, bits: Tensor, plane: int) -> None:
    """Sets bit `plane` of each label (uint8, in place) whose packed bit is one."""
    check_packed("polar_label", bits, labels.numel())
    _check_labels("polar_label", labels, labels.numel())
    if not 0 <= plane < 8:
        raise ValueError(f"polar_label: a label has bits 0 .. 7, not {plane}")
    run = pick(labels.device, native.polar_label, reference.polar_label, _triton.polar_label)
    run(labels, bits, plane)


def polar_points(labels: Tensor, points: Tensor) -> Tensor:
    """points[label] for each label (uint8), float32."""
    _check_labels("polar_points", labels, labels.numel())
    if points.dtype != torch.float32 or points.dim() != 1 or len(points) > 256:
        raise ValueError(
            f"polar_points takes at most 256 float32, got {points.dtype} {list(points.shape)}"
        )
    _check_most("polar_points", labels, len(points))
    run = pick(labels.device, native.polar_points, reference.polar_points, _triton.polar_points)
    return run(labels, points.to(labels.device))


def _single(factor: float) -> float:
    """As a float32, which is what both backends multiply by."""
    return c_float(factor).value


def _check_floats(operation: str, x: Tensor) -> None:
    if x.dtype != torch.float32:
        raise ValueError(f"{operation} takes float32, got {x.dtype}")


def _check_labels(operation: str, labels: Tensor, count: int) -> None:
    if labels.dtype != torch.uint8 or labels.numel() != count or not labels.is_contiguous():
        raise ValueError(
            f"{operation} takes {count} labels as contiguous uint8, got {labels.numel()} of "
            f"{labels.dtype}"
        )


def _check_most(operation: str, labels: Tensor, count: int) -> None:
    """Nobody waits for an accelerator: Triton's kernels take zero for labels that name nothing."""
    is_checked = count < 256 and not (runs_triton(labels.device) and labels.device.type != "cpu")
    if is_checked and labels.numel() and int(labels.max()) >= count:
        raise ValueError(f"{operation}: label {int(labels.max())} in a table of {count}")


def _check_rows(operation: str, x: Tensor, dtype: torch.dtype, *widths: int) -> None:
    if x.dtype != dtype or x.dim() != 3 or x.shape[2] not in widths:
        raise ValueError(
            f"{operation} takes {dtype} [groups, n, {' or '.join(map(str, widths))}], got "
            f"{x.dtype} {list(x.shape)}"
        )
    n = x.shape[1]
    if n < 1 or n & (n - 1):
        raise ValueError(f"{operation} takes blocks of 2^k positions, got {n}")


def check_rows(operation: str, llr: Tensor, dtype: torch.dtype) -> None:
    """Ratios of int8 [groups, n, lanes], of any number of lanes."""
    _check_rows(operation, llr, dtype, *_WIDTHS)
