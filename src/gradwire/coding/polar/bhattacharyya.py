"""Bhattacharyya parameters of the inputs, as if every channel were an erasure channel.

Arikan 2009, Section VI: with Z = 2 sqrt(D (1 - D)) of BSC(D), each step takes

    Z-  =  2 Z - Z^2    (an upper bound, met by erasure channels)        Z+  =  Z^2

for the first and the second half of the inputs. Cheap, and too pessimistic of the first half.
"""

import math

import torch
from torch import Tensor


def scores(n: int, distortion: float) -> Tensor:
    """log(Z / (1 - Z)) of each input's bound, float64 [n]: near 0 and 1 Z runs out of digits."""
    z = 2 * math.sqrt(distortion * (1 - distortion))
    known = torch.tensor([math.log(z) if z > 0 else -math.inf], dtype=torch.float64, device="cpu")
    unknown = torch.tensor(
        [math.log1p(-z) if z < 1 else -math.inf], dtype=torch.float64, device="cpu"
    )
    while known.numel() < n:
        # log(2Z - Z^2) = log Z + log(2 - Z), log(1 - Z^2) = log(1 - Z) + log(1 + Z)
        worse = known + torch.log1p(unknown.exp()), 2 * unknown
        better = 2 * known, unknown + torch.log1p(known.exp())
        known = torch.stack([worse[0], better[0]], dim=1).flatten()
        unknown = torch.stack([worse[1], better[1]], dim=1).flatten()
    return known - unknown
