"""Mikami et al. 2018: 2(cols-1)(a + bN/cols) + 2(rows-1)(a + bN/(rows cols))."""

import pytest

from gradwire.architecture import ARCHITECTURE
from gradwire.architecture.allreduce.torus2d import Torus2d
from gradwire.core.errors import NotationError
from gradwire.core.node import Node

N = 4 * 5040


@pytest.mark.parametrize("rows", range(1, 6))
@pytest.mark.parametrize("cols", range(1, 7))
def test_an_all_reduce_takes_the_time_of_the_formula(all_reduce, rows, cols, latency) -> None:
    size_bytes = 4 * rows * cols * 10
    engine = all_reduce(Torus2d(rows, cols), rows * cols, size_bytes, latency, size_bytes)
    in_rows = 2 * (cols - 1) * (latency + 1 / cols)
    in_columns = 2 * (rows - 1) * (latency + 1 / (rows * cols))
    assert engine.clocks == pytest.approx([in_rows + in_columns] * (rows * cols), rel=1e-9)


@pytest.mark.parametrize(("rows", "cols"), [(1, 5), (2, 2), (3, 4), (4, 4)])
def test_every_rank_sends_twice_the_vector_less_two_shares(all_reduce, rows, cols) -> None:
    size = rows * cols
    ledger = all_reduce(Torus2d(rows, cols), size, N).ledger
    for rank in range(size):
        assert ledger.sent_by(rank) == ledger.received_by(rank) == 2 * (size - 1) * N // size


def test_ranks_send_to_neighbours_only(all_reduce) -> None:
    ledger = all_reduce(Torus2d(3, 4), 12, N).ledger
    for rank in range(12):
        right = rank - rank % 4 + (rank + 1) % 4
        down = (rank + 4) % 12
        used = {other for other in range(12) if ledger.link_messages[rank][other]}
        assert used == {right, down}


def test_it_is_as_square_as_the_number_of_workers_allows() -> None:
    shapes = {size: Torus2d().shape(size) for size in (1, 2, 4, 6, 7, 12, 16, 17)}
    assert shapes == {
        1: (1, 1),
        2: (1, 2),
        4: (2, 2),
        6: (2, 3),
        7: (1, 7),
        12: (3, 4),
        16: (4, 4),
        17: (1, 17),
    }
    assert Torus2d(rows=2).shape(8) == (2, 4)
    assert Torus2d(cols=2).shape(8) == (4, 2)


@pytest.mark.parametrize(
    "text", ["torus2d(2, cols=3)", "torus2d(3)", "torus2d(cols=5)", "torus2d(9)"]
)
def test_a_shape_that_does_not_fit_is_refused(text) -> None:
    architecture = ARCHITECTURE.parse(text)
    for refuse in (lambda: architecture.group(Node(0, 8), "x"), lambda: architecture.check(8)):
        with pytest.raises(ValueError, match="does not fit 8 workers"):
            refuse()


def test_a_negative_shape_is_refused() -> None:
    with pytest.raises(NotationError, match="rows and cols are positive"):
        ARCHITECTURE.parse("torus2d(-1)")
