"""One element of each of k equal strata of a vector.

Stratum i is floor(i * numel / k) .. floor((i + 1) * numel / k) - 1, and its element the one at
floor(w_i * size / 2^32), where w_i is word i of a Philox stream.
"""

import torch
from torch import Tensor

from gradwire.kernels.reference.philox import philox_words


def strata_positions(
    numel: int, count: int, seed: int, stream: tuple[int, int, int], device: torch.device
) -> Tensor:
    edges = torch.arange(count + 1, dtype=torch.int64, device=device) * numel // max(1, count)
    words = philox_words(seed, stream, count, device).to(torch.int64) & 0xFFFFFFFF
    return edges[:-1] + (words * edges.diff() >> 32)


def strata_values(
    x: Tensor, count: int, seed: int, stream: tuple[int, int, int], scaled: bool
) -> Tensor:
    values = x[strata_positions(x.numel(), count, seed, stream, x.device)]
    if not scaled:
        return values
    edges = torch.arange(count + 1, dtype=torch.int64, device=x.device) * x.numel() // max(1, count)
    return values * edges.diff().to(x.dtype)
