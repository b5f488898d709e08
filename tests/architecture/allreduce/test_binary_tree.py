"""Table 6 of the survey: 2 log2(n) (a + bN)."""

import math

import pytest

from gradwire.architecture.allreduce.binary_tree import BinaryTree
from sampling import sizes

N = 4000


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16, 32])
def test_powers_of_two_take_the_time_of_table_6(all_reduce, size, latency) -> None:
    engine = all_reduce(BinaryTree(), size, N, latency, bandwidth=N)
    assert engine.now == pytest.approx(2 * math.log2(size) * (latency + 1), rel=1e-9)


@pytest.mark.parametrize("size", [n for n in range(3, 35) if n & (n - 1)])
def test_other_sizes_take_the_time_of_their_formula(all_reduce, size, latency) -> None:
    engine = all_reduce(BinaryTree(), size, N, latency, bandwidth=N)
    rounds = math.floor(math.log2(size))
    excess = size - 2**rounds
    earlier = (rounds - 1 - math.floor(math.log2(excess))) * latency
    expected = 2 * (rounds * latency + rounds + 1) - min(earlier, 1)
    assert engine.now == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("size", sizes(range(1, 18)))
def test_one_vector_goes_along_each_branch_in_each_direction(all_reduce, size) -> None:
    ledger = all_reduce(BinaryTree(), size, N).ledger
    assert ledger.total_bytes == 2 * (size - 1) * N
    # Rank 0 is the partner of 1, 2, 4, ...
    assert ledger.sent_by(0) == ledger.received_by(0) == (size - 1).bit_length() * N
    for rank in range(1, size):
        parent = rank & (rank - 1)
        assert ledger.link_messages[rank][parent] == ledger.link_messages[parent][rank] == 1
