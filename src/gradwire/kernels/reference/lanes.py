"""Blocks in rows to 64 blocks side by side and back, in torch: the normative version."""

import torch
from torch import Tensor

LANES = 64


def bits_to_lanes(bits: Tensor) -> Tensor:
    if bool((bits > 1).any()):
        raise ValueError("bits_to_lanes takes zeros and ones")
    blocks, n = bits.shape
    groups = -(-blocks // LANES)
    padded = bits.new_zeros(groups * LANES, n)
    padded[:blocks] = bits
    return packed_bits(padded.view(groups, LANES, n).transpose(1, 2))


def bits_from_lanes(lanes: Tensor, blocks: int) -> Tensor:
    groups, n, _ = lanes.shape
    return spread_bits(lanes).transpose(1, 2).reshape(groups * LANES, n)[:blocks].contiguous()


def rows_to_lanes(rows: Tensor, n: int) -> Tensor:
    return bits_to_lanes(spread_bits(rows)[:, :n])


def rows_from_lanes(lanes: Tensor, blocks: int) -> Tensor:
    bits = bits_from_lanes(lanes, blocks)
    padded = bits.new_zeros(blocks, -(-bits.shape[1] // 8) * 8)
    padded[:, : bits.shape[1]] = bits
    return packed_bits(padded)


def ratios_to_lanes(ratios: Tensor, units: int) -> Tensor:
    if not bool(torch.isfinite(ratios).all()):
        raise ValueError("ratios_to_lanes takes finite ratios, got inf or NaN")
    blocks, n = ratios.shape
    groups = -(-blocks // LANES)
    padded = torch.zeros(groups * LANES, n, dtype=torch.int8, device=ratios.device)
    padded[:blocks] = (ratios * units).clamp(-127, 127).round().to(torch.int8)
    return padded.view(groups, LANES, n).transpose(1, 2).contiguous()


def polar_fill(ratios: Tensor, blocks: int, n: int, lanes: int, certain: int) -> Tensor:
    groups, count = -(-blocks // lanes), ratios.numel()
    used, last = -(-count // blocks), blocks - (groups - 1) * lanes
    cut = (groups - 1) * used * lanes
    out = ratios.new_zeros(groups, n, lanes)
    out[:, used:] = certain
    out[:-1, :used] = ratios[:cut].view(groups - 1, used, lanes)
    tail = ratios.new_zeros(used * last)
    tail[: count - cut] = ratios[cut:]
    out[-1, :used, :last] = tail.view(used, last)
    return out


def join_lanes(rows: Tensor, blocks: int) -> Tensor:
    groups, count, width = rows.shape
    last = blocks - (groups - 1) * 8 * width
    tail = spread_bits(rows[-1]).view(count, 8 * width)[:, :last].reshape(-1)
    return torch.cat([rows[:-1].reshape(-1), packed_bits(_whole_bytes(tail))])


def cut_lanes(packed: Tensor, blocks: int, rows: int, lanes: int) -> Tensor:
    groups = -(-blocks // lanes)
    last = blocks - (groups - 1) * lanes
    split = (groups - 1) * rows * (lanes // 8)
    bits = packed.new_zeros(rows, lanes)
    bits[:, :last] = spread_bits(packed[split:])[: rows * last].view(rows, last)
    full = packed[:split].view(groups - 1, rows, lanes // 8)
    return torch.cat([full, packed_bits(bits).unsqueeze(0)])


def _whole_bytes(bits: Tensor) -> Tensor:
    return torch.cat([bits, bits.new_zeros(-bits.numel() % 8)])


def packed_bits(bits: Tensor) -> Tensor:
    """[..., 8k] of zeros and ones as uint8 [..., k], the first the least significant."""
    places = 1 << torch.arange(8, dtype=torch.uint8, device=bits.device)
    return (bits.unflatten(-1, (-1, 8)) * places).sum(dim=-1, dtype=torch.uint8)


def spread_bits(packed: Tensor) -> Tensor:
    """The inverse of `packed_bits`, uint8."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return (packed.unsqueeze(-1) >> shifts & 1).flatten(-2)
