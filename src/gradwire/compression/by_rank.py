"""Another codec for each worker, by its rank.

    ef(by_rank({"0-3": "topk(0.01)", "7": "topk(0.001)", "*": "fp16"}))

A rule's key is a list of ranks or ranges separated by `|`, "0|4-7"; "*" is the rest and comes last.
The codec is that of the sender: receivers know its rank, and decode with the same rule. Where the
owner of a shard or a server encodes a mean again, it does so with the rule of its own rank.
Payloads of different codecs do not add: messages are gathered, or averaged by owners of shards.

Use it where links are uneven: strong compression for workers behind slow links (WAN sites, racks
with a narrow uplink), little for the others. The guarantee is that of the weakest rule.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
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
from gradwire.core.notation import Table
from gradwire.core.spec import Spec

_REST = "*"


@dataclass(frozen=True, repr=False)
class ByRank(Composite):
    """Encode with the codec of the first rule that has the sender's rank."""

    rules: Mapping[str, Any]  # ranks to a codec, or the text of one

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

    def number_of(self, rank: int | None) -> int:
        """The rule of a rank; of messages that are everybody's, the last one."""
        for number, ranks in enumerate(self.rules):
            if ranks == _REST or (rank is not None and rank in set(_ranks(ranks))):
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


def _checked(ranks: object, text: object) -> Codec:
    if not isinstance(ranks, str) or (ranks != _REST and not list(_ranks(ranks))):
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


def _ranks(text: str) -> Iterator[int]:
    """The ranks in "0|4-7"."""
    for part in text.split("|"):
        match = re.fullmatch(r"\s*(\d+)(?:\s*-\s*(\d+))?\s*", part)
        if not match or int(match[2] or match[1]) < int(match[1]):
            raise ValueError(
                f'by_rank: {text!r} is no list of ranks. Write "0", "0-3", "0|4-7", or "*" for all '
                "others."
            )
        yield from range(int(match[1]), int(match[2] or match[1]) + 1)
