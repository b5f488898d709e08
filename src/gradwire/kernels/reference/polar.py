"""Polar codes on 64 blocks side by side, in torch: the normative version.

Arikan 2009, "Channel polarization: a method for constructing capacity-achieving codes for
symmetric binary-input memoryless channels". With x = u F^(n), F = [1 0; 1 1], and no bit reversal,
the first half of x is the sum of both halves' codewords and the second half is the second one's.

Successive cancellation decides u in order. A node of the tree has log-likelihood ratios alpha of
its n positions (int8, 8 units to a nat, within -127 .. 127) and finds bits beta:

    first half     f(a, b) = sign(a) sign(b) m',   a, b the ratios of its two positions
    second half    g(a, b) = b + a, or b - a where the first half's bit is one
    beta           first xor second, second

f is the minimum m of |a| and |b| as `minsum`; `corrected` adds what is missing to the exact
2 atanh(tanh(a/2) tanh(b/2)), log(1 + e^-(|a| + |b|)) - log(1 + e^-||a| - |b||), each logarithm as
a straight line:   m' = max(0, m + ceil((16 - |a| - |b|)+ / 4) - ceil((16 - ||a| - |b||)+ / 4)).

Nodes that need no tree (Alamdar-Yazdi and Kschischang 2011; Sarkis et al. 2014): all frozen, all
free, one free bit (a repetition code), one frozen bit (a single parity check).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from gradwire.kernels.reference.bits import unpack_uints
from gradwire.kernels.reference.lanes import join_lanes, packed_bits, polar_fill, spread_bits
from gradwire.kernels.reference.tables import cell_products, sum_rows

FROZEN, FREE, REPETITION, PARITY, MIXED = range(5)


def polar_quantise(llr: Tensor, kinds: Tensor, corrected: bool) -> Tensor:
    groups, n, lanes = llr.shape
    f = f_corrected if corrected else f_minsum
    alpha = llr.to(torch.int16).transpose(0, 1).reshape(n, -1)  # [n, groups * lanes]
    bits = cancel(alpha, kinds.tolist(), 1, f)
    return packed_bits(bits.reshape(n, groups, lanes).transpose(0, 1))


def polar_quantise_bits(bits: Tensor, magnitude: int, kinds: Tensor, corrected: bool) -> Tensor:
    llr = (magnitude - 2 * magnitude * spread_bits(bits).to(torch.int16)).to(torch.int8)
    return polar_quantise(llr, kinds, corrected)


def cancel(
    alpha: Tensor, kinds: list[int], at: int, f: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """The bits (bool) of the ratios [n, blocks] under node `at`."""
    n, kind = len(alpha), kinds[at]
    if kind == FROZEN:
        return torch.zeros_like(alpha, dtype=torch.bool)
    if kind == FREE:
        return alpha < 0
    if kind == REPETITION:
        while len(alpha) > 1:
            alpha = _saturated(alpha[len(alpha) // 2 :] + alpha[: len(alpha) // 2])
        return (alpha < 0).expand(n, -1)
    if kind == PARITY:
        bits, sizes = alpha < 0, alpha.abs()
        least = sizes == sizes.amin(dim=0)
        first = least & (least.cumsum(0) == 1)  # where parity is odd the least reliable turns
        return bits ^ (first & (bits.sum(0) % 2 == 1))
    a, b = alpha[: n // 2], alpha[n // 2 :]
    if kinds[2 * at] == FROZEN:
        second = cancel(_saturated(b + a), kinds, 2 * at + 1, f)
        return torch.cat([second, second])
    first = cancel(f(a, b), kinds, 2 * at, f)
    second = cancel(_saturated(b + torch.where(first, -a, a)), kinds, 2 * at + 1, f)
    return torch.cat([first ^ second, second])


def polar_genie(llr: Tensor, cost: Tensor) -> Tensor:
    nodes = llr.to(torch.int16).transpose(0, 1).flatten(1).unsqueeze(0)  # [nodes, size, samples]
    while nodes.shape[1] > 1:
        a, b = nodes.chunk(2, dim=1)
        nodes = torch.stack([f_corrected(a, b), _saturated(a + b)], dim=1).flatten(0, 1)
    return cost.to(torch.int64)[nodes[:, 0].to(torch.int64) + 127].sum(dim=1)


def polar_transform(bits: Tensor) -> Tensor:
    x = bits.clone()
    groups, n, width = x.shape
    h = 1
    while h < n:
        pairs = x.view(groups, n // (2 * h), 2, h * width)
        pairs[:, :, 0] ^= pairs[:, :, 1]
        h *= 2
    return x


def polar_ratios(x: Tensor, factor: float) -> Tensor:
    return (x * factor).clamp(-127, 127).round().to(torch.int8)


def polar_signs(
    x: Tensor,
    factor: float,
    value: float,
    blocks: int,
    n: int,
    lanes: int,
    kinds: Tensor,
    quantise: Callable[[Tensor, Tensor, bool], Tensor] = polar_quantise,
) -> tuple[Tensor, Tensor]:
    llr = polar_fill(polar_ratios(x, factor), blocks, n, lanes, 127)
    word = quantise(llr, kinds, True)
    used = -(-x.numel() // blocks)
    bits = join_lanes(word[:, :used], blocks)[: -(-x.numel() // 8)]
    values = x.new_tensor([-value, value])
    along, _ = cell_products(x, bits, min(used * lanes, x.numel()), values, (2, 1, 0))
    return word, sum_rows(along.view(1, -1))[0]


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
    signs: Callable[..., tuple[Tensor, Tensor]] = polar_signs,
    transform: Callable[[Tensor], Tensor] = polar_transform,
    join: Callable[[Tensor, int], Tensor] = join_lanes,
) -> Tensor:
    word, along = signs(x, factor, value, blocks, n, lanes, kinds)
    out.copy_(join(transform(word).index_select(1, rows.to(word.device)), blocks))
    return along


def polar_lookup(x: Tensor, factor: float, table: Tensor, labels: Tensor) -> Tensor:
    bins = table.shape[1]
    place = (x * factor + bins / 2).clamp(0, bins - 1).to(torch.int64)
    return table.reshape(-1)[labels.to(torch.int64) * bins + place]


def polar_label(labels: Tensor, bits: Tensor, plane: int) -> None:
    labels |= unpack_uints(bits, 1, labels.numel()).to(torch.uint8) << plane


def polar_points(labels: Tensor, points: Tensor) -> Tensor:
    return points[labels.to(torch.int64)]


def f_minsum(a: Tensor, b: Tensor) -> Tensor:
    m = torch.minimum(a.abs(), b.abs())
    return torch.where((a < 0) ^ (b < 0), -m, m)


def f_corrected(a: Tensor, b: Tensor) -> Tensor:
    p, q = a.abs(), b.abs()
    together, apart = (16 - p - q).clamp(min=0), (16 - (p - q).abs()).clamp(min=0)
    m = (torch.minimum(p, q) + (together + 3) // 4 - (apart + 3) // 4).clamp(min=0)
    return torch.where((a < 0) ^ (b < 0), -m, m)


def _saturated(x: Tensor) -> Tensor:
    return x.clamp(-127, 127)
