"""A lossy compressor of bits: it sends K bits for a block of N, from which N bits are decoded.

Korada and Urbanke 2010, "Polar codes are optimal for lossy source coding". The sender looks for a
codeword x = u F^(n) near the source word by successive cancellation and sends the free inputs of u;
the receiver computes x. With ratios instead of bits (`compress_llr`) it looks for the
codeword that is likeliest under them, so that uncertain positions give way.

    compressor = PolarCompressor(1024, 512)
    packed = compressor.compress(bits)            # [blocks, 1024] to [blocks, 64] bytes
    decoded = compressor.decompress(packed)       # differs from bits in about 12.5 % of them

Where we differ: decisions are `hard` by default (the more likely value, not a draw), which is
better at every length tried, and the default f is a piecewise linear one on integers, so that all
machines find the same codeword (kernels/reference/polar.py).
"""

from dataclasses import dataclass
from functools import lru_cache
from numbers import Integral
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from gradwire import kernels
from gradwire.coding.polar import search
from gradwire.coding.polar.channel import (
    CERTAIN,
    UNITS,
    bsc_ratio,
    bsc_ratio_nats,
    distortion_bound,
)
from gradwire.coding.polar.construction import CONSTRUCTIONS, Construction, free_positions
from gradwire.coding.polar.lanes import select, spread
from gradwire.core.key import Key

_MIN_LENGTH, _MAX_LENGTH = 64, 1 << 19
_MAX_LIST_SIZE = 32
_MAX_NATS = CERTAIN / UNITS


@dataclass(frozen=True)
class PolarCompressor:
    """Blocks of N bits as K: see the module.

    `f` is how two ratios combine (`exact` in floating point); `list_size` how many
    partial codewords are kept; `frozen` the seed of shared random frozen bits, or None for zeros.
    """

    N: int
    K: int
    construction: Construction = "monte_carlo"
    decision: Literal["hard", "randomized"] = "hard"
    f: Literal["corrected", "minsum", "exact"] = "corrected"
    list_size: int = 1
    frozen: int | None = None

    def __post_init__(self) -> None:
        for name, value in (("N", self.N), ("K", self.K), ("list_size", self.list_size)):
            _check_whole(name, value)
        if self.frozen is not None:
            _check_whole("frozen", self.frozen, "None or a seed, a whole number")
        if not _MIN_LENGTH <= self.N <= _MAX_LENGTH or self.N & (self.N - 1):
            raise ValueError(f"N must be a power of two in {_MIN_LENGTH} .. 2^19, got {self.N}")
        if not 0 <= self.K <= self.N:
            raise ValueError(f"K must lie in 0 .. N = {self.N}, got {self.K}")
        _one_of("construction", self.construction, tuple(CONSTRUCTIONS))
        _one_of("decision", self.decision, ("hard", "randomized"))
        _one_of("f", self.f, ("corrected", "minsum", "exact"))
        if not 1 <= self.list_size <= _MAX_LIST_SIZE:
            raise ValueError(f"list_size must lie in 1 .. {_MAX_LIST_SIZE}, got {self.list_size}")
        if self.list_size > 1 and self.decision == "randomized":
            raise ValueError(
                "a list keeps the likeliest codewords, so list_size > 1 needs decision='hard'"
            )
        if self.frozen is not None and not 0 <= self.frozen < 2**64:
            raise ValueError(f"frozen must be None or a seed in 0 .. 2^64 - 1, got {self.frozen}")

    @property
    def rate(self) -> float:
        """Bits sent per bit."""
        return self.K / self.N

    @property
    def bytes_per_block(self) -> int:
        return -(-self.K // 8)

    def compress(self, bits: Tensor, key: Key | None = None) -> Tensor:
        """Bits, bool or uint8 [blocks, N], as uint8 [blocks, ceil(K / 8)].

        `key` is what randomized decisions are drawn from.
        """
        _check_tensor("compress", bits)
        if bits.dtype not in (torch.bool, torch.uint8):
            raise ValueError(f"compress takes bits as bool or uint8, got {bits.dtype}")
        self._check_shape("compress", bits, self.N)
        lanes = kernels.bits_to_lanes(bits)
        code = _code(self.N, self.K, self.construction, self.frozen)
        if code.coset is not None:
            lanes = lanes ^ code.coset.to(lanes.device)
        if self._in_integers:
            magnitude = bsc_ratio(distortion_bound(self.rate))
            lanes = lanes[..., : kernels.polar_width(len(bits)) // 8]
            found = kernels.polar_quantise_bits(
                lanes, magnitude, code.kinds.to(lanes.device), self.f == "corrected"
            )
            return self._pack(found, code, len(bits))
        signs = 1 - 2 * kernels.bits_from_lanes(lanes, len(bits)).to(torch.float32)
        return self._search(signs * bsc_ratio_nats(distortion_bound(self.rate)), code, key)

    def compress_llr(self, llr: Tensor, key: Key | None = None) -> Tensor:
        """As `compress`, of log-likelihood ratios in nats, float [blocks, N], positive for zero.

        Magnitudes count up to 127/8 nats; infinite ones are certain. They weight the positions; the
        sender should choose a scale that fits the rate: for +-a, log((1 - D) / D) with 1 - h2(D) =
        K / N.
        """
        _check_tensor("compress_llr", llr)
        if not llr.dtype.is_floating_point:
            raise ValueError(f"compress_llr takes floating-point ratios, got {llr.dtype}")
        self._check_shape("compress_llr", llr, self.N)
        code = _code(self.N, self.K, self.construction, self.frozen)
        if bool(llr.isnan().any()):
            raise ValueError("compress_llr takes numbers and infinities, got NaN")
        llr = llr.clamp(-_MAX_NATS, _MAX_NATS).to(torch.float32)
        if code.coset is not None:
            word = kernels.bits_from_lanes(code.coset, 1).to(llr.device)
            llr = torch.where(word.to(torch.bool), -llr, llr)
        if not self._in_integers:
            return self._search(llr, code, key)
        lanes = kernels.ratios_to_lanes(llr, UNITS)[..., : kernels.polar_width(len(llr))]
        found = kernels.polar_quantise(lanes, code.kinds.to(llr.device), self.f == "corrected")
        return self._pack(found, code, len(llr))

    def decompress(self, packed: Tensor) -> Tensor:
        """The decoded bits, uint8 [blocks, N]; padding bits are ignored."""
        return kernels.bits_from_lanes(self._codewords(packed), len(packed))

    def decompress_packed(self, packed: Tensor) -> Tensor:
        """As `decompress`, eight bits to the byte, uint8 [blocks, N / 8]."""
        return kernels.rows_from_lanes(self._codewords(packed), len(packed))

    def _codewords(self, packed: Tensor) -> Tensor:
        _check_tensor("decompress", packed)
        if packed.dtype != torch.uint8:
            raise ValueError(f"decompress takes packed bits as uint8, got {packed.dtype}")
        self._check_shape("decompress", packed, self.bytes_per_block)
        code = _code(self.N, self.K, self.construction, self.frozen)
        sent = kernels.rows_to_lanes(packed, self.K)
        words = kernels.polar_transform(spread(sent, code.positions, self.N))
        return words if code.coset is None else words ^ code.coset.to(words.device)

    @property
    def _in_integers(self) -> bool:
        return self.decision == "hard" and self.f != "exact" and self.list_size == 1

    def _search(self, llr: Tensor, code: "_Code", key: Key | None) -> Tensor:
        found = search.quantise(
            llr,
            code.free,
            f=self.f,
            randomized=self.decision == "randomized",
            list_size=self.list_size,
            key=key or Key(0).child("polar decisions"),
        )
        return self._pack(kernels.bits_to_lanes(found), code, len(llr))

    def _pack(self, words: Tensor, code: "_Code", blocks: int) -> Tensor:
        """The free inputs of codewords [groups, N, 8], or narrower."""
        inputs = select(kernels.polar_transform(words), code.positions)
        wide = F.pad(inputs, (0, kernels.POLAR_LANES // 8 - inputs.shape[2]))
        return kernels.rows_from_lanes(wide, blocks)

    def _check_shape(self, operation: str, x: Tensor, width: int) -> None:
        if x.dim() != 2 or x.shape[1] != width:
            raise ValueError(
                f"{operation} takes [blocks, {width}] at N = {self.N}, K = {self.K}, got "
                f"{list(x.shape)}"
            )


@dataclass(frozen=True)
class _Code:
    """What follows from (N, K, construction, frozen)."""

    free: Tensor  # bool [N]
    positions: Tensor  # int64 [K]
    kinds: Tensor
    coset: Tensor | None  # u_F F^(n) of the frozen bits, in all 64 lanes: uint8 [1, N, 8]


@lru_cache(maxsize=64)
def _code(n: int, k: int, construction: str, seed: int | None) -> _Code:
    free = free_positions(n, k, construction)
    coset = None
    if seed is not None:
        drawn = Key(seed).child("polar frozen bits").words(n) < 0
        inputs = -(drawn & ~free).to(torch.uint8)
        coset = kernels.polar_transform(inputs.view(1, n, 1).expand(1, n, 8).contiguous())
    return _Code(free, free.nonzero().flatten(), kernels.polar_kinds(free), coset)


def _check_tensor(operation: str, x: object) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{operation} takes a tensor, [blocks, width], got {type(x).__name__}")


def _check_whole(name: str, value: object, expected: str = "a whole number") -> None:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ValueError(f"{name} must be {expected}, got {value!r}")


def _one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
