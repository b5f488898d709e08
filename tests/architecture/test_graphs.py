"""Mixing matrices: all are doubly stochastic, and their spectral gaps have closed forms."""

import math
from contextlib import suppress
from functools import reduce
from itertools import permutations

import numpy as np
import pytest
import torch

from gradwire.architecture import ARCHITECTURE
from gradwire.architecture.graphs import (
    GRAPHS,
    Graph,
    check_doubly_stochastic,
    describe,
    metropolis_hastings,
    spectral_gap,
)
from gradwire.architecture.graphs.complete import Complete
from gradwire.architecture.graphs.exponential import Exponential
from gradwire.architecture.graphs.from_file import FromFile
from gradwire.architecture.graphs.hypercube import Hypercube
from gradwire.architecture.graphs.matching import Matching
from gradwire.architecture.graphs.one_peer_exponential import OnePeerExponential
from gradwire.architecture.graphs.random_regular import RandomRegular
from gradwire.architecture.graphs.ring import Ring
from gradwire.architecture.graphs.star import Star
from gradwire.architecture.graphs.torus import Torus
from gradwire.core.errors import NotationError

SIZES = [*range(1, 18), 24, 32]
MADE = [  # all that need no file
    GRAPHS.parse(text) for cls in GRAPHS if cls is not FromFile for text in cls.examples
]


def possible(graph: Graph, size: int) -> bool:
    if isinstance(graph, Hypercube):
        return size.bit_count() == 1
    if isinstance(graph, RandomRegular):
        return size == 1 or graph.degree < size
    return True


def neighbours(matrix: torch.Tensor) -> list[int]:
    """How many each rank hears."""
    return (matrix > 0).fill_diagonal_(False).sum(dim=1).tolist()


# Laws.


def test_every_graph_of_the_survey_has_a_name() -> None:
    assert GRAPHS.builtin_names() == [
        "complete",
        "exponential",
        "from_file",
        "hypercube",
        "matching",
        "one_peer_exponential",
        "random_regular",
        "ring",
        "star",
        "torus",
    ]
    assert "torus" not in ARCHITECTURE
    assert ARCHITECTURE["ring"] is not GRAPHS["ring"]


@pytest.mark.parametrize("cls", list(GRAPHS), ids=lambda cls: cls.__name__)
def test_they_read_back_from_what_they_write(cls) -> None:
    assert cls.examples
    assert cls.summary()
    for text in cls.examples:
        graph = GRAPHS.parse(text)
        assert type(graph) is cls
        assert GRAPHS.parse(repr(graph)) == graph


@pytest.mark.parametrize("graph", MADE, ids=repr)
def test_all_are_doubly_stochastic_and_as_they_say(graph) -> None:
    for size in SIZES:
        if not possible(graph, size):
            continue
        for step in range(6):
            matrix = graph.matrix(size, step)
            assert matrix.shape == (size, size)
            assert matrix.dtype == torch.float64
            assert bool((matrix >= -1e-15).all())
            assert bool((matrix.diagonal() > 0).all())  # everyone hears itself
            ones = torch.ones(size, dtype=torch.float64)
            torch.testing.assert_close(matrix.sum(dim=1), ones, rtol=0, atol=1e-14)
            torch.testing.assert_close(matrix.sum(dim=0), ones, rtol=0, atol=1e-14)
            if not graph.directed:
                assert torch.equal(matrix, matrix.T)
            if not graph.varies:
                assert torch.equal(matrix, graph.matrix(size))
        assert 0 < graph.spectral_gap(size) <= 1
        assert describe(graph, size).startswith(f"{graph!r} of {size}: doubly stochastic")


@pytest.mark.parametrize("graph", MADE, ids=repr)
def test_gossip_reaches_the_mean(graph) -> None:
    size = 8
    x = torch.arange(8.0, dtype=torch.float64)
    for step in range(400):
        x = graph.matrix(size, step) @ x
    torch.testing.assert_close(x, torch.full_like(x, 3.5), rtol=0, atol=1e-8)


@pytest.mark.parametrize("graph", MADE, ids=repr)
def test_bad_sizes_and_steps_are_refused(graph) -> None:
    with pytest.raises(ValueError, match="at least one worker, got 0"):
        graph.matrix(0)
    with pytest.raises(ValueError, match="step must not be negative"):
        graph.matrix(4, -1)


def test_the_weights_of_metropolis_and_hastings() -> None:
    """A path of three: degrees 1, 2, 1."""
    path = torch.tensor([[0, 1, 0], [1, 0, 1], [0, 1, 0]], dtype=torch.bool)
    expected = torch.tensor([[2, 1, 0], [1, 1, 1], [0, 1, 2]], dtype=torch.float64) / 3
    torch.testing.assert_close(metropolis_hastings(path), expected)


# Closed forms.


def gap_by_eigenvalues(matrix: torch.Tensor) -> float:
    return 1 - torch.linalg.eigvalsh(matrix).abs().sort().values[-2].item()


@pytest.mark.parametrize("size", range(3, 20))
def test_ring(size) -> None:
    matrix = Ring().matrix(size)
    assert neighbours(matrix) == [2] * size
    torch.testing.assert_close(matrix[matrix > 0], torch.full((3 * size,), 1 / 3).double())
    gap = 2 / 3 * (1 - math.cos(2 * math.pi / size))
    assert spectral_gap(matrix) == pytest.approx(gap)
    assert gap_by_eigenvalues(matrix) == pytest.approx(gap)
    assert Ring().spectral_gap(size) == pytest.approx(gap)


def test_two_workers_form_the_mean_on_every_graph() -> None:
    for graph in (*MADE, RandomRegular(1)):
        if possible(graph, 2):
            assert graph.matrix(2).tolist() == [[0.5, 0.5], [0.5, 0.5]]
            assert graph.spectral_gap(2) == 1


@pytest.mark.parametrize(("size", "longer"), [(9, 3), (12, 4), (16, 4), (20, 5), (30, 6), (36, 6)])
def test_torus(size, longer) -> None:
    matrix = Torus().matrix(size)
    assert neighbours(matrix) == [4] * size
    assert spectral_gap(matrix) == pytest.approx(2 / 5 * (1 - math.cos(2 * math.pi / longer)))


def test_a_torus_of_a_prime_number_is_a_ring() -> None:
    for size in (1, 2, 3, 5, 7, 13):
        torch.testing.assert_close(Torus().matrix(size), Ring().matrix(size))


def test_a_torus_of_six_is_a_prism() -> None:
    """2 x 3: the other row is heard once, not twice."""
    matrix = Torus().matrix(6)
    assert neighbours(matrix) == [3] * 6
    assert matrix[0].nonzero().flatten().tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("size", [1, 2, 3, 8, 17])
def test_complete_is_the_mean(size) -> None:
    matrix = Complete().matrix(size)
    torch.testing.assert_close(matrix, torch.full_like(matrix, 1 / size))
    assert spectral_gap(matrix) == 1


@pytest.mark.parametrize("size", [3, 4, 8, 17])
def test_star(size) -> None:
    matrix = Star().matrix(size)
    assert neighbours(matrix) == [size - 1] + [1] * (size - 1)
    assert spectral_gap(matrix) == pytest.approx(1 / size)


@pytest.mark.parametrize("bits", range(1, 7))
def test_hypercube(bits) -> None:
    matrix = Hypercube().matrix(2**bits)
    assert neighbours(matrix) == [bits] * 2**bits
    assert spectral_gap(matrix) == pytest.approx(2 / (bits + 1))


@pytest.mark.parametrize("size", [3, 6, 12])
def test_a_hypercube_needs_a_power_of_two(size) -> None:
    with pytest.raises(ValueError, match=f"power of two of workers, got {size}. Take"):
        Hypercube().matrix(size)


@pytest.mark.parametrize("size", range(2, 34))
def test_exponential(size) -> None:
    """Ying et al. 2021, prop. 1: the gap is 2 / (ceil(log2 n) + 1) for an even n, above for odd."""
    matrix = Exponential().matrix(size)
    peers = math.ceil(math.log2(size))
    assert neighbours(matrix) == [peers] * size
    if size % 2 == 0:
        assert spectral_gap(matrix) == pytest.approx(2 / (peers + 1))
    else:
        assert spectral_gap(matrix) > 2 / (peers + 1)


def test_exponential_sends_forward() -> None:
    """Rank 0 of 6 sends to 1, 2 and 4: they hear it."""
    heard_from_0 = Exponential().matrix(6)[:, 0]
    assert heard_from_0.tolist() == [0.25, 0.25, 0.25, 0, 0.25, 0]
    assert Exponential().directed


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16, 32])
@pytest.mark.parametrize("start", [0, 1, 5])
def test_one_peer_exponential_averages_exactly(size, start) -> None:
    """Ying et al. 2021, lemma 1: any log2 n steps in a row give the mean."""
    graph = OnePeerExponential()
    steps = range(start, start + size.bit_length() - 1)
    identity = torch.eye(size, dtype=torch.float64)
    product = reduce(lambda so_far, step: graph.matrix(size, step) @ so_far, steps, identity)
    torch.testing.assert_close(product, torch.full_like(product, 1 / size), rtol=0, atol=1e-15)
    assert graph.spectral_gap(size) == 1


def test_one_peer_exponential_changes_its_peer() -> None:
    graph = OnePeerExponential()
    heard_by = [graph.matrix(8, step)[:, 0].nonzero().flatten().tolist() for step in range(4)]
    assert heard_by == [[0, 1], [0, 2], [0, 4], [0, 1]]
    assert graph.varies


@pytest.mark.parametrize("size", [3, 5, 6, 7, 12])
def test_one_peer_exponential_does_not_average_other_numbers_exactly(size) -> None:
    assert 0 < OnePeerExponential().spectral_gap(size) < 1


# Random graphs.


@pytest.mark.parametrize(
    ("size", "degree"), [(2, 1), (3, 2), (9, 2), (40, 2), (10, 3), (6, 5), (7, 4), (64, 4)]
)
def test_random_regular(size, degree) -> None:
    graph = RandomRegular(degree)
    assert neighbours(graph.matrix(size)) == [degree] * size
    assert spectral_gap(graph.matrix(size)) > 1e-3  # so it is connected


def test_random_regular_is_decided_by_its_seed() -> None:
    def drawn(seed: int) -> torch.Tensor:
        return RandomRegular(3, seed).weights(16, 0)  # made anew, not kept

    assert torch.equal(drawn(0), drawn(0))
    assert len({tuple(drawn(seed).flatten().tolist()) for seed in range(10)}) == 10


def test_random_regular_graphs_are_about_equally_likely() -> None:
    """On six vertices 70 labelled cubic graphs: 60 prisms and 10 of K_{3,3}."""
    bipartite = 0
    for seed in range(300):
        adjacency = (RandomRegular(3, seed).weights(6, 0) > 0).fill_diagonal_(False).double()
        bipartite += not torch.linalg.matrix_power(adjacency, 3).diagonal().any()  # no triangle
    assert bipartite / 300 == pytest.approx(1 / 7, abs=0.06)  # three standard deviations


def test_random_regular_refuses_the_impossible() -> None:
    with pytest.raises(ValueError, match=r"random_regular\(4\): 4 workers have at most 3"):
        RandomRegular(4).matrix(4)
    with pytest.raises(ValueError, match="an odd number"):
        RandomRegular(3).matrix(7)
    with pytest.raises(ValueError, match="fall into pairs that never agree"):
        RandomRegular(1).matrix(6)
    with pytest.raises(NotationError, match="degree must be at least 1, got 0"):
        GRAPHS.parse("random_regular(0)")
    with pytest.raises(NotationError, match="seed must lie in"):
        GRAPHS.parse("random_regular(3, seed=-1)")


@pytest.mark.parametrize("size", [2, 3, 8, 9])
def test_matching_is_of_pairs(size) -> None:
    for step in range(10):
        matrix = Matching().matrix(size, step)
        assert sorted(neighbours(matrix)) == [0] * (size % 2) + [1] * (size - size % 2)
        torch.testing.assert_close(matrix @ matrix, matrix)  # a projection


def test_matching_is_new_in_each_step_and_decided_by_its_seed() -> None:
    drawn = {tuple(Matching(1).weights(16, step).flatten().tolist()) for step in range(20)}
    assert len(drawn) == 20
    assert torch.equal(Matching(1).weights(16, 3), Matching(1).weights(16, 3))
    assert not torch.equal(Matching(1).weights(16, 3), Matching(2).weights(16, 3))


@pytest.mark.parametrize("size", [3, 4, 5, 6])
def test_the_gap_of_matching_is_that_of_its_expectation(size) -> None:
    """Over all orders in which the workers can be paired."""
    total = torch.zeros(size, size, dtype=torch.float64)
    orders = list(permutations(range(size)))
    for order in orders:
        matrix = torch.eye(size, dtype=torch.float64)
        for a, b in zip(order[::2], order[1::2]):
            matrix[[a, a, b, b], [a, b, a, b]] = 0.5
        total += matrix.T @ matrix
    expected = 1 - math.sqrt(1 - spectral_gap(total / len(orders)))
    assert Matching().spectral_gap(size) == pytest.approx(expected)


def test_every_pair_meets_equally_often() -> None:
    mean = sum(Matching().weights(5, step) for step in range(2000)) / 2000
    expected = torch.full((5, 5), 0.1).double() + 0.5 * torch.eye(5).double()
    torch.testing.assert_close(mean, expected, rtol=0, atol=0.02)


# Files.


def written(tmp_path, text: str, name: str = "weights.csv") -> FromFile:
    (tmp_path / name).write_text(text)
    return FromFile(str(tmp_path / name))


def test_a_text_file(tmp_path) -> None:
    graph = written(tmp_path, "# a path\n2/3, 1/3, 0\n1/3 1/3 1/3  # the middle\n\n0,1/3,2/3\n")
    expected = torch.tensor([[2, 1, 0], [1, 1, 1], [0, 1, 2]], dtype=torch.float64) / 3
    assert torch.equal(graph.matrix(3), expected)
    assert torch.equal(graph.matrix(3, 17), expected)
    assert not graph.directed
    assert not graph.varies
    assert GRAPHS.parse(repr(graph)) == graph
    assert describe(graph, 3).endswith("doubly stochastic, spectral gap 0.333, 1 to 2 neighbours")


def test_an_array_and_a_directed_graph(tmp_path) -> None:
    array = np.array([[0.5, 0.5, 0], [0, 0.5, 0.5], [0.5, 0, 0.5]])
    np.save(tmp_path / "w.npy", array)
    graph = FromFile(str(tmp_path / "w.npy"))
    assert graph.matrix(3).tolist() == array.tolist()
    assert graph.directed
    assert "directed" in describe(graph, 3)


def test_missing_digits_are_made_up(tmp_path) -> None:
    graph = written(tmp_path, "0.3333333 0.3333333 0.3333333\n" * 3)
    matrix = graph.matrix(3)
    assert (matrix.sum(dim=0) - 1).abs().max() < 1e-12
    assert (matrix.sum(dim=1) - 1).abs().max() < 1e-12
    assert torch.equal(matrix, matrix.T)
    np.save(tmp_path / "single.npy", Ring().matrix(7).numpy().astype(np.float32))
    again = FromFile(str(tmp_path / "single.npy")).matrix(7)
    torch.testing.assert_close(again, Ring().matrix(7), rtol=0, atol=1e-7)
    assert (again.sum(dim=1) - 1).abs().max() < 1e-12


def test_a_file_that_changed_is_read_again(tmp_path) -> None:
    assert written(tmp_path, "0.5 0.5\n0.5 0.5").matrix(2)[0, 0] == 0.5
    assert written(tmp_path, "0.75 0.25\n0.25 0.75").matrix(2)[0, 0] == 0.75


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("0.5 0.5\n0.5 0.4", r"column 1 \(counted from 0\) sums to 0.9, must be 1"),
        ("0.9 0.1\n0.9 0.1", r"column 0 \(counted from 0\) sums to 1.8, must be 1"),
        ("1.5 -0.5\n-0.5 1.5", "not negative, but that of row 0, column 1 is -0.5"),
        ("nan 1\n1 0", "finite and not negative, but that of row 0, column 0 is nan"),
        ("1 0\n0 1", "workers would never agree, the second largest eigenvalue is 1"),
        ("0 1\n1 0", "workers would never agree"),
        ("0.5 0.5", r"is square, got shape \[1, 2\]"),
        ("0.5 0.5\n1", "line 2 has 1 numbers, the first row 2"),
        ("0.5 0.5\n0.5 half", "line 2 is not a row of numbers: '0.5 half'"),
        ("1/0 1", "line 1 is not a row of numbers"),
        ("# nothing\n", "has no rows"),
    ],
)
def test_a_wrong_file_says_where(tmp_path, text, reason) -> None:
    graph = written(tmp_path, text)
    with pytest.raises(ValueError, match=reason) as caught:
        graph.matrix(2)
    assert "weights.csv" in str(caught.value)


def test_other_wrong_files(tmp_path) -> None:
    with pytest.raises(ValueError, match="there is no such file"):
        FromFile(str(tmp_path / "none.csv")).matrix(2)
    graph = written(tmp_path, "0.5 0.5\n0.5 0.5")
    with pytest.raises(ValueError, match="is a matrix for 2 workers, but there are 3"):
        graph.matrix(3)
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="is not text"):
        FromFile(str(tmp_path / "binary.csv")).matrix(2)


def test_wrong_arrays(tmp_path) -> None:
    path = tmp_path / "w.npy"
    for array in (np.ones(3), np.eye(2, dtype=complex), np.ones((0, 0)), np.array([["a"]])):
        np.save(path, array)
        with pytest.raises(ValueError, match="expected real numbers of shape"):
            FromFile(str(path)).matrix(2)
    np.save(path, np.array([[{}]], dtype=object), allow_pickle=True)
    with pytest.raises(ValueError, match="not an array of numbers"):
        FromFile(str(path)).matrix(1)
    np.savez(tmp_path / "many.npz", np.eye(2))
    path.write_bytes((tmp_path / "many.npz").read_bytes())
    with pytest.raises(ValueError, match="not an array of numbers"):
        FromFile(str(path)).matrix(2)


def test_damaged_arrays_are_refused_and_nothing_else_happens(tmp_path) -> None:
    np.save(tmp_path / "w.npy", np.full((2, 2), 0.5))
    whole = (tmp_path / "w.npy").read_bytes()
    generator = np.random.default_rng(0)
    damaged = [whole[:length] for length in range(0, len(whole), 7)]
    damaged += [whole.replace(b"(2, 2)", b"(9, 9)"), whole.replace(b"(2, 2)", b"(2**9)")]
    for _ in range(150):
        bits = bytearray(whole)
        bits[generator.integers(len(whole))] ^= 1 << int(generator.integers(8))
        damaged.append(bytes(bits))
    for number, content in enumerate(damaged):
        path = tmp_path / f"{number}.npy"
        path.write_bytes(content)
        with suppress(ValueError):  # some bits do not matter
            FromFile(str(path)).matrix(2)


# What is checked and printed.


def test_check_doubly_stochastic() -> None:
    check_doubly_stochastic(Ring().matrix(5), "ring")
    with pytest.raises(ValueError, match=r"mine: column 0 \(counted from 0\) sums to 2"):
        check_doubly_stochastic(torch.ones(2, 2), "mine")
    only_columns = torch.tensor([[0.5, 0.25], [0.5, 0.75]])
    with pytest.raises(ValueError, match=r"mine: row 0 \(counted from 0\) sums to 0.75.*sgp"):
        check_doubly_stochastic(only_columns, "mine")
    with pytest.raises(ValueError, match="mine: a mixing matrix is square"):
        check_doubly_stochastic(torch.ones(4), "mine")


def test_a_file_may_hold_columns_of_sum_one_for_push_sum(tmp_path) -> None:
    path = tmp_path / "weights.csv"
    path.write_text("1/2, 0, 1/3\n1/2, 1/2, 1/3\n0, 1/2, 1/3\n")
    graph = FromFile(str(path))
    assert torch.allclose(graph.matrix(3).sum(dim=0), torch.ones(3, dtype=torch.float64))
    assert graph.directed
    assert "columns sum to one, rows do not (for sgp), directed" in describe(graph, 3)
    ARCHITECTURE.parse(f'gossip(from_file("{path}"), sgp)').check(3)
    with pytest.raises(ValueError, match=r"row 0 .* sums to 0.8333333, must be 1.*sgp"):
        ARCHITECTURE.parse(f'gossip(from_file("{path}"))').check(3)


def test_the_gap_of_what_mixes_nothing_is_zero() -> None:
    assert spectral_gap(torch.eye(3, dtype=torch.float64)) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize(
    ("graph", "size", "text"),
    [
        (Ring(), 8, "ring of 8: doubly stochastic, spectral gap 0.195, 2 neighbours"),
        (Star(), 4, "star of 4: doubly stochastic, spectral gap 0.25, 1 to 3 neighbours"),
        (
            Exponential(),
            8,
            "exponential of 8: doubly stochastic, directed, spectral gap 0.5, 3 neighbours",
        ),
        (
            OnePeerExponential(),
            8,
            "one_peer_exponential of 8: doubly stochastic, directed, the exact mean after "
            "3 steps, 1 neighbour in each step",
        ),
        (
            Matching(7),
            8,
            "matching(7) of 8: doubly stochastic, spectral gap 0.345 expected per step, "
            "1 neighbour in each step",
        ),
    ],
    ids=repr,
)
def test_describe(graph, size, text) -> None:
    assert describe(graph, size) == text
