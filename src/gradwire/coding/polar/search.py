"""Searches for a codeword that the kernels do not make: drawn decisions, an exact f, and lists.

Three slower variants of `kernels.polar_quantise`, in torch, all blocks at once; lists on integers
also in C (`kernels.polar_list`), with the same bits and about nine times as fast:

`randomized`: input i is 0 with probability L / (1 + L), L the likelihood ratio that successive
cancellation sees of it (Korada and Urbanke 2010, as their proof needs it). Under a node whose
inputs are all free the codeword's bits are drawn instead, each from its own ratio, which has the
same distribution. The published algorithm takes the exact f; integers overstate small
ratios, so that with them drawn decisions come closer to hard ones.

`f="exact"`: f(a, b) = 2 atanh(tanh(a / 2) tanh(b / 2)) in float32, written as
sign(a) sign(b) (min(|a|, |b|) + log(1 + e^-(|a| + |b|)) - log(1 + e^-||a| - |b||)).

`list_size` > 1: successive cancellation list (Tal and Vardy 2015). Each path carries a metric, the
sum of log(1 + e^-(1 - 2u) L) over its inputs (Balatsoukas-Stimming, Bastani Parizi and Burg 2015),
which is minus the log-probability of its inputs; where paths fork the L best stay, and of the last
ones the codeword nearest to the source is taken. Nodes that need no tree are searched at once as in
Hashemi, Condo and Gross 2016: the metric of a frozen node is the sum over its positions, a
repetition has two words, and of words that are all free, or have even parity, only those that turn
some of the least reliable bits can be among the L best (`_patterns`).

`corrected` and `minsum` are integers as in the kernels, eight units to a nat, so that all
machines agree; their metrics count 128 units to a nat.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.coding.polar.channel import CERTAIN, UNITS, to_units
from gradwire.core.key import Key

_METRIC_UNITS = 16  # units of a metric to one of a ratio
_ALL_PATTERNS_SIZE = 1 << 10  # a node of this size has every pattern
_CHUNK_RATIOS = 1 << 22  # ratios searched at a time, over all paths


def quantise(
    llr: Tensor, free: Tensor, f: str, randomized: bool, list_size: int, key: Key
) -> Tensor:
    """Codewords for ratios in nats, float [blocks, n], as uint8 [blocks, n]; frozen bits are 0."""
    in_c = list_size in (2, 4, 8, 16, 32) and f != "exact" and kernels.backend() == "native"
    if in_c:  # copied there and back from other devices: it is still faster
        return _in_c(llr.cpu(), free.cpu(), f, list_size).to(llr.device)
    return in_torch(llr, free, f, randomized, list_size, key)


def in_torch(
    llr: Tensor, free: Tensor, f: str, randomized: bool, list_size: int, key: Key
) -> Tensor:
    """`quantise`, and what it must find."""
    kinds = kernels.polar_kinds(free).tolist()
    at_once = max(1, _CHUNK_RATIOS // (llr.shape[1] * list_size))
    pieces = [
        _CodewordSearch(kinds, f, randomized, list_size, key.child(i)).run(part)
        for i, part in enumerate(llr.split(at_once))
    ]
    return torch.cat(pieces) if pieces else torch.empty_like(llr, dtype=torch.uint8)


def _in_c(llr: Tensor, free: Tensor, f: str, list_size: int) -> Tensor:
    tables = (
        _bitsets(_patterns(list_size, _ALL_PATTERNS_SIZE, parity)) for parity in (False, True)
    )
    found = kernels.polar_list(
        kernels.ratios_to_lanes(llr.to(torch.float32), UNITS),
        kernels.polar_kinds(free),
        f == "corrected",
        list_size,
        _softplus()[CERTAIN:].to(torch.uint8),
        *tables,
    )
    return kernels.bits_from_lanes(found, len(llr))


Paths = tuple[Tensor, Tensor, Tensor | None]
"""Bits [n, blocks * paths] under a node, the paths' metrics [blocks, paths], and which column each
path was in before the node [blocks * paths], None if none has moved."""


@dataclass(frozen=True)
class _CodewordSearch:
    kinds: list[int]  # of nodes: a heap, as `kernels.polar_kinds` makes it
    f: str
    randomized: bool
    list_size: int
    key: Key

    def run(self, llr: Tensor) -> Tensor:
        exact = self.f == "exact"
        alpha = (llr.to(torch.float32) if exact else to_units(llr).to(torch.int16)).t().contiguous()
        metric = torch.zeros(
            len(llr), 1, dtype=torch.float32 if exact else torch.int32, device=llr.device
        )
        bits, metric, _ = self._node(alpha, metric, 1)
        if self.list_size == 1:
            return bits.t().contiguous().view(torch.uint8)
        words = bits.view(len(alpha), *metric.shape)  # [n, blocks, paths]
        wrong = torch.where(words ^ (alpha < 0).unsqueeze(2), alpha.abs().unsqueeze(2), 0)
        best = wrong.sum(dim=0, dtype=None if exact else torch.int64).argmin(dim=1)
        chosen = words.gather(2, best[None, :, None].expand(len(alpha), -1, 1))[..., 0]
        return chosen.t().contiguous().view(torch.uint8)

    def _node(self, alpha: Tensor, metric: Tensor, at: int) -> Paths:
        n, kind = len(alpha), self.kinds[at]
        if kind == kernels.POLAR_FROZEN:
            zeros = torch.zeros_like(alpha, dtype=torch.bool)
            return zeros, self._added(metric, self._penalty(alpha)), None
        if kind == kernels.POLAR_REPETITION:
            return self._repeated(alpha, metric, at)
        if kind == kernels.POLAR_FREE and (self.list_size == 1):
            return self._decided(alpha, at), metric, None
        if kind == kernels.POLAR_PARITY and self.list_size == 1 and not self.randomized:
            bits, sizes = alpha < 0, alpha.abs()
            first = torch.zeros_like(bits).scatter_(0, _first_least(sizes), True)
            return bits ^ (first & (bits.sum(0) % 2 == 1)), metric, None
        if self.list_size > 1 and kind in (kernels.POLAR_FREE, kernels.POLAR_PARITY):
            return self._turned(alpha, metric, kind == kernels.POLAR_PARITY)
        first, metric, moved = self._node(self._f(alpha), metric, 2 * at)
        alpha = _moved(alpha, moved)
        a, b = alpha[: n // 2], alpha[n // 2 :]
        second, metric, again = self._node(
            self._saturated(b + torch.where(first, -a, a)), metric, 2 * at + 1
        )
        first = _moved(first, again)
        if moved is not None and again is not None:
            moved = moved[again]
        return torch.cat([first ^ second, second]), metric, again if moved is None else moved

    def _repeated(self, alpha: Tensor, metric: Tensor, at: int) -> Paths:
        n = len(alpha)
        if self.list_size == 1:
            whole = alpha
            while len(whole) > 1:
                half = len(whole) // 2
                whole = self._saturated(whole[half:] + whole[:half])
            return self._decided(whole, at).expand(n, -1), metric, None
        penalties = torch.stack([self._penalty(alpha).sum(0), self._penalty(-alpha).sum(0)])
        costs = metric.unsqueeze(2) + penalties.t().reshape(*metric.shape, 2).to(metric.dtype)
        metric, chosen, origin = self._best(costs, 2)
        return (chosen == 1).reshape(1, -1).expand(n, -1), metric, origin

    def _turned(self, alpha: Tensor, metric: Tensor, parity: bool) -> Paths:
        """Each path's word of hard decisions, with some of the least reliable bits turned."""
        n, sizes = len(alpha), alpha.abs()
        bits = alpha < 0
        patterns = _patterns(self.list_size, n, parity).to(alpha.device)  # [patterns, weakest]
        least, where = self._weakest(sizes, patterns.shape[1])
        turn = (patterns.to(torch.float32) @ least.to(torch.float32)).to(metric.dtype)
        costs = self._added(metric, self._penalty(sizes)).unsqueeze(2)
        costs = costs + (1 if self.f == "exact" else _METRIC_UNITS) * turn.t().reshape(
            *metric.shape, -1
        )
        if parity:
            odd = (bits.sum(0) % 2 == 1).reshape(*metric.shape, 1)
            wrong = (patterns.sum(dim=1) % 2 == 1) != odd
            costs = costs.masked_fill(wrong, _worst(metric.dtype))
        choices = len(patterns)
        if parity:
            odd_sets = int((patterns.sum(dim=1) % 2).sum())
            choices = min(odd_sets, choices - odd_sets)
        metric, chosen, origin = self._best(costs, choices)
        bits, where = _moved(bits, origin), _moved(where, origin)
        flips = patterns[chosen.reshape(-1)].t()  # [weakest, paths]
        return bits.scatter(0, where, bits.gather(0, where) ^ flips), metric, origin

    def _weakest(self, sizes: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The least sizes of each column, ascending, and their rows; of equals the first."""
        if self.f == "exact":
            return sizes.topk(count, dim=0, largest=False, sorted=True)
        n = len(sizes)
        places = torch.arange(n, dtype=torch.int32, device=sizes.device).unsqueeze(1)
        keys = sizes.to(torch.int32) * n + places
        found = keys.topk(count, dim=0, largest=False, sorted=True).values
        return found // n, (found % n).to(torch.int64)

    def _best(self, costs: Tensor, valid: int) -> tuple[Tensor, Tensor, Tensor]:
        """Of [blocks, paths, choices], `valid` a path, the best: metrics, choices, old columns."""
        blocks, paths, choices = costs.shape
        kept = min(self.list_size, paths * valid)
        # The index breaks ties of equal metrics, so that all machines agree.
        flat = costs.reshape(blocks, -1)
        metric, chosen = flat.sort(dim=1, stable=True)
        metric, chosen = metric[:, :kept], chosen[:, :kept]
        rows = torch.arange(blocks, device=costs.device).unsqueeze(1) * paths
        return metric, chosen % choices, (rows + chosen // choices).reshape(-1)

    def _decided(self, alpha: Tensor, at: int) -> Tensor:
        if not self.randomized:
            return alpha < 0
        key = self.key.child(at)
        if self.f == "exact":
            return key.uniform(alpha.numel(), alpha.device).view_as(alpha) >= alpha.sigmoid()
        draws = key.halfwords(alpha.numel(), alpha.device).view_as(alpha)
        return draws >= _shares().to(alpha.device)[alpha.to(torch.int64) + CERTAIN]

    def _f(self, alpha: Tensor) -> Tensor:
        a, b = alpha.chunk(2)
        p, q = a.abs(), b.abs()
        m = torch.minimum(p, q)
        if self.f == "corrected":
            together, apart = (16 - p - q).clamp_(min=0), (16 - (p - q).abs_()).clamp_(min=0)
            m = (m + ((together + 3) >> 2) - ((apart + 3) >> 2)).clamp_(min=0)
        elif self.f == "exact":
            m = m + torch.log1p(torch.exp(-p - q)) - torch.log1p(torch.exp(-(p - q).abs()))
            m = m.clamp_(min=0)
        return torch.where((a < 0) ^ (b < 0), -m, m)

    def _saturated(self, alpha: Tensor) -> Tensor:
        return alpha if self.f == "exact" else alpha.clamp_(-CERTAIN, CERTAIN)

    def _penalty(self, alpha: Tensor) -> Tensor:
        """log(1 + e^-alpha), of zeros under these ratios."""
        if self.list_size == 1:
            return alpha[:0]
        if self.f == "exact":
            return torch.nn.functional.softplus(-alpha)
        return _softplus().to(alpha.device)[alpha.to(torch.int32) + CERTAIN]

    def _added(self, metric: Tensor, penalty: Tensor) -> Tensor:
        if self.list_size == 1:
            return metric
        return metric + penalty.sum(dim=0).to(metric.dtype).view_as(metric)


def _moved(x: Tensor, origin: Tensor | None) -> Tensor:
    return x if origin is None else x.index_select(1, origin)


def _first_least(sizes: Tensor) -> Tensor:
    """The first row with each column's least value, [1, columns]."""
    least = sizes == sizes.amin(dim=0)
    return least.to(torch.uint8).argmax(dim=0, keepdim=True)


def _worst(dtype: torch.dtype) -> float:
    return math.inf if dtype.is_floating_point else torch.iinfo(dtype).max // 2


@lru_cache(maxsize=1)
def _softplus() -> Tensor:
    ratios = range(-CERTAIN, CERTAIN + 1)
    exact = (UNITS * _METRIC_UNITS * math.log1p(math.exp(-ratio / UNITS)) for ratio in ratios)
    return torch.tensor([round(value) for value in exact], dtype=torch.int32, device="cpu")


@lru_cache(maxsize=1)
def _shares() -> Tensor:
    """Of 2^16 draws those below decide zero."""
    ratios = range(-CERTAIN, CERTAIN + 1)
    exact = (65536 / (1 + math.exp(-ratio / UNITS)) for ratio in ratios)
    return torch.tensor([round(value) for value in exact], dtype=torch.int32, device="cpu")


def _bitsets(patterns: Tensor) -> Tensor:
    """Each row as the bits of an int32."""
    places = 1 << torch.arange(patterns.shape[1], dtype=torch.int64, device="cpu")
    sets = (patterns * places).sum(dim=1)
    return torch.where(sets >= 2**31, sets - 2**32, sets).to(torch.int32)


@lru_cache(maxsize=256)
def _patterns(count: int, n: int, parity: bool) -> Tensor:
    """Which of the least reliable bits to turn, bool [patterns, bits]: the `count` best words of n
    bits are among them, whatever the costs.

    Bits are numbered by cost. A set costs at least as much as another of no more bits whose bits,
    both sorted from the costliest, are each no costlier. With `count` such sets below it, a
    set is not needed. With parity, sets of even and of odd size are two families.
    """
    limit = 4 * count if parity else count
    kept: list[tuple[int, ...]] = []
    level: list[tuple[int, ...]] = [()]
    while level:  # all sets of one sum of bits + 1: those below them are in the levels before
        level = [bits for bits in level if _num_below(bits, kept) < limit]
        kept += level
        level = sorted({more for bits in level for more in _successors(bits, n)})
    if parity:
        families = [[bits for bits in kept if len(bits) % 2 == odd] for odd in (0, 1)]
        kept = [bits for family in families for bits in family if _num_below(bits, family) <= count]
    table = torch.zeros(
        len(kept), 1 + max(bits[0] for bits in kept if bits), dtype=torch.bool, device="cpu"
    )
    for row, bits in zip(table, kept):
        row[list(bits)] = True
    return table


def _num_below(bits: tuple[int, ...], others: list[tuple[int, ...]]) -> int:
    return sum(
        len(other) <= len(bits) and all(a <= b for a, b in zip(other, bits)) for other in others
    )


def _successors(bits: tuple[int, ...], n: int) -> list[tuple[int, ...]]:
    """The sets just above: one bit more costly by one place, or the cheapest bit added."""
    found = []
    for i, bit in enumerate(bits):
        if bit + 1 < (bits[i - 1] if i else n):
            found.append((*bits[:i], bit + 1, *bits[i + 1 :]))
    if 0 not in bits:
        found.append((*bits, 0))
    return found
