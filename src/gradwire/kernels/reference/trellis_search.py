"""The search for the best indices of a trellis-coded quantiser (`trellis.py` has the quantisers).

It is Viterbi's, over blocks of 1024 elements that begin and end in state 0 (the last one ends
anywhere), so that a segment may begin with any of them. It minimises the sum of squared errors and
rates of the indices. Of each quantiser it looks at 0 and the three indices around the number; of
equal costs the lower index is taken.
"""

import torch
from torch import Tensor

from gradwire.kernels.reference.trellis import BLOCK, STEEPEST, UNIT

_INFINITE_COST = 1 << 28  # above every sum of costs in a block
_LARGEST_ERROR = 16383  # whose square fits


def trellis_search(
    scaled: Tensor, contexts: Tensor, rates: Tensor, offsets: Tensor, signed: bool = False
) -> Tensor:
    count = scaled.numel()
    whole = count // BLOCK * BLOCK
    pieces = [
        _search(
            scaled[first:last].view(-1, steps),
            contexts[first:last].view(-1, steps) >> 1,
            rates,
            offsets,
            last == count,
            signed,
        )
        for first, last, steps in ((0, whole, BLOCK), (whole, count, count - whole))
        if last > first
    ]
    return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.int32, device="cpu")


def _search(
    scaled: Tensor, classes: Tensor, rates: Tensor, offsets: Tensor, last: bool, signed: bool
) -> Tensor:
    """Blocks [b, steps]; `last`: the last of them ends in any state."""
    blocks, steps = scaled.shape
    target = torch.arange(8, device="cpu")
    quantiser, parity = target >> 2, target >> 1 & 1
    before = quantiser | ((target & 1) ^ quantiser) << 1  # and that with bit 2 set
    own = rates.to(torch.int64)[:, classes.T.long()]  # [8, steps, b]
    found = [
        _cheapest(scaled.T, q, own[4 * q : 4 * q + 4], offsets[3 * q :], signed and q == 1)
        for q in (0, 1)
    ]
    branches, chosen = (torch.stack(of, dim=2) for of in zip(*found))  # [steps, b, quantiser, z]
    same, other = branches[:, :, quantiser, parity], branches[:, :, quantiser, 1 - parity]
    costs = torch.full((blocks, 8), _INFINITE_COST, dtype=torch.int64, device="cpu")
    costs[:, 0] = 0
    came = torch.empty(steps, blocks, 8, dtype=torch.int64, device="cpu")
    for i in range(steps):
        a, b = costs[:, before] + same[i], costs[:, before | 4] + other[i]
        came[i] = b < a
        costs = torch.minimum(a, b)
        costs -= costs.amin(dim=1, keepdim=True)
    state = torch.zeros(blocks, dtype=torch.int64, device="cpu")
    if last:
        state[-1] = costs[-1].argmin()
    indices = torch.empty(blocks, steps, dtype=torch.int32, device="cpu")
    row = torch.arange(blocks, device="cpu")
    for i in reversed(range(steps)):
        second = came[i][row, state]
        z = parity[state] ^ second
        indices[:, i] = chosen[i][row, quantiser[state], z].to(torch.int32)
        state = before[state] | second << 2
    return torch.where(scaled < 0, -indices, indices).reshape(-1)


def _cheapest(
    scaled: Tensor, q: int, rate: Tensor, offsets: Tensor, signed: bool
) -> tuple[Tensor, Tensor]:
    """The least cost and the index that has it, with a last dimension of 2: even, odd."""
    u = scaled.abs().to(torch.int64)
    floor = (u + UNIT * q) >> 7
    zero, never = torch.zeros_like(u), torch.full_like(u, _INFINITE_COST)
    best = [u.clamp(max=_LARGEST_ERROR).square() + rate[0], never]
    index = [zero, zero]
    for k in (floor - 1, floor, floor + 1):
        # With signs, the index below 1 is -1: see above.
        own = torch.where(k == 0, -1, k) if signed else k
        first = torch.where(k == 0, -offsets[0], offsets[0])
        offset = torch.where(k <= 1, first, torch.where(k == 2, offsets[1], offsets[2]))
        slope = rate[3] * (k.clamp(max=STEEPEST) - 2)
        cost = (u - (2 * UNIT * k - UNIT * q - offset)).square()
        cost += torch.where(k <= 1, rate[1], rate[2] + slope)
        parity = k & 1 ^ (signed & (scaled < 0))
        for z in (0, 1):
            better = (parity == z) & (k >= 1 - signed) & (cost < best[z])
            best[z] = torch.where(better, cost, best[z])
            index[z] = torch.where(better, own, index[z])
    return torch.stack(best, dim=-1), torch.stack(index, dim=-1)
