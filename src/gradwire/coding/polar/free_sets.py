"""Free positions that come with the package, for the lengths and rates in common use.

`free_sets.npz`, written by experiments/make_free_sets.py: for each length N and rate R of the grid,
in this order, N bits, one where an input is free, each code's padded to whole bytes (there is no
padding: lengths are multiples of 64). They are Monte-Carlo constructions from more draws than one
would wait for. Both ends of a wire must hold the same file, so its hash is checked: a
change of the sets is a change of VERSION and _SHA256 here.
"""

import hashlib
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gradwire import kernels

VERSION = 1
_SHA256 = "05e0f5cc790314aaf2fa4189ef6993cf780389c823ae8f77c61076c6695df40c"
LENGTHS = tuple(1 << m for m in range(6, 16))  # 64 .. 32768
RATES = (0.1, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.75, 0.8, 0.9)
FILE = Path(__file__).with_suffix(".npz")


def grid() -> list[tuple[int, int]]:
    """(N, K) of each code in the file, in order."""
    return [(n, round(rate * n)) for n in LENGTHS for rate in RATES]


def shipped(n: int, k: int) -> Tensor | None:
    """The free positions of a code of the grid, bool [n], or None."""
    place = _places().get((n, k))
    if place is None:
        return None
    packed = _load()[place : place + n // 8].clone()
    free = kernels.unpack_uints(packed, 1, n).to(torch.bool)
    assert int(free.sum()) == k
    return free


@lru_cache(maxsize=1)
def _places() -> dict[tuple[int, int], int]:
    places, at = {}, 0
    for n, k in grid():
        places[n, k] = at
        at += n // 8
    return places


@lru_cache(maxsize=1)
def _load() -> Tensor:
    with np.load(FILE, allow_pickle=False) as arrays:
        version, free = int(arrays["version"]), arrays["free"]
    expected = sum(n // 8 for n, _ in grid())
    if (
        version != VERSION
        or free.dtype != np.uint8
        or free.shape != (expected,)
        or digest(free) != _SHA256
    ):
        raise RuntimeError(
            f"{FILE.name} is not version {VERSION} of the free sets (it says {version}, "
            f"{free.dtype} {list(free.shape)}, sha256 {digest(free)}); reinstall gradwire"
        )
    return torch.from_numpy(free)


def digest(free: np.ndarray) -> str:
    return hashlib.sha256(free.tobytes()).hexdigest()
