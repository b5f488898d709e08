"""Variance-optimal random sparsification (Wangni et al. 2018, "Gradient sparsification ...").

Element i is kept with probability p_i = min(lambda |g_i|, 1) and sent as g_i / p_i: unbiased, and
of all choices with k elements kept on average the one of least variance, sum_i g_i^2 (1 / p_i - 1)
(their sec. 3; at most the d/k - 1 of keeping any with probability k/d). Their Algorithm 3 finds
lambda by a few rounds of rescaling; here it is exact: with the j largest certain to be kept,
lambda_j = (k - j) / (sum of the other magnitudes), and j is the first for which no probability of
the others exceeds one. That is some j < k, so the k largest are all that is sorted.

Everything below 1/lambda in magnitude goes to zero or to plus or minus 1/lambda. So as in their
coding only the certain ones carry a value; the others share one number and take a bit each.
The number kept is random, hence no guarantee is stated, although the variance has its bound.

Use it, without `ef(...)`, where a sparsifier must be unbiased, at densities of some ten per cent
and over many workers; it errs less than `randomk` with `unbiased=True`, the more the heavier the
tails. At 1% its variance is many times the squared norm: where feedback is allowed take
`ef(topk(0.01))`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.compression.quantization._buckets import clamp_to
from gradwire.compression.sparsification._selection import (
    check_density,
    decode_positions,
    encode_positions,
    num_kept,
    num_positions,
    scatter,
)
from gradwire.core.codec import Codec, Parts, State, expect, expect_scale, scale_dtype
from gradwire.core.key import Key
from gradwire.core.spec import Spec


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

    def split(self, x: Tensor, state: State, key: Key) -> tuple[Parts, State]:
        magnitude = x.to(scale_dtype(x.dtype)).abs()
        scale = self.scale(magnitude)
        certain = (magnitude >= scale) & (magnitude > 0)
        # 53 random bits: small probabilities are what this is about. The scale is the one that
        # travels, rounded, so that rounding it makes no bias.
        drawn = key.uniform64(x.numel(), x.device) * scale.double() < magnitude.double()
        drawn &= ~certain
        certain_at, drawn_at = (mask.nonzero().reshape(-1) for mask in (certain, drawn))
        parts = {
            "certain": encode_positions(certain_at, x.numel()),
            "drawn": encode_positions(drawn_at, x.numel()),
            "signs": kernels.pack_signs(x[drawn_at]),
            "scale": scale.reshape(1),
            "values": x[certain_at],
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

    def scale(self, magnitude: Tensor) -> Tensor:
        """1/lambda: what is larger is kept for certain."""
        k = num_kept(self.density, magnitude.numel())
        if not k:
            return magnitude.new_zeros(())
        top, where = torch.topk(magnitude, k)  # descending
        rest = magnitude.scatter(0, where, 0.0).sum(dtype=torch.float64)
        top = top.double()
        # tail[j]: the sum of all but the j largest. Summed from the small end, so no digits
        # cancel where few large elements outweigh the others.
        tail = rest + top.flip(0).cumsum(0).flip(0)
        share = torch.arange(k, 0, -1, dtype=torch.float64, device=magnitude.device)  # k - j
        fits = share * top <= tail
        fits[-1] = True  # by definition; rounding may deny it
        j = fits.to(torch.uint8).argmax()  # the first that fits
        return clamp_to(tail[j] / share[j], magnitude.dtype)
