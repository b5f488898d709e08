"""The laws of wrappers, for every wrapper around every kind of codec: nothing owed is ever lost."""

import copy
import io
import warnings
from collections.abc import Sequence
from dataclasses import fields
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from gradwire.architecture.allreduce.allreduce import AllReduce
from gradwire.compression import COMPRESSION
from gradwire.compression.feedback._wrapping import Feedback
from gradwire.compression.feedback.neolithic import Neolithic
from gradwire.core.codec import Compression, State
from gradwire.core.errors import GradwireWarning
from gradwire.core.key import Key
from gradwire.core.memory import Memory, Role, joined
from gradwire.core.node import Node
from gradwire.core.notation import notation_name
from gradwire.core.reducer import Reducer
from gradwire.core.spec import Spec
from gradwire.runtime.network.network import Network
from gradwire.runtime.virtual.engine import VirtualEngine
from gradwire.training.regroup import regroup_states
from sampling import cover

pytestmark = pytest.mark.filterwarnings("ignore::gradwire.core.errors.GradwireWarning")

# One of each kind, for all laws and all ways to write a wrapper; the others for the shorter one.
KINDS = (
    "identity",
    "sign",
    "topk(0.1)",
    "randomk(0.2)",
    "randomk(0.2, unbiased=True)",
    "topk(0.2) >> qsgd(bits=4)",
    "powersgd(2)",
    'partition({"a": "sign", "*": "topk(0.1)"})',
)
OTHERS = ("fp16", "qsgd(7, bucket=16)", "sampledk(0.2)", "polar(1.0, block=64)", "eden(2)")
# Two layouts of the same three tensors, and all in one.
A, B, C = ("a", (6, 10)), ("b", (33,)), ("c", (7,))
LAYOUTS = [[[A], [B, C]], [[A, B, C]], [[A, B], [C]]]
ROUTES = ("gather", "scatter")


def wrappers(inners: Sequence[str], most: int | None = None) -> list[Reducer]:
    """Every wrapper in the ways its first examples show, around every inner that it takes."""
    found: dict[str, Reducer] = {}
    for cls in COMPRESSION:
        if not issubclass(cls, Feedback):
            continue
        for text in cls.examples[:most]:
            example = COMPRESSION.parse(text)
            for inner in inners:
                pair = _around(example, COMPRESSION.parse(inner))
                if pair is not None:
                    found[repr(pair)] = pair
    return list(found.values())


def _first_examples() -> list[str]:
    """Of every codec and reducer that remembers nothing itself."""
    others = (cls for cls in COMPRESSION if not issubclass(cls, Feedback | Neolithic))
    return [(cls.examples or (notation_name(cls),))[0] for cls in others]


def _around(example: Compression, inner: Compression) -> Reducer | None:
    """The example with another inner; None if the wrapper refuses it."""
    name = next(field.name for field in fields(example) if field.name == "inner")
    own = getattr(example, name)
    if isinstance(own, Reducer) and isinstance(own, Feedback):
        inner = _around(own, inner)
        if inner is None:
            return None
    values = {field.name: getattr(example, field.name) for field in fields(example)}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", GradwireWarning)
            pair = type(example)(**{**values, name: inner})
            for layout in LAYOUTS:
                for spec in _specs(layout):
                    for size in (1, 2, 3, 5):
                        pair.init(spec, size)
    except ValueError:
        return None
    return pair


def _specs(layout: list, dtype: torch.dtype = torch.float64) -> list[Spec]:
    specs = []
    for tensors in layout:
        placed, start = [], 0
        for name, shape in tensors:
            numel = Spec(shape, dtype).numel
            placed.append((name, start, start + numel, shape))
            start += numel
        specs.append(Spec((start,), dtype, tensors=tuple(placed)))
    return specs


def _gradient(rank: int, step: int, numel: int) -> Tensor:
    return Key(3).at(step).private(rank).normal(numel).double()


def _fresh(reducer: Reducer, specs: list[Spec], size: int) -> list[tuple[State, ...]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GradwireWarning)
        return [tuple(reducer.init(spec, size) for spec in specs) for _ in range(size)]


def _trained(
    reducer: Reducer, specs: list[Spec], states: list, steps: range, route: str
) -> tuple[list[Tensor], list[tuple[State, ...]]]:
    """The whole means of all steps, as rank 0 has them, and the states of all ranks."""

    async def program(node: Node) -> tuple[list[Tensor], tuple[State, ...]]:
        own, means = list(states[node.rank]), []
        for step in steps:
            whole = _gradient(node.rank, step, sum(spec.numel for spec in specs))
            pieces = []
            for i, x in enumerate(whole.split([spec.numel for spec in specs])):
                key = Key(8).at(step).private(node.rank).child(f"bucket {i}")
                group = AllReduce(route).group(node, f"bucket {i}")
                reduced = await reducer.mean(x, own[i], key, group)
                own[i] = reduced.state
                pieces.append(reduced.mean)
            means.append(torch.cat(pieces))
        return means, tuple(own)

    results = VirtualEngine(Network.uniform(len(states))).run([program] * len(states))
    return results[0][0], [own for _, own in results]


@cache
def _begun(wrapper: Reducer, route: str) -> list[tuple[State, ...]]:
    """States of three workers after three steps in the first layout."""
    specs = _specs(LAYOUTS[0])
    return _trained(wrapper, specs, _fresh(wrapper, specs, 3), range(3), route)[1]


def _memories(reducer: Reducer, specs: list[Spec], states: list) -> dict[str, Memory]:
    parts = [reducer.remembered([own[i] for own in states], s) for i, s in enumerate(specs)]
    return joined(parts, specs)


def _owed(memories: dict[str, Memory], size: int) -> Tensor:
    """The sum over all workers of what is still to be sent."""
    total = torch.zeros(100, dtype=torch.float64)
    for role, vectors in memories.values():
        if role is Role.LEFT:
            total = total + sum(vectors)
        elif role is Role.SERVER:
            total = total + size * vectors[0]
    return total


def _rounding(wrapper: Reducer) -> float:
    """Of the mean that the group takes: payloads of fp16 are added as such."""
    return 2e-3 if "fp16" in repr(wrapper) else 1e-12


WRAPPERS = wrappers(KINDS)
PAIRS = wrappers([*OTHERS, *_first_examples()], most=1)


def _covered(pairs: list[Reducer]) -> list[Any]:
    """For the quick run: every wrapper once, and everything that can be wrapped once."""
    return cover((pair, type(pair), repr(pair.inner)) for pair in pairs)


wrapped = pytest.mark.parametrize("wrapper", _covered(WRAPPERS), ids=repr)


def test_every_wrapper_is_here_with_all_it_takes() -> None:
    """A wrapper that refuses more than it says would drop out of the laws unseen."""
    refused = {"DoubleSqueeze": 5, "ThreePC": 2, "Diana": 6}  # of the KINDS, each with a reason
    for cls in COMPRESSION:
        if issubclass(cls, Feedback):
            first = COMPRESSION.parse(cls.examples[0])
            own = [pair for kind in KINDS if (pair := _around(first, COMPRESSION.parse(kind)))]
            assert len(own) == len(KINDS) - refused.get(cls.__name__, 0), cls.__name__


@wrapped
def test_a_state_that_was_saved_goes_on_in_the_same_bits(wrapper) -> None:
    specs = _specs(LAYOUTS[0])
    half = _begun(wrapper, "gather")
    file = io.BytesIO()
    torch.save(half, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    before = copy.deepcopy(half)
    whole, _ = _trained(wrapper, specs, half, range(3, 5), "gather")
    again, _ = _trained(wrapper, specs, loaded, range(3, 5), "gather")
    third, _ = _trained(wrapper, specs, before, range(3, 5), "gather")
    for a, b, c in zip(whole, again, third):
        assert torch.equal(a, b)
        assert torch.equal(a, c), "the first two steps changed a state in place"


@pytest.mark.parametrize("route", ROUTES)
@wrapped
def test_other_buckets_lose_nothing(wrapper, route) -> None:
    before, states = _specs(LAYOUTS[0]), _begun(wrapper, route)
    memories = _memories(wrapper, before, states)
    for layout in LAYOUTS[1:]:
        after = _specs(layout)
        moved = regroup_states(wrapper, states, before, after, 3)
        found = _memories(wrapper, after, moved)
        assert found.keys() == memories.keys()
        for name, (role, vectors) in memories.items():
            assert found[name].role == role
            for a, b in zip(vectors, found[name].vectors, strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
        means, _ = _trained(wrapper, after, moved, range(3, 5), route)
        assert all(torch.isfinite(mean).all() for mean in means)


@pytest.mark.parametrize("route", ROUTES)
@wrapped
def test_other_numbers_of_workers_owe_the_same(wrapper, route) -> None:
    specs, states = _specs(LAYOUTS[0]), _begun(wrapper, route)
    owed = _owed(_memories(wrapper, specs, states), 3)
    for size in (1, 2, 5):
        moved = regroup_states(wrapper, states, specs, specs, size)
        assert len(moved) == size
        now = _owed(_memories(wrapper, specs, moved), size)
        torch.testing.assert_close(now, owed, rtol=1e-12, atol=1e-12)
        means, _ = _trained(wrapper, specs, moved, range(3, 5), route)
        assert all(torch.isfinite(mean).all() for mean in means)


def _same(a: State, b: State) -> bool:
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[name], b[name]) for name in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    return a == b


@pytest.mark.parametrize("wrapper", _covered(PAIRS), ids=repr)
def test_with_every_codec_states_are_saved_and_moved(wrapper) -> None:
    before, after = _specs(LAYOUTS[0]), _specs(LAYOUTS[2])
    _, states = _trained(wrapper, before, _fresh(wrapper, before, 2), range(2), "auto")
    file = io.BytesIO()
    torch.save(states, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert _same(states, loaded)
    memories = _memories(wrapper, before, states)
    moved = _memories(wrapper, after, regroup_states(wrapper, loaded, before, after, 2))
    for name, (_, vectors) in memories.items():
        torch.testing.assert_close(moved[name].vectors, vectors, rtol=0, atol=1e-12)
    fewer = _memories(wrapper, after, regroup_states(wrapper, loaded, before, after, 1))
    torch.testing.assert_close(_owed(fewer, 1), _owed(memories, 2), rtol=1e-12, atol=1e-12)


EXACT = [pair for pair in WRAPPERS if type(pair).__name__ in ("EF", "DoubleSqueeze")]


@pytest.mark.parametrize("wrapper", _covered(EXACT), ids=repr)
@pytest.mark.parametrize("route", ROUTES)
def test_applied_plus_owed_is_the_sum_of_gradients_across_other_buckets(wrapper, route) -> None:
    """In float64, to its rounding: (Seide et al. 2014), whatever happens to the buckets."""
    before, after = _specs(LAYOUTS[0]), _specs(LAYOUTS[2])
    first, states = _trained(wrapper, before, _fresh(wrapper, before, 3), range(3), route)
    moved = regroup_states(wrapper, states, before, after, 3)
    second, states = _trained(wrapper, after, moved, range(3, 6), route)
    applied = sum(first + second)
    owed = _owed(_memories(wrapper, after, states), 3) / 3
    given = sum(_gradient(rank, step, 100) for rank in range(3) for step in range(6)) / 3
    torch.testing.assert_close(applied + owed, given, rtol=0, atol=_rounding(wrapper))
