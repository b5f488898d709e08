"""Gaussian approximation: every ratio is taken for normal, with a variance of twice its mean.

Chung, Richardson and Urbanke 2001, "Analysis of sum-product decoding of LDPC codes using a Gaussian
approximation"; Trifonov 2012 for polar codes. A step takes the mean m to

    m-  =  phi^-1(1 - (1 - phi(m))^2)        m+  =  2 m,
    phi(m)  =  1 - E tanh(L / 2)  with L ~ N(m, 2m)
            =  e^(-m / 4) / sqrt(4 pi m) * integral of sech(L / 2) e^(-L^2 / 4m) dL.

The papers design for Gaussian noise and fit phi by elementary functions. Here the first mean is the
one whose normal ratio has the capacity of BSC(D), and phi is integrated numerically and tabulated.
"""

import math
from functools import lru_cache

import torch
from torch import Tensor

from gradwire.coding.polar.channel import binary_entropy

_LOG_LEAST, _LOG_MOST, _POINTS = math.log(1e-6), math.log(1e12), 2048
_TINY = 1e-4  # below it 1 - phi(m) = m / 2


def scores(n: int, distortion: float) -> Tensor:
    """Minus the mean ratio of each input, float64 [n]."""
    means = torch.tensor(
        [matched_mean(1 - binary_entropy(distortion))], dtype=torch.float64, device="cpu"
    )
    while means.numel() < n:
        doubled = (2 * means).clamp(max=math.exp(_LOG_MOST))
        means = torch.stack([check(means), doubled], dim=1).flatten()
    return -means


def check(means: Tensor) -> Tensor:
    """m- of each mean."""
    log_means, log_phis = _table()
    inside = means.clamp(min=_TINY)
    log_phi = -_interpolate(log_means, log_phis, inside.log()).exp()
    target = log_phi + torch.log(2 - log_phi.exp())  # 1 - (1 - phi)^2 = phi (2 - phi)
    found = _interpolate(log_phis, log_means, torch.log(-target)).exp()
    return torch.where(means < _TINY, means * means / 2, torch.minimum(found, means))


@lru_cache(maxsize=1)
def _table() -> tuple[Tensor, Tensor]:
    """log m, and log(-log phi(m)), which rises with it."""
    log_means = torch.linspace(_LOG_LEAST, _LOG_MOST, _POINTS, dtype=torch.float64, device="cpu")
    means = log_means.exp()
    reach = (10 * torch.sqrt(2 * means)).clamp(max=80.0)  # beyond, the integrand is nothing
    nodes = torch.linspace(-1, 1, 1001, dtype=torch.float64, device="cpu")
    at = reach[:, None] * nodes
    integrand = torch.exp(-at * at / (4 * means[:, None])) / torch.cosh(at / 2)
    integral = integrand.sum(dim=1) * reach * (nodes[1] - nodes[0])
    log_phi = -means / 4 - 0.5 * torch.log(4 * math.pi * means) + integral.log()
    return log_means, torch.log(-log_phi)


def _interpolate(x: Tensor, y: Tensor, at: Tensor) -> Tensor:
    """The line through the points (x, y) that surround each place; straight on beyond the ends."""
    right = torch.searchsorted(x, at).clamp(1, x.numel() - 1)
    left = right - 1
    share = (at - x[left]) / (x[right] - x[left])
    return y[left] + share * (y[right] - y[left])


def matched_mean(capacity: float) -> float:
    """The m for which a ratio N(m, 2m) carries `capacity` bits about an input."""
    nodes = torch.linspace(-10, 10, 4001, dtype=torch.float64, device="cpu")
    weights = torch.exp(-nodes * nodes / 2)
    weights /= weights.sum()
    low, high = _LOG_LEAST, _LOG_MOST
    for _ in range(60):
        mean = math.exp((low + high) / 2)
        unknown = torch.nn.functional.softplus(-(mean + math.sqrt(2 * mean) * nodes))
        information = 1 - float((weights * unknown).sum()) / math.log(2)
        low, high = ((low + high) / 2, high) if information < capacity else (low, (low + high) / 2)
    return math.exp((low + high) / 2)
