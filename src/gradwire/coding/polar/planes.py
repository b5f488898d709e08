"""Codes of several bit planes that share one rate: which of all their inputs are free."""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.coding.polar.channel import bsc_ratio, bsc_table, distortion_bound
from gradwire.coding.polar.free_sets import shipped
from gradwire.coding.polar.gaussian import gaussian_channel
from gradwire.coding.polar.lanes import Lanes, select, spread
from gradwire.coding.polar.monte_carlo import entropies
from gradwire.core.key import Key

_DRAWS = 1 << 25  # positions drawn for each plane: more do not lower the error
_STEPS = 16  # lengths of shortened blocks for which inputs are compared, per N


@dataclass(frozen=True, eq=False)
class Planes:
    """One polar code for each bit of a label, over the same positions."""

    free: Tensor  # bool [m, N]
    kinds: tuple[Tensor, ...]  # for `kernels.polar_quantise`
    rows: tuple[Tensor, ...]  # the free inputs of each plane

    @property
    def num_rows(self) -> int:
        return sum(len(rows) for rows in self.rows)

    def inputs(self, plane: int, word: Tensor) -> Tensor:
        """The free inputs of a codeword: uint8 [groups, rows, 8] of [groups, N, 8], or narrower."""
        return select(kernels.polar_transform(word), rows_on(self, plane, word.device))

    def word(self, plane: int, inputs: Tensor) -> Tensor:
        """The inverse of `inputs`."""
        rows = rows_on(self, plane, inputs.device)
        return kernels.polar_transform(spread(inputs, rows, self.free.shape[1]))


@lru_cache(maxsize=256)
def rows_on(planes: Planes, plane: int, device: torch.device) -> Tensor:
    """`planes.rows[plane]` on a device, where they stay: a copy from the host waits."""
    return planes.rows[plane].to(device)


def gaussian_planes(rate: float, lanes: Lanes) -> Planes:
    """Planes of `gaussian_channel(rate)`, for blocks as `lanes` has them."""
    return _gaussian_planes(rate, lanes.length, lanes.used)


def sign_plane(rate: float, lanes: Lanes) -> tuple[Planes, float]:
    """The plane of uniform bits, and the share of them that arrive wrong."""
    return _sign_plane(rate, lanes.length, lanes.used)


@lru_cache(maxsize=64)
def _gaussian_planes(rate: float, n: int, used: int) -> Planes:
    return _planes(_chosen(_gaussian_scores(rate, n, _rounded(n, used)), rate, used))


@lru_cache(maxsize=64)
def _sign_plane(rate: float, n: int, used: int) -> tuple[Planes, float]:
    free = shipped(n, round(rate * n)) if used == n else None
    if free is None:
        free = _chosen(_sign_scores(rate, n, _rounded(n, used)), rate, used)
    planes = _planes(free.reshape(1, n))
    # What the code does to random bits is counted, not estimated: so both sides know it.
    groups = max(1, 2**18 // (64 * n))
    words = Key(1).child("polar distortion").words(groups * n * 2)
    source = words.view(torch.uint8).view(groups, n, 8).clone()
    source[:, used:] = 0
    llr = sign_ratios(kernels.unpack_uints(source.reshape(-1), 1, groups * n * 64), rate)
    llr = llr.view(groups, n, 64)
    llr[:, used:] = 127
    found = kernels.polar_quantise(llr, planes.kinds[0])
    wrong = len(kernels.ones_positions((found ^ source).reshape(-1), groups * n * 64))
    return planes, wrong / (groups * used * 64)


def sign_ratios(bits: Tensor, rate: float) -> Tensor:
    """The ratio of each bit through the test channel, int8."""
    ratio = bsc_ratio(distortion_bound(rate))
    return (ratio - 2 * ratio * bits.to(torch.int16)).to(torch.int8)


@lru_cache(maxsize=64)
def _gaussian_scores(rate: float, n: int, used: int) -> Tensor:
    return torch.stack([_scores(n, channel, used) for channel in gaussian_channel(rate).channels])


@lru_cache(maxsize=64)
def _sign_scores(rate: float, n: int, used: int) -> Tensor:
    return _scores(n, bsc_table(distortion_bound(rate)), used).unsqueeze(0)


def _scores(n: int, channel: Tensor, used: int) -> Tensor:
    return entropies(n, channel, max(8, min(256, _DRAWS // (64 * n))), used)


def _rounded(n: int, used: int) -> int:
    step = max(1, n // _STEPS)
    return min(n, -(-used // step) * step)


def _chosen(scores: Tensor, rate: float, used: int) -> Tensor:
    """Of the inputs of all planes (scores int64 [m, N]) the rate * used that are known best."""
    count = max(1, min(round(rate * used), scores.shape[0] * used))
    order = torch.argsort(scores[:, :used].reshape(-1), stable=True)[:count]
    chosen = torch.zeros(scores.shape[0] * used, dtype=torch.bool, device="cpu")
    chosen[order] = True
    free = torch.zeros(scores.shape, dtype=torch.bool, device="cpu")
    free[:, :used] = chosen.view(-1, used)
    return free


def _planes(free: Tensor) -> Planes:
    return Planes(
        free,
        tuple(kernels.polar_kinds(plane) for plane in free),
        tuple(plane.nonzero().reshape(-1) for plane in free),
    )
