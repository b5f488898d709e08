"""Another codec for each worker, by its rank or by the bandwidth of its link.

    ef(by_rank({"0-3": "topk(0.01)", "7": "topk(0.001)", "*": "fp16"}))
    ef(by_rank({">=1Gbit": "fp16", ">=100Mbit": "topk(0.1)", "*": "topk(0.01)"}))

A rule's key is a list of ranks or ranges separated by `|`, "0|4-7"; or a bandwidth, ">=1Gbit" or
"<1Gbit"; "*" is the rest and comes last. The first rule that holds counts. The bandwidth of a
worker is the least of its own links, as `--bandwidth` and `--topology` say: of its card, and of the
uplink of its rack or site. Real processes are not told it: there rules take ranks.

The codec is that of the sender: receivers know its rank, and decode with the same rule. Where the
owner of a shard or a server encodes a mean again, it does so with the rule of its own rank.
Payloads of different codecs do not add: messages are gathered, or averaged by owners of shards.

Use it where links are uneven: strong compression for workers behind slow links (WAN sites, racks
with a narrow uplink), little for the others. The guarantee is that of the weakest rule.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from torch import Tensor

from gradwire.compression import COMPRESSION
from gradwire.core.codec import (
    Codec,
    Compression,
    Guarantee,
    Kind,
    Parts,
    State,
    Traits,
    drops_for_good,
    unpack,
)
from gradwire.core.composite import Composite
from gradwire.core.guarantee import weakest
from gradwire.core.key import Key
from gradwire.core.notation import Table, with_replaced
from gradwire.core.spec import Spec
from gradwire.core.units import parse_bandwidth

_REST = "*"


@dataclass(frozen=True, repr=False)
class ByRank(Composite):
    """Encode with the codec of the first rule that has the sender's rank or bandwidth."""

    rules: Mapping[str, Any]  # ranks or a bandwidth to a codec, or the text of one

    examples = (
        'by_rank({"0": "topk(0.01)", "*": "fp16"})',
        'by_rank({"0-1|3": "topk(0.1) >> qsgd(bits=4)", "*": "qsgd(4)"})',
    )

    def __post_init__(self) -> None:
        if not isinstance(self.rules, Mapping) or not self.rules:
            raise ValueError(
                f"by_rank takes a table of rules, got {self.rules!r}. "
                'Write by_rank({"0-3": "topk(0.01)", "*": "fp16"}).'
            )
        table = {ranks: _checked(ranks, codec) for ranks, codec in self.rules.items()}
        if list(table)[-1] != _REST or list(table).count(_REST) != 1:
            raise ValueError(
                f'by_rank: the last rule is that of all other ranks, "*", got {list(table)}'
            )
        object.__setattr__(self, "rules", Table(table))

    @property
    def members(self) -> tuple[Codec, ...]:
        return tuple(self.rules.values())

    @property
    def leaves(self) -> Kind:
        return Kind.NOTHING

    @property
    def parts(self) -> tuple[str, ...]:
        return ("payload",)

    @cached_property
    def traits(self) -> Traits:
        return Traits(
            needs_feedback=self._needs_feedback(),
            drops=lambda spec: any(drops_for_good(member, spec) for member in self.members),
            fingerprint=self._fingerprint,
        )

    @property
    def needs_bandwidths(self) -> bool:
        return any(_is_bandwidth(key) for key in self.rules)

    def with_ranks(self, bandwidths: Sequence[float]) -> "ByRank":
        """With ranks in place of bandwidths, given those of all ranks in bytes per second."""
        rules, left = {}, list(range(len(bandwidths)))
        for key, codec in self.rules.items():
            if key == _REST:
                rules[key] = codec
                continue
            own = [rank for rank in left if _holds(key, rank, bandwidths[rank])]
            left = [rank for rank in left if rank not in own]
            if own:
                rules["|".join(map(str, own))] = codec
        return ByRank(rules)

    def number_of(self, rank: int | None) -> int:
        """The rule of a rank; of messages that are everybody's, the last one."""
        if self.needs_bandwidths:
            raise ValueError(
                f"{self!r} has rules by bandwidth, which are known in runs on the simulator only. "
                'Write ranks instead, such as "0-3".'
            )
        for number, ranks in enumerate(self.rules):
            if ranks == _REST or (rank is not None and _has(ranks, rank)):
                return number
        raise AssertionError("the last rule has all ranks")

    def init(self, spec: Spec) -> State:
        return tuple(member.init(spec) for member in self.members)

    def guarantee(self, spec: Spec) -> Guarantee:
        each = [member.guarantee(spec) for member in self.members]
        return weakest(each)

    def split(self, x: Tensor, state: State, key: Key) -> tuple[Parts, State]:
        number = self.number_of(key.rank)
        states = list(state or self.init(Spec.of(x)))
        payload, states[number] = self.members[number].encode(x, states[number], key)
        return {"payload": payload.buffer}, tuple(states)

    def join(self, parts: Parts, spec: Spec, key: Key) -> Tensor:
        codec = self.members[self.number_of(key.rank)]
        return codec.decode(unpack(codec, parts["payload"], spec), spec, key)


def at_bandwidths(compression: Compression, bandwidths: Sequence[float]) -> Compression:
    """The compression with ranks in its rules by bandwidth, given the bandwidths of all ranks."""

    def ranked(rules: ByRank) -> ByRank:
        return rules.with_ranks(bandwidths) if rules.needs_bandwidths else rules

    replaced: Compression = with_replaced(compression, ByRank, ranked)
    return replaced


def check_no_bandwidths(compression: Compression) -> None:
    """Refuses rules by bandwidth, where nobody says what bandwidths there are."""

    def refused(rules: ByRank) -> ByRank:
        rules.number_of(None)
        return rules

    with_replaced(compression, ByRank, refused)


def _is_bandwidth(key: str) -> bool:
    return key.startswith((">=", "<"))


def _holds(key: str, rank: int, bandwidth: float) -> bool:
    if key.startswith(">="):
        return bandwidth >= parse_bandwidth(key[2:])
    if key.startswith("<"):
        return bandwidth < parse_bandwidth(key[1:])
    return _has(key, rank)


def _checked(ranks: object, text: object) -> Codec:
    if isinstance(ranks, str) and _is_bandwidth(ranks):
        parse_bandwidth(ranks.lstrip("<>="))
    elif not isinstance(ranks, str) or (ranks != _REST and not _ranges(ranks)):
        raise ValueError(f"by_rank: {ranks!r} has no rank")
    codec: Compression = COMPRESSION.parse(text)  # type: ignore[arg-type]
    if not isinstance(codec, Codec):
        raise ValueError(
            f"by_rank: {codec!r} is a way of averaging, not a codec. Put it around the whole, "
            'like ef(by_rank({"0": "topk(0.01)", "*": "fp16"})).'
        )
    if codec.traits.takes is Kind.SYMBOLS or codec.traits.layered or codec.traits.statistic:
        raise ValueError(
            f"by_rank: {codec!r} needs more than one worker's vector (its tensors, a maximum over "
            "all workers, or symbols). Take another codec for this rule."
        )
    return codec


def _has(text: str, rank: int) -> bool:
    return any(first <= rank <= last for first, last in _ranges(text))


@lru_cache(maxsize=256)
def _ranges(text: str) -> tuple[tuple[int, int], ...]:
    """The first and last ranks of the ranges in "0|4-7"."""
    ranges = []
    for part in text.split("|"):
        match = re.fullmatch(r"\s*(\d+)(?:\s*-\s*(\d+))?\s*", part)
        if not match or int(match[2] or match[1]) < int(match[1]):
            raise ValueError(
                f'by_rank: {text!r} is no list of ranks. Write "0", "0-3", "0|4-7", a bandwidth '
                '">=1Gbit" or "<1Gbit", or "*" for all others.'
            )
        ranges.append((int(match[1]), int(match[2] or match[1])))
    return tuple(ranges)
