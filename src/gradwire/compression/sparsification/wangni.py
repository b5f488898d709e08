"""Variance-optimal random sparsification (Wangni et al. 2018, "Gradient sparsification ...").

Element i is kept with probability p_i = min(lambda |g_i|, 1) and sent as g_i / p_i: unbiased, and
of all choices with k elements kept on average the one of least variance, sum_i g_i^2 (1 / p_i - 1).
Since keeping any with probability k/d is a choice too, omega = d/k - 1, for k = density d rounded
to a whole number. How many are kept in fact is random; no bound depends on that.

1/lambda is the s with s (k - j) = sum of the magnitudes below s, where j elements reach s and are
kept for certain. Their greedy algorithm stops after a few rounds of s <- (sum below s) / (k - j).
As s falls from round to round until j does not change, we continue; the few vectors that take more
than some rounds have their k largest elements sorted instead: if the j largest are certain,
s = (sum of the others) / (k - j), and j is the first for which no other one exceeds that.

Everything below s in magnitude goes to zero or to plus or minus s. So as in their coding only the
certain ones carry a value; the others share one number and take a bit each. To draw them takes 16
random bits of each element, and 53 more where those do not decide.

Use it, without `ef(...)`, where a sparsifier must be unbiased, at densities of some ten per cent
and over many workers; it errs less than `randomk` with `unbiased=True`, the more the heavier the
tails. At 1% its variance is many times the squared norm: where feedback is allowed take
`ef(topk(0.01))`.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.compression.sparsification._selection import (
    check_density,
    decode_positions,
    encode_positions,
    in_range,
    num_kept,
    num_positions,
    reaching,
    scatter,
)
from gradwire.core.codec import (
    Codec,
    Guarantee,
    Parts,
    State,
    clamp_to,
    expect,
    expect_scale,
    scale_dtype,
)
from gradwire.core.key import Key
from gradwire.core.spec import Spec

_NUM_CELLS = 1 << 16  # of the unit interval, distinguished by the first random bits of an element
_ROUNDS = 12


@dataclass(frozen=True, repr=False)
class Wangni(Codec):
    """Keep elements at random with probabilities that make the variance least; unbiased."""

    density: float  # fraction kept, on average

    paper = (
        "Wangni et al. 2018, Gradient sparsification for communication-efficient distributed "
        "optimization"
    )
    examples = ("wangni(0.01)", "wangni(0.3)", "wangni(1.0)")

    # Certain elements carry values; drawn ones share the scale 1/lambda and carry a sign.
    parts = ("certain", "drawn", "signs", "scale", "values")

    def __post_init__(self) -> None:
        check_density("wangni", self.density)

    def values_spec(self, spec: Spec, parts: Parts) -> Spec:
        return Spec((num_positions(parts["certain"], "certain", spec.numel),), spec.dtype)

    def guarantee(self, spec: Spec) -> Guarantee:
        numel = max(1, spec.numel)
        return Guarantee(omega=numel / num_kept(self.density, numel) - 1)

    def split(self, x: Tensor, state: State, key: Key) -> tuple[Parts, State]:
        wide = x.to(scale_dtype(x.dtype))
        k = num_kept(self.density, x.numel())
        scale = self.scale(wide)
        certain, values = reaching(wide, float(scale), 2 * k)
        drawn, signs = _draw(wide, float(scale), 2 * k, key)
        parts = {
            "certain": encode_positions(certain, x.numel()),
            "drawn": encode_positions(drawn, x.numel()),
            "signs": kernels.pack_signs(signs),
            "scale": scale.reshape(1),
            "values": values.to(x.dtype),
        }
        return parts, state

    def join(self, parts: Parts, spec: Spec, key: Key) -> Tensor:
        dtype = scale_dtype(spec.dtype)
        scale = expect_scale(parts["scale"], 1, dtype)
        certain = decode_positions(parts["certain"], "certain", spec.numel)
        drawn = decode_positions(parts["drawn"], "drawn", spec.numel)
        expect(parts["signs"], "signs", -(-len(drawn) // 8), torch.uint8)
        signs = kernels.unpack_signs(parts["signs"], len(drawn), dtype)
        x = scatter(parts["values"], certain, spec)
        return x.scatter_(0, drawn, clamp_to(signs * scale, spec.dtype))

    def scale(self, x: Tensor) -> Tensor:
        """s: what reaches it is kept for certain. It is rounded to what travels."""
        k = num_kept(self.density, x.numel())
        if k == x.numel():
            return x.new_zeros(())
        scaled, unit = in_range(x)
        threshold, certain = math.inf, 0
        for _ in range(_ROUNDS):
            tails = kernels.tails(scaled, threshold)
            reach = tails.num_above + tails.num_below
            if reach >= k or (reach == certain and threshold < math.inf):
                break  # if k reach it there is nothing else
            threshold, certain = tails.inner / (k - reach), reach
        else:
            threshold = _sorted_scale(scaled, k)
        return clamp_to(torch.tensor(threshold * unit, dtype=torch.float64), x.dtype).to(x.device)


def _sorted_scale(x: Tensor, k: int) -> float:
    indices, top = kernels.select_largest(x, None, k)
    rest = kernels.tails(x.index_fill(0, indices, 0), 0.0).outer
    top = top.abs().double().sort(descending=True).values
    # tail[j]: the sum of all but the j largest. Summed from the small end, so no digits
    # cancel where few large elements outweigh the others.
    tail = rest + top.flip(0).cumsum(0).flip(0)
    share = torch.arange(k, 0, -1, dtype=torch.float64, device=x.device)  # k - j
    fits = share * top <= tail
    fits[-1] = True  # by definition; rounding may deny it
    j = fits.to(torch.uint8).argmax()  # the first that fits
    return float(tail[j] / share[j])


def _draw(x: Tensor, scale: float, capacity: int, key: Key) -> tuple[Tensor, Tensor]:
    """Positions of elements below the scale, each with probability |x| / scale, and their values.

    The scale is the one that travels, so that rounding it makes no bias.
    """
    if not scale:  # everything is certain
        return torch.zeros(0, dtype=torch.int64, device=x.device), x[:0]
    factor = _NUM_CELLS / scale  # of the range of float32, but at the ends of that of scales
    if factor > torch.finfo(torch.float32).max or factor < torch.finfo(torch.float32).tiny:
        indices = (x != 0).nonzero().reshape(-1)
        values, halves = x[indices], key.halfwords(x.numel(), x.device)[indices]
    else:
        indices, values, halves = kernels.draw_candidates(x, factor, key.seed, key.stream, capacity)
    exact = values.abs().double() / scale * _NUM_CELLS
    below = values.abs() < scale
    kept = below & (halves + 1 < exact)
    close = (below & (halves + 1 >= exact) & (halves < exact)).nonzero().reshape(-1)
    rest = key.child("close").uniform64(len(close), x.device)
    kept[close] = halves[close] + rest < exact[close]
    return indices[kept], values[kept]
