"""Successive cancellation of polar codes: a program decides eight blocks side by side.

The tree of reference/polar.py is walked on the host, once for each set of free inputs. What is left
is a list of steps, which all programs follow: each makes the ratios of a node from those of its
parent, and decides the node's bits at once if it needs no tree, or adds up the bits of two halves.
Where the second half is decided at once, the same step adds up both; where both are, it decides
both. A program has its ratios in memory that it alone uses (in the cache, mostly), a part for each
size of node, and a byte for each position, of which each block has a bit. Nodes of up to 32
positions are one tile in registers; so many steps are of them that a step's latency is what counts.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels._notes import noted
from gradwire.kernels.reference.polar import FREE, FROZEN, MIXED, PARITY, REPETITION
from gradwire.kernels.triton._common import launch

_EIGHT = 8  # blocks of a program
_SMALL = 32  # positions of a node that is one tile
_LARGE = 128  # positions of a tile of larger ones
_MOST_PROGRAMS, _MOST_BYTES = 4096, 1 << 28  # more blocks are taken in turns
_WARPS = 4

# How a step gets a node's ratios: from its parent's, or as they are; or what it does to bits.
_FIRST, _SECOND, _SECOND_OF_ZEROS, _OWN, _ADD, _REPEAT, _ZERO = range(7)
# Of a step's fields: what it does; the node's kind; log2 of its size; whether the bits of both
# halves of its parent are then put together; the kind of the first half, if that is decided before.
_KIND_SHIFT, _SIZE_SHIFT, _JOINS_SHIFT, _BEFORE_SHIFT = 3, 6, 11, 12

_FROM_RATIOS, _FROM_BITS, _FROM_NUMBERS = range(3)


def cancel_ratios(llr: Tensor, kinds: Tensor, corrected: bool) -> Tensor:
    groups, n, lanes = llr.shape
    return _cancelled(llr.contiguous(), kinds, (groups, n, lanes), corrected, _FROM_RATIOS)


def cancel_bits(bits: Tensor, magnitude: int, kinds: Tensor, corrected: bool) -> Tensor:
    groups, n, width = bits.shape
    size = (groups, n, _EIGHT * width)
    return _cancelled(
        bits.contiguous(), kinds, size, corrected, _FROM_BITS, magnitude=float(magnitude)
    )


def cancel_numbers(
    x: Tensor, factor: float, blocks: int, n: int, lanes: int, kinds: Tensor
) -> Tensor:
    """Of ratios x * factor, placed in the blocks as by `polar_fill`."""
    size = (-(-blocks // lanes), n, lanes)
    return _cancelled(x, kinds, size, True, _FROM_NUMBERS, float(factor), blocks)


def _cancelled(
    source: Tensor,
    kinds: Tensor,
    size: tuple[int, int, int],
    corrected: bool,
    kind: int,
    magnitude: float = 0.0,
    blocks: int = 1,
) -> Tensor:
    groups, n, lanes = size
    width, device = lanes // _EIGHT, source.device
    out = torch.empty(groups, n, width, dtype=torch.uint8, device=device)
    programs = min(groups * width, _MOST_PROGRAMS, max(1, _MOST_BYTES // (2 * n * _EIGHT)))
    alpha = torch.empty(programs * 2 * n * _EIGHT, dtype=torch.int8, device=device)
    beta = torch.empty(programs * n, dtype=torch.uint8, device=device)
    steps = _steps_of(kinds, device)
    launch(
        _cancel,
        (programs,),
        source,
        steps,
        len(steps) // 2,
        alpha,
        beta,
        out,
        groups * width,
        n,
        lanes,
        magnitude,
        source.numel(),
        blocks,
        -(-source.numel() // blocks),
        SOURCE=kind,
        CORRECTED=corrected,
        SMALL=_SMALL,
        LARGE=_LARGE,
        num_warps=_WARPS,
        num_stages=1,
    )
    return out


def _steps_of(kinds: Tensor, device: torch.device) -> Tensor:
    """The steps for a tree, on the device: kept with `kinds` where there is a note about them."""
    kept: dict[torch.device, Tensor] | None = noted(kinds, "steps")
    steps = None if kept is None else kept.get(device)
    if steps is None:
        steps = _steps_on(kinds.cpu().numpy().tobytes(), device)
        if kept is not None:
            kept[device] = steps
    return steps


@lru_cache(maxsize=64)
def _steps_on(kinds: bytes, device: torch.device) -> Tensor:
    return torch.tensor(_steps(kinds), dtype=torch.int32, device=device)


def _steps(kinds: bytes) -> list[int]:
    """Two numbers for each step: its fields, and the first position of the node."""
    steps: list[int] = []

    def add(
        what: int, kind: int, size: int, start: int, joins: bool = False, before: int = 0
    ) -> None:
        fields = what | kind << _KIND_SHIFT | (size.bit_length() - 1) << _SIZE_SHIFT
        steps.extend((fields | joins << _JOINS_SHIFT | before << _BEFORE_SHIFT, start))

    def is_one_step(kind: int, size: int) -> bool:
        return size <= _SMALL and kind not in (FROZEN, MIXED)

    def visit(at: int, kind: int, size: int, start: int, what: int) -> None:
        half, middle = size // 2, start + size // 2
        if kind == FROZEN:
            add(_ZERO, kind, size, start)
        elif kind == FREE or is_one_step(kind, size):
            add(what, kind, size, start)
        else:
            if what != _OWN:
                add(what, MIXED, size, start)
            if kind == PARITY:
                add(_OWN, kind, size, start)
            else:
                visit_halves(at, kind, half, start, middle)

    def visit_halves(at: int, kind: int, half: int, start: int, middle: int) -> None:
        first, second = kinds[2 * at], kinds[2 * at + 1]
        if kind == REPETITION:
            first, second = FROZEN, kind
        way = _SECOND_OF_ZEROS if first == FROZEN else _SECOND
        ends = is_one_step(second, half)
        is_pair = ends and is_one_step(first, half)
        if first != FROZEN and not is_pair:
            visit(2 * at, first, half, start, _FIRST)
        if ends:
            add(way, second, half, middle, joins=True, before=first if is_pair else 0)
            return
        visit(2 * at + 1, second, half, middle, way)
        add(_REPEAT if first == FROZEN else _ADD, MIXED, half, start)

    visit(1, kinds[1], len(kinds) // 2, 0, _OWN)
    return steps


@triton.jit(do_not_specialize=["num_steps", "octets", "count", "blocks", "used"])
def _cancel(
    source,
    steps,
    num_steps,
    alphas,
    betas,
    out,
    octets,
    n,
    lanes,
    factor,
    count,
    blocks,
    used,
    SOURCE: tl.constexpr,
    CORRECTED: tl.constexpr,
    SMALL: tl.constexpr,
    LARGE: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    alpha = alphas + program * 2 * n * 8  # nodes of `size` positions begin at 2 n - 2 size
    beta = betas + program * n
    for octet in range(tl.program_id(0), octets, tl.num_programs(0)):
        group, first = octet // (lanes // 8), octet % (lanes // 8)
        for start in range(0, n, LARGE):
            row = start + tl.arange(0, LARGE)
            if SOURCE == 2:
                ratio = _placed(source, factor, group, first, row, n, lanes, count, blocks, used)
            else:
                ratio = _given(source, factor, group, first, row, n, lanes, SOURCE)
            _store_ratios(alpha, 0, row, ratio, n)
        tl.debug_barrier()
        fields, at = tl.load(steps), tl.load(steps + 1)
        for step in range(num_steps):
            what, kind, size = fields & 7, (fields >> 3) & 7, 1 << ((fields >> 6) & 31)
            joins, before = (fields >> 11) & 1, fields >> 12
            start = at
            # Those of the next step are on their way meanwhile; after the last comes itself again.
            later = tl.minimum(step + 1, num_steps - 1)
            fields, at = tl.load(steps + 2 * later), tl.load(steps + 2 * later + 1)
            if what >= 4:
                _combine(beta, what, start, size)
            elif size <= SMALL:
                row = tl.arange(0, SMALL)
                a, b = _halves_of(alpha, n, what, size, row)
                if before == 0:
                    bits = _bits_before(beta, what, start, size, row)
                else:
                    bits = _decided(_first(a, b, CORRECTED), before, row, size)
                ratio = _combined(a, b, bits, what, CORRECTED)
                if kind == 4:
                    _store_ratios(alpha, 2 * n - 2 * size, row, ratio, size)
                else:
                    own = _decided(ratio, kind, row, size)
                    _store_bits(beta, start, row, own, size)
                    if joins == 1:
                        tl.debug_barrier()  # other threads may not have read yet what is there
                        _store_bits(beta, start - size, row, own ^ bits, size)
            elif kind == 3:
                _parity(alpha, beta, n, start, size, LARGE)
            else:
                for piece in range(0, size, LARGE):
                    row = piece + tl.arange(0, LARGE)
                    ratio = _ratios_of(alpha, beta, n, what, start, size, row, CORRECTED)
                    if kind == 4:
                        _store_ratios(alpha, 2 * n - 2 * size, row, ratio, size)
                    else:
                        _store_bits(beta, start, row, (ratio < 0).to(tl.int32), size)
            tl.debug_barrier()
        for start in range(0, n, 1024):
            row = start + tl.arange(0, 1024)
            byte = tl.load(beta + row, mask=row < n)
            to = (group.to(tl.int64) * n + row) * (lanes // 8) + first
            tl.store(out + to, byte, mask=row < n)
        tl.debug_barrier()


@triton.jit
def _given(source, magnitude, group, first, row, n, lanes, SOURCE: tl.constexpr):
    """Ratios [rows, 8] of the source, or `magnitude` with the signs that it has as bits."""
    lane = tl.arange(0, 8)[None, :]
    place = (group.to(tl.int64) * n + row[:, None]) * lanes + first * 8
    inside = (row < n)[:, None]
    if SOURCE == 0:
        ratio = tl.load(source + place + lane, mask=inside, other=0).to(tl.int32)
    else:
        byte = tl.load(source + place // 8, mask=inside, other=0).to(tl.int32)
        size = (tl.full((1, 1), 0, tl.float32) + magnitude).to(tl.int32)
        ratio = tl.where(((byte >> lane) & 1) != 0, -size, size)
    return ratio


@triton.jit
def _placed(source, factor, group, first, row, n, lanes, count, blocks, used):
    """Ratios [rows, 8] of numbers: x * factor rounded, where `polar_fill` places them."""
    lane = first * 8 + tl.arange(0, 8)[None, :]
    row = row[:, None]
    present = tl.minimum(lanes, blocks - group * lanes)
    element = group.to(tl.int64) * used * lanes + row.to(tl.int64) * present + lane
    there = (row < used) & (lane < present) & (element < count)
    ratio = rounded_ratio(tl.load(source + element, mask=there, other=0.0) * factor)
    return tl.where(row < used, ratio, 127)


@triton.jit
def rounded_ratio(x):
    """The nearest whole number within -127 .. 127, ties to even, int32."""
    x = tl.minimum(tl.maximum(x, -127.0), 127.0)
    return ((x + 12582912.0) - 12582912.0).to(tl.int32)  # 1.5 * 2^23 leaves no room for a fraction


@triton.jit
def _store_ratios(alpha, begin, row, ratio, size):
    to = alpha + (begin + row)[:, None] * 8 + tl.arange(0, 8)[None, :]
    tl.store(to, ratio.to(tl.int8), mask=(row < size)[:, None])


@triton.jit
def _store_bits(beta, start, row, bits, size):
    byte = tl.sum(bits << tl.arange(0, 8)[None, :], axis=1)
    tl.store(beta + start + row, byte.to(tl.uint8), mask=row < size)


@triton.jit
def _ratios_of(alpha, beta, n, what, start, size, row, CORRECTED: tl.constexpr):
    """The ratios [rows, 8] of a node; rows beyond its size are zero."""
    a, b = _halves_of(alpha, n, what, size, row)
    return _combined(a, b, _bits_before(beta, what, start, size, row), what, CORRECTED)


@triton.jit
def _halves_of(alpha, n, what, size, row):
    """Ratios [rows, 8] of both halves of the parent; the node's own and zeros for what == 3."""
    place = row[:, None] * 8 + tl.arange(0, 8)[None, :]
    num_second = tl.where(what == 3, 0, size)
    begin = 2 * n - 2 * size - 2 * num_second
    a = tl.load(alpha + begin * 8 + place, mask=row[:, None] < size, other=0).to(tl.int32)
    b = tl.load(alpha + (begin + size) * 8 + place, mask=row[:, None] < num_second, other=0)
    return a, b.to(tl.int32)


@triton.jit
def _bits_before(beta, what, start, size, row):
    """The bits [rows, 8] of the first half, for the second one; else zeros."""
    num_bits = tl.where(what == 1, size, 0)
    bits = tl.load(beta + start - size + row, mask=row < num_bits, other=0)
    return (bits.to(tl.int32)[:, None] >> tl.arange(0, 8)[None, :]) & 1


@triton.jit
def _first(a, b, CORRECTED: tl.constexpr):
    """Of the first half: f of reference/polar.py."""
    p, q = tl.abs(a), tl.abs(b)
    least = tl.minimum(p, q)
    if CORRECTED:
        together, apart = tl.maximum(16 - p - q, 0), tl.maximum(16 - tl.abs(p - q), 0)
        least = tl.maximum(least + ((together + 3) >> 2) - ((apart + 3) >> 2), 0)
    return tl.where((a < 0) != (b < 0), -least, least)


@triton.jit
def _combined(a, b, bits, what, CORRECTED: tl.constexpr):
    """The ratios of a node; `bits` are those of the first half, for the second one."""
    second = tl.minimum(tl.maximum(b + tl.where(bits != 0, -a, a), -127), 127)
    return tl.where(what == 0, _first(a, b, CORRECTED), second)


@triton.jit
def _decided(ratio, kind, row, size):
    """The bits of a small node that needs no tree."""
    bits = (ratio < 0).to(tl.int32)
    if kind == 2:
        total = ratio  # rows beyond the node add nothing
        for level in tl.static_range(5):
            total = tl.sum(tl.reshape(total, (2, 16 >> level, 8)), axis=0)
            total = tl.minimum(tl.maximum(total, -127), 127)
        bits = tl.broadcast_to((total < 0).to(tl.int32), (32, 8))
    elif kind == 3:
        key = tl.where((row < size)[:, None], tl.abs(ratio) * 32 + row[:, None], 1 << 20)
        least = tl.min(key, axis=0)[None, :]
        odd = tl.sum(bits, axis=0)[None, :] & 1
        bits = bits ^ tl.where(key == least, odd, 0)
    return bits


@triton.jit
def _parity(alpha, beta, n, start, size, LARGE: tl.constexpr):
    """A large node with one frozen bit: where parity is odd the least reliable bit turns."""
    begin = (2 * n - 2 * size) * 8
    least = tl.full((8,), 1 << 30, tl.int32)
    odd = tl.zeros((8,), tl.int32)
    for piece in range(0, size, LARGE):
        row = piece + tl.arange(0, LARGE)[:, None]
        place = row * 8 + tl.arange(0, 8)[None, :]
        ratio = tl.load(alpha + begin + place, mask=row < size, other=0).to(tl.int32)
        key = tl.where(row < size, (tl.abs(ratio) << 20) + row, 1 << 30)
        least = tl.minimum(least, tl.min(key, axis=0))
        odd += tl.sum((ratio < 0).to(tl.int32), axis=0)
    odd = odd & 1
    for piece in range(0, size, LARGE):
        rows = piece + tl.arange(0, LARGE)
        row = rows[:, None]
        place = row * 8 + tl.arange(0, 8)[None, :]
        ratio = tl.load(alpha + begin + place, mask=row < size, other=0).to(tl.int32)
        turned = tl.where((tl.abs(ratio) << 20) + row == least[None, :], odd[None, :], 0)
        _store_bits(beta, start, rows, (ratio < 0).to(tl.int32) ^ turned, size)


@triton.jit
def _combine(beta, what, start, size):
    """The first `size` bits of a node from the second: their sum, the second, or all zeros."""
    num_own, num_other = tl.where(what == 4, size, 0), tl.where(what == 6, 0, size)
    for piece in range(0, size, 512):
        row = piece + tl.arange(0, 512)
        own = tl.load(beta + start + row, mask=row < num_own, other=0)
        other = tl.load(beta + start + size + row, mask=row < num_other, other=0)
        tl.store(beta + start + row, own ^ other, mask=row < size)
