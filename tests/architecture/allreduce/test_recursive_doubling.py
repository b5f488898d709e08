"""Table 6 of the survey: log2(n) (a + bN)."""

import math

import pytest

from gradwire.architecture.allreduce.recursive_doubling import RecursiveDoubling
from sampling import sizes

N = 4000


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16, 32])
def test_powers_of_two_take_the_time_of_table_6(all_reduce, size, latency) -> None:
    engine = all_reduce(RecursiveDoubling(), size, N, latency, bandwidth=N)
    expected = math.log2(size) * (latency + 1)
    assert engine.clocks == pytest.approx([expected] * size, rel=1e-9)


@pytest.mark.parametrize("size", [n for n in range(3, 35) if n & (n - 1)])
def test_other_sizes_take_the_time_of_their_formula(all_reduce, size, latency) -> None:
    engine = all_reduce(RecursiveDoubling(), size, N, latency, bandwidth=N)
    rounds = math.floor(math.log2(size))
    excess = size - 2**rounds
    delayed = (math.ceil(math.log2(excess)) + 2) * latency + rounds + 2
    expected = max((rounds + 1) * (latency + 1), delayed)
    assert engine.now == pytest.approx(expected, rel=1e-9)
    if excess > 2 ** (rounds - 1):  # as Thakur et al. count it
        assert engine.now == pytest.approx((rounds + 2) * (latency + 1), rel=1e-9)


@pytest.mark.parametrize("size", sizes(range(1, 18)))
def test_a_rank_sends_its_vector_in_every_round(all_reduce, size) -> None:
    ledger = all_reduce(RecursiveDoubling(), size, N).ledger
    rounds = size.bit_length() - 1
    excess = size - 2**rounds
    for rank in range(size):
        # The first come in pairs, and the odd one leaves the rounds to the even one.
        paired = rank < 2 * excess
        vectors = 1 if paired and rank % 2 else rounds + paired
        assert ledger.sent_by(rank) == ledger.received_by(rank) == vectors * N
