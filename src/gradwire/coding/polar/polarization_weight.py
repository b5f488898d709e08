"""The polarization weight: one order of the inputs for every channel.

He et al. 2017, "Beta-expansion: a theoretical framework for fast and recursive construction of
polar codes": input i with binary digits b_j has the weight sum over j of b_j beta^j, with
beta = 2^(1/4), as in 3GPP's discussion of the 5G code. It keeps the partial order that
holds for all channels (Schuerch 2016) and needs no channel at all.
"""

import torch
from torch import Tensor

_BETA = 2.0**0.25


def scores(n: int, distortion: float = 0.0) -> Tensor:
    """Minus the weight of each input, float64 [n]."""
    digits = torch.arange(n.bit_length() - 1, device="cpu")
    ones = (torch.arange(n, device="cpu")[:, None] >> digits & 1).to(torch.float64)  # [n, log2 n]
    return -(ones * _BETA ** digits.to(torch.float64)).sum(dim=1)
