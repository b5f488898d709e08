"""Per-layer rules: each tensor is compressed by the first rule that matches its name.

    partition({"bias|bn": "fp16", "*": "topk(0.01)"}, min_size=256)

A rule's key is a list of patterns separated by `|`. A pattern with `*`, `?` or `[` is a glob for
the whole name, any other is looked for anywhere in it; "*" alone is the rest and comes last. The
tensors of one rule are compressed together, as one vector: top-k takes the largest elements of
all of them. Tensors of fewer than `min_size` elements travel as they are.

Treating layers differently is common practice: biases and normalisation are few and matter (Lin
et al. 2018, Deep gradient compression; Vogels et al. 2019).

Use it where tensors need different codecs: strong compression for large matrices, little or none
for biases and normalisation. Put `ef(...)` around the whole or into single rules, not both; if one
codec suits all tensors, write that codec alone.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache, partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from gradwire.compression import COMPRESSION
from gradwire.compression.identity import Identity
from gradwire.core.codec import Compression, State
from gradwire.core.errors import WireError
from gradwire.core.group import Group
from gradwire.core.key import Key
from gradwire.core.lifted import lift
from gradwire.core.memory import Memories, Memory, inside, replaced
from gradwire.core.node import Node
from gradwire.core.notation import Table
from gradwire.core.reducer import Pushed, Reduced, Reducer, unfed
from gradwire.core.spec import Placed, Spec, runs

_REST = "*"


@dataclass(frozen=True, repr=False)
class Partition(Reducer):
    """Compress each tensor by the first rule that matches its name."""

    rules: Mapping[str, Any]  # patterns to a compression, or the text of one
    min_size: int = 0  # tensors of fewer elements travel as they are

    paper = "Lin et al. 2018, Deep gradient compression: Reducing the communication bandwidth"
    examples = (
        'partition({"bias|bn": "fp16", "*": "topk(0.01)"})',
        'partition({"*": ef(topk(0.1) >> qsgd(bits=4))}, min_size=256)',
    )

    def __post_init__(self) -> None:
        if not isinstance(self.rules, Mapping) or not self.rules:
            raise ValueError(
                f"partition takes a table of rules, got {self.rules!r}. "
                'Write partition({"bias": "fp16", "*": "topk(0.01)"}).'
            )
        table = {}
        for patterns, compression in self.rules.items():
            if not isinstance(patterns, str) or not all(patterns.split("|")):
                raise ValueError(
                    f"partition: {patterns!r} has an empty pattern. "
                    'Separate parts of names by |, like "bias|bn", or write "*" for the rest.'
                )
            if _REST in table:
                raise ValueError(
                    f'partition: {patterns!r} comes after "*", which takes all that is left. '
                    'Put "*" last.'
                )
            table[patterns] = COMPRESSION.parse(compression)
        if self.min_size < 0:
            raise ValueError(f"partition: min_size must not be negative, got {self.min_size}")
        object.__setattr__(self, "rules", Table(table))
        self._check_momentum()

    @property
    def momentum_lives(self) -> Literal["before", "after", "inside"]:
        lives = {lift(rule).momentum_lives for rule in self.rules.values()}
        return "inside" if "inside" in lives else "before" if "before" in lives else "after"

    def unfed(self, spec: Spec) -> Compression | None:
        found = (unfed(rule, spec) for rule in self.rules.values())
        return next((part for part in found if part is not None), None)

    @property
    def is_sparse(self) -> bool:
        return all(lift(rule).is_sparse for rule in self.rules.values())

    def parts_within(self) -> tuple[Compression, ...]:
        return tuple(self.rules.values())

    @property
    def can_push(self) -> bool:
        return all(lift(rule).can_push for rule in self.rules.values())

    @property
    def num_messages(self) -> int:
        raise TypeError("a partition pushes as many messages as its rules for the bucket do")

    def decode_push(self, messages: Sequence[Tensor], spec: Spec, key: Key) -> Tensor:
        cut, parts, start = _make_cut(self, spec.layout), [], 0
        for piece in cut.pieces:
            stop = start + piece.reducer.num_messages
            own_key = key.child(piece.patterns)
            parts.append(piece.reducer.decode_push(messages[start:stop], piece.spec(spec), own_key))
            start = stop
        if start != len(messages):
            raise WireError(f"{self!r}: {len(messages)} messages, expected {start}")
        return _assemble(cut, spec, tuple(parts))

    def check_names(self, names: Sequence[str]) -> None:
        taken: dict[str, list[str]] = {patterns: [] for patterns in self.rules}
        for name in names:
            taken[self._rule(name)].append(name)
        for patterns, own in taken.items():
            if not own and patterns != _REST:
                earlier = [name for name in names if _matches(name, patterns)]
                why = (
                    f"all it would match ({', '.join(earlier[:3])}) is taken by rules before it"
                    if earlier
                    else f"the tensors are {_format_names(names)}"
                )
                raise ValueError(
                    f"{self!r}: the rule {patterns!r} matches no tensor; {why}. Remove or mend it."
                )
            if own and isinstance(self.rules[patterns], Reducer):
                self.rules[patterns].check_names(own)

    def _check_momentum(self) -> None:
        """Refuses rules of which only some have a momentum."""
        if self.momentum_lives != "inside":
            return
        for patterns, rule in self.rules.items():
            if lift(rule).momentum_lives != "inside":
                raise ValueError(
                    f"partition: other rules have a momentum of their own, so {patterns!r} would "
                    f"be left without. Write {patterns!r}: velocity({rule!r})."
                )
        if self.min_size:
            raise ValueError(
                f"partition: all rules have a momentum of their own, so tensors of fewer than "
                f"{self.min_size} elements would be left without. Leave out min_size."
            )

    def init(self, spec: Spec, size: int) -> State:
        pieces = _make_cut(self, spec.layout).pieces
        states = [piece.reducer.init(piece.spec(spec), size) for piece in pieces]
        return {"tensors": spec.layout, "rules": tuple(states)}

    def remembered(self, states: Sequence[State], spec: Spec) -> dict[str, Memory]:
        found = {}
        cut, rules = _make_cut(self, states[0]["tensors"]), ["", *self.rules]
        for i, piece in enumerate(cut.pieces):
            own = piece.reducer.remembered([s["rules"][i] for s in states], piece.spec(spec))
            for name, memory in own.items():
                zeros = [memory.vectors[0].new_zeros(other.numel) for other in cut.pieces]
                whole = [
                    cut.assemble([*zeros[:i], vector, *zeros[i + 1 :]], spec.flat())
                    for vector in memory.vectors
                ]
                # Other buckets have other pieces, but each rule takes the same tensors.
                found[f"{rules.index(piece.patterns)}.{name}"] = replaced(memory, tuple(whole))
        return found

    def restored(self, states: Sequence[State], memories: Memories, spec: Spec) -> list[State]:
        cut, names = _make_cut(self, states[0]["tensors"]), ["", *self.rules]
        rules = []
        for i, piece in enumerate(cut.pieces):
            number = names.index(piece.patterns)
            own = {
                name: replaced(memory, tuple(cut.parts(vector)[i] for vector in memory.vectors))
                for name, memory in inside(str(number), memories).items()
            }
            fresh = [state["rules"][i] for state in states]
            rules.append(piece.reducer.restored(fresh, own, piece.spec(spec)))
        return [{**state, "rules": own} for state, own in zip(states, zip(*rules))]

    async def mean(
        self, x: Tensor, state: State, key: Key, group: Group, residual: Tensor | None = None
    ) -> Reduced:
        node, spec, cut = group.node, Spec.of(x), _make_cut(self, state["tensors"])
        done: list[Reduced] = []
        for piece, part, inner, rest in _distribute(cut, x, state, residual):
            own_key = key.child(piece.patterns)
            done.append(await piece.reducer.mean(part, inner, own_key, group, rest))
        lost = [reduced.residual for reduced in done if reduced.residual is not None]
        return Reduced(
            await node.share(_assemble, cut, spec, tuple(reduced.mean for reduced in done)),
            partial(_own_contribution, cut, spec, done),
            {**state, "rules": tuple(reduced.state for reduced in done)},
            None if residual is None else await node.call(_assemble, cut, spec, lost),
        )

    async def push(
        self, x: Tensor, state: State, key: Key, node: Node, residual: Tensor | None = None
    ) -> Pushed:
        spec, cut = Spec.of(x), _make_cut(self, state["tensors"])
        done: list[Pushed] = []
        for piece, part, inner, rest in _distribute(cut, x, state, residual):
            own_key = key.child(piece.patterns)
            done.append(await piece.reducer.push(part, inner, own_key, node, rest))
        lost = [pushed.residual for pushed in done if pushed.residual is not None]
        return Pushed(
            tuple(message for pushed in done for message in pushed.messages),
            partial(_own_contribution, cut, spec, done),
            {**state, "rules": tuple(pushed.state for pushed in done)},
            None if residual is None else await node.call(_assemble, cut, spec, lost),
        )

    def _rule(self, name: str) -> str:
        for patterns in self.rules:
            if _matches(name, patterns):
                return patterns
        raise ValueError(
            f"{self!r} has no rule for {name or 'a vector without names'!r}. "
            'Add "*" for all that is left, e.g. {..., "*": "identity"}.'
        )


class _Piece(NamedTuple):
    """The tensors of a bucket that one rule compresses."""

    patterns: str
    reducer: Reducer
    runs: tuple[tuple[int, int], ...]  # (start, stop) in the bucket
    tensors: tuple[Placed, ...]  # placed in the piece

    @property
    def numel(self) -> int:
        return sum(stop - start for start, stop in self.runs)

    def spec(self, bucket: Spec) -> Spec:
        return Spec((self.numel,), bucket.dtype, tensors=self.tensors)


class _BucketCut(NamedTuple):
    """A bucket cut into runs, by one `split`, that one `cat` puts together again."""

    pieces: tuple[_Piece, ...]
    sizes: tuple[int, ...]  # of all runs, in the order of the bucket
    places: tuple[tuple[int, ...], ...]  # of each piece: which runs are its own
    order: tuple[int, ...]  # where to find each run if those of the first piece come first, ...

    def parts(self, x: Tensor) -> list[Tensor]:
        """The part of a vector that belongs to each piece."""
        runs = x.split(self.sizes)
        return [_concatenate(runs, own) for own in self.places]

    def assemble(self, parts: Sequence[Tensor], spec: Spec) -> Tensor:
        """The inverse."""
        sizes = ([self.sizes[run] for run in own] for own in self.places)
        runs = [run for part, own in zip(parts, sizes) for run in part.split(own)]
        return _concatenate(runs, self.order).reshape(spec.shape)


def _concatenate(runs: Sequence[Tensor], which: Sequence[int]) -> Tensor:
    return runs[which[0]] if len(which) == 1 else torch.cat([runs[run] for run in which])


@lru_cache(maxsize=1024)
def _make_cut(rules: Partition, tensors: tuple[Placed, ...]) -> _BucketCut:
    pieces = _rule_pieces(rules, tensors)
    ranges = sorted(own for piece in pieces for own in piece.runs)
    places = tuple(tuple(ranges.index(own) for own in piece.runs) for piece in pieces)
    found = [run for own in places for run in own]
    return _BucketCut(
        pieces,
        tuple(stop - start for start, stop in ranges),
        places,
        tuple(sorted(range(len(found)), key=found.__getitem__)),
    )


def _rule_pieces(rules: Partition, tensors: tuple[Placed, ...]) -> tuple[_Piece, ...]:
    """The pieces of a bucket, in the order of the rules; small tensors come first."""
    taken: dict[str, list[Placed]] = {"": [], **{patterns: [] for patterns in rules.rules}}
    for tensor in tensors:
        patterns = rules._rule(tensor[0])
        taken["" if tensor[2] - tensor[1] < rules.min_size else patterns].append(tensor)
    reducers = {"": lift(Identity()), **{key: lift(rule) for key, rule in rules.rules.items()}}
    return tuple(
        _Piece(patterns, reducers[patterns], runs(own), _repack(own))
        for patterns, own in taken.items()
        if own
    )


def _repack(tensors: Sequence[Placed]) -> tuple[Placed, ...]:
    """The tensors one after the other."""
    moved, position = [], 0
    for name, start, stop, shape in tensors:
        moved.append((name, position, position + stop - start, shape))
        position += stop - start
    return tuple(moved)


def _assemble(cut: _BucketCut, spec: Spec, parts: Sequence[Tensor]) -> Tensor:
    return cut.assemble(parts, spec)


def _distribute(
    cut: _BucketCut, x: Tensor, state: State, residual: Tensor | None
) -> Iterator[tuple[_Piece, Tensor, State, Tensor | None]]:
    """Each piece with its part of x, its state and its part of the residual."""
    parts = cut.parts(x.detach().reshape(-1))
    kept = [None] * len(parts) if residual is None else cut.parts(residual.reshape(-1))
    return zip(cut.pieces, parts, state["rules"], kept)


def _own_contribution(cut: _BucketCut, spec: Spec, done: Sequence[Reduced | Pushed]) -> Tensor:
    return cut.assemble([result.own() for result in done], spec)


def _matches(name: str, patterns: str) -> bool:
    return any(
        fnmatchcase(name, pattern) if any(sign in pattern for sign in "*?[") else pattern in name
        for pattern in patterns.split("|")
    )


def _format_names(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
