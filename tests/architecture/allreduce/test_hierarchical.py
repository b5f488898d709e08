"""2 log2(m) (a + bN) + 2(g-1)(a + bN/g) for g groups of m."""

import math

import pytest

from gradwire.architecture import ARCHITECTURE
from gradwire.architecture.allreduce.binary_tree import BinaryTree
from gradwire.architecture.allreduce.hierarchical import Hierarchical
from gradwire.core.errors import NotationError

N = 4 * 840


@pytest.mark.parametrize("num_groups", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("near", [1, 2, 4, 8])
def test_groups_of_powers_of_two_take_the_time_of_the_formula(
    all_reduce, num_groups, near, latency
) -> None:
    engine = all_reduce(Hierarchical(num_groups), num_groups * near, N, latency, N)
    tree = 2 * math.log2(near) * (latency + 1)
    ring = 2 * (num_groups - 1) * (latency + 1 / num_groups)
    assert engine.now == pytest.approx(tree + ring, rel=1e-9)


@pytest.mark.parametrize("num_groups", [2, 3, 4])
@pytest.mark.parametrize("near", [3, 5, 6, 7])
def test_other_groups_take_the_time_of_their_tree(all_reduce, num_groups, near, latency) -> None:
    engine = all_reduce(Hierarchical(num_groups), num_groups * near, N, latency, N)
    tree = all_reduce(BinaryTree(), near, N, latency, N).now
    ring = 2 * (num_groups - 1) * (latency + 1 / num_groups)
    assert engine.now == pytest.approx(tree + ring, rel=1e-9)


def test_groups_are_ranges_of_almost_equal_length(all_reduce) -> None:
    ledger = all_reduce(Hierarchical(3), 11, N).ledger  # 0..3, 4..7, 8..10
    across = {
        (src, dst)
        for src in range(11)
        for dst in range(11)
        if src // 4 != dst // 4 and ledger.link_messages[src][dst]
    }
    assert across == {(0, 4), (4, 8), (8, 0)}


@pytest.mark.parametrize("num_groups", [2, 3, 4])
def test_leaders_send_the_ring_and_a_vector_to_each_child(all_reduce, num_groups) -> None:
    ledger = all_reduce(Hierarchical(num_groups), 4 * num_groups, N).ledger
    ring = 2 * (num_groups - 1) * N // num_groups
    for rank in range(4 * num_groups):
        sent = ring + 2 * N if rank % 4 == 0 else (1 + (rank % 4 == 2)) * N
        assert ledger.sent_by(rank) == ledger.received_by(rank) == sent


def test_with_fewer_workers_than_groups_each_is_one(all_reduce) -> None:
    ledger = all_reduce(Hierarchical(8), 3, N).ledger
    assert [ledger.sent_by(rank) for rank in range(3)] == [2 * 2 * N // 3] * 3


def test_no_groups_are_refused() -> None:
    with pytest.raises(NotationError, match="at least one group"):
        ARCHITECTURE.parse("hierarchical(0)")
    with pytest.raises(NotationError, match="needs groups"):
        ARCHITECTURE.parse("hierarchical")
