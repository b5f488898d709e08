"""Merging by the cost model of MG-WFBP: exchanges one after the other, each a + bM."""

import random
from collections.abc import Iterable
from itertools import chain, combinations, pairwise

import pytest

from gradwire.core.profile import Profile
from gradwire.core.replica import Bucket
from gradwire.scheduling import SCHEDULING
from gradwire.scheduling.mgwfbp import merged_groups


def tensors_of(numels: Iterable[int]) -> list[Bucket]:
    tensors, start = [], 0
    for number, numel in enumerate(numels):
        tensors.append(Bucket(f"{number}.weight", start, start + numel))
        start += numel
    return tensors


def profile_of(
    numels: list[int], backward_s: Iterable[float], latency_s: float, bandwidth: float
) -> Profile:
    """Of layers with one tensor each, whose forward pass takes next to no time."""
    layers = tuple(Bucket(str(i), t.start, t.stop) for i, t in enumerate(tensors_of(numels)))
    return Profile(layers, (0.0,) * len(numels), tuple(backward_s), latency_s, bandwidth)


def end_s(groups: Iterable[int], numels: list[int], profile: Profile) -> float:
    """When the last exchange ends (eq. 8 of the paper), for groups with these first tensors."""
    ready = [profile.total_s * end for end in profile.backward_ends()]
    bounds = [0, *groups, len(numels)]
    free_s = 0.0
    for start, stop in reversed(list(pairwise(bounds))):
        free_s = max(free_s, ready[start]) + profile.exchange_s(sum(numels[start:stop]))
    return free_s


def all_groups(num: int) -> Iterable[tuple[int, ...]]:
    return chain.from_iterable(combinations(range(1, num), count) for count in range(num))


def test_a_case_by_hand():
    """Gradients are there at 1, 2 and 10 s; a latency is 2 s, four bytes take 1 s.

    Alone, the last layer would be exchanged until 1 + 3, the middle one until 4 + 3; merged both
    are done at 2 + 4. The first one comes long after.
    """
    numels = [1, 1, 1]
    profile = profile_of(numels, (8.0, 1.0, 1.0), latency_s=2.0, bandwidth=4.0)
    assert merged_groups(tensors_of(numels), profile) == [1]
    assert end_s([1], numels, profile) == 13.0
    assert end_s([], numels, profile) == 15.0


def test_a_case_in_which_merging_what_ends_next_earlier_is_not_best():
    """Algorithm 1 merges the last two, since 1.9 < 1 + a, and then the first, since 2.8 < 1.9 + a.

    The first two are ready when the last one, sent alone, is done: its bytes cost nothing.
    """
    numels = [2, 2, 2]
    profile = profile_of(numels, (0.9, 0.9, 1.0), latency_s=1.0, bandwidth=16.0)
    assert merged_groups(tensors_of(numels), profile) == [2]
    assert end_s([2], numels, profile) == pytest.approx(2.8 + 1.0 + 1.0)
    assert end_s([], numels, profile) == pytest.approx(2.8 + 1.0 + 1.5)


def test_no_grouping_ends_earlier():
    random.seed(0)
    for _ in range(100):
        num = random.randint(1, 7)
        numels = [random.choice((1, 2, 10, 100)) for _ in range(num)]
        backward = [random.choice((0.0, 0.1, 1.0, 3.0)) + 0.01 for _ in range(num)]
        latency = random.choice((0.0, 0.1, 1.0, 5.0))
        profile = profile_of(numels, backward, latency, random.choice((4.0, 40.0, 400.0)))
        found = merged_groups(tensors_of(numels), profile)
        best = min(end_s(groups, numels, profile) for groups in all_groups(num))
        assert end_s(found, numels, profile) == pytest.approx(best, rel=1e-12)
        assert end_s(found, numels, profile) <= end_s(range(1, num), numels, profile) + 1e-9
        assert end_s(found, numels, profile) <= end_s((), numels, profile) + 1e-9


def test_without_latency_nothing_is_merged_and_with_much_everything():
    numels, backward = [100] * 5, (1.0,) * 5
    no_latency = profile_of(numels, backward, 0.0, 100.0)
    assert end_s(merged_groups(tensors_of(numels), no_latency), numels, no_latency) == end_s(
        range(1, 5), numels, no_latency
    )
    assert merged_groups(tensors_of(numels), profile_of(numels, backward, 1e3, 1e9)) == []


def test_tensors_of_one_layer_are_merged():
    """Their gradients are there at the same time."""
    tensors = [Bucket("a.weight", 0, 8), Bucket("a.bias", 8, 10), Bucket("b.weight", 10, 20)]
    layers = (Bucket("a", 0, 10), Bucket("b", 10, 20))
    profile = Profile(layers, (1.0, 1.0), (10.0, 10.0), 0.1, 1e3)
    assert merged_groups(tensors, profile) == [2]


def test_groups_are_written_into_the_expression():
    numels = [1, 1, 1]
    profile = profile_of(numels, (8.0, 1.0, 1.0), latency_s=2.0, bandwidth=4.0)
    resolved = SCHEDULING.parse("mgwfbp").resolve(tensors_of(numels), profile)
    assert repr(resolved) == "mgwfbp((1,))"
    names = [bucket.name for bucket in resolved.buckets(tensors_of(numels), profile)]
    assert names == ["0.weight", "1.weight..2.weight"]
    elsewhere = profile_of(numels, (8.0, 1.0, 1.0), latency_s=0.0, bandwidth=4.0)
    assert resolved.resolve(tensors_of(numels), elsewhere) == resolved
