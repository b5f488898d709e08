"""Sanders et al. 2009: full bandwidth at a logarithmic latency."""

import pytest

from gradwire.architecture import ARCHITECTURE
from gradwire.architecture.allreduce._trees import TreePosition
from gradwire.architecture.allreduce.double_binary_tree import DoubleBinaryTree, two_trees
from gradwire.core.errors import NotationError

UNIT = 40  # bytes of a block, which takes one second


def critical_path(size: int, blocks: int, latency: float) -> float:
    """In units of the time of a block."""
    even = size - size % 2
    height = even.bit_length() - 1 + size % 2
    return 2 * (height * latency + 2 * blocks + 2 * height - 3)


@pytest.mark.parametrize("blocks", [1, 2, 3, 8, 30])
@pytest.mark.parametrize("latency", [0.0, 0.1, 0.25, 0.5])
@pytest.mark.parametrize("size", [4, 5, 8])
def test_an_all_reduce_takes_the_time_of_the_critical_path(
    all_reduce, size, blocks, latency
) -> None:
    engine = all_reduce(DoubleBinaryTree(blocks), size, 2 * blocks * UNIT, latency, UNIT)
    assert engine.now == pytest.approx(critical_path(size, blocks, latency), rel=1e-9)


@pytest.mark.parametrize("blocks", [1, 2, 3, 8, 30])
def test_sixteen_ranks_do_so_without_latency(all_reduce, blocks) -> None:
    engine = all_reduce(DoubleBinaryTree(blocks), 16, 2 * blocks * UNIT, 0.0, UNIT)
    assert engine.now == pytest.approx(critical_path(16, blocks, 0.0), rel=1e-9)


@pytest.mark.parametrize("latency", [0.0, 0.1, 0.5, 1.0, 4.0])
@pytest.mark.parametrize("size", range(3, 34))
def test_no_size_takes_much_longer(all_reduce, size, latency) -> None:
    for blocks in (1, 5, 12):
        engine = all_reduce(DoubleBinaryTree(blocks), size, 2 * blocks * UNIT, latency, UNIT)
        path = critical_path(size, blocks, latency)
        waits = (blocks - 1) * latency if latency > 0.5 else 0.0
        assert path * (1 - 1e-9) <= engine.now <= path + waits + 5


@pytest.mark.parametrize("size", [15, 16])
def test_many_blocks_take_little_more_than_two_vectors(all_reduce, size) -> None:
    engine = all_reduce(DoubleBinaryTree(48), size, 2 * 48 * UNIT, 0.25, UNIT)
    assert engine.now < 2.2 * 2 * 48


@pytest.mark.parametrize("blocks", [1, 6])
def test_two_ranks_swap_halves_twice(all_reduce, blocks) -> None:
    engine = all_reduce(DoubleBinaryTree(blocks), 2, 2 * blocks * UNIT, 0.5, UNIT)
    assert engine.now == pytest.approx(2 * (0.5 + blocks), rel=1e-9)


@pytest.mark.parametrize("size", range(2, 34))
def test_every_rank_sends_two_vectors_but_for_the_roots(all_reduce, size) -> None:
    ledger = all_reduce(DoubleBinaryTree(2), size, 8 * UNIT).ledger
    half = 4 * UNIT
    assert ledger.total_bytes == 4 * (size - 1) * half
    for rank in range(size):
        branches = [
            (len(place.children), place.parent is not None) for place in two_trees(rank, size)
        ]
        halves = sum(children + has_parent for children, has_parent in branches)
        assert ledger.sent_by(rank) == ledger.received_by(rank) == halves * half
        assert halves <= 4


@pytest.mark.parametrize("size", range(2, 34))
def test_inner_nodes_of_one_tree_are_leaves_of_the_other(size) -> None:
    places = [two_trees(rank, size) for rank in range(size)]
    for first, second in places[: size - size % 2]:
        assert bool(first.children) != bool(second.children)
    for tree in (0, 1):
        check_tree([place[tree] for place in places])


def check_tree(places: list[TreePosition]) -> None:
    assert sum(place.parent is None for place in places) == 1
    for rank, place in enumerate(places):
        for child, below in zip(place.children, place.below):
            assert places[child].parent == rank
            assert child in below
            assert rank not in below
        if place.parent is None:
            assert sorted([rank, *(r for below in place.below for r in below)]) == list(
                range(len(places))
            )


def test_the_number_of_blocks_follows_from_the_vector(all_reduce) -> None:
    def messages(size_bytes: int) -> int:
        ledger = all_reduce(DoubleBinaryTree(), 2, size_bytes).ledger
        return ledger.total_messages // 4  # two halves, up and down

    assert messages(4) == messages(1 << 18) == 1
    assert messages(8 << 18) == 4
    assert messages(200 << 18) == 64


def test_a_negative_number_of_blocks_is_refused() -> None:
    with pytest.raises(NotationError, match="blocks is positive"):
        ARCHITECTURE.parse("double_binary_tree(-1)")
