"""Count sketch: linear, finds heavy hitters, applies exact means."""

import pytest
import torch

from gradwire.architecture.allreduce.allreduce import AllReduce
from gradwire.architecture.allreduce.ring import Ring
from gradwire.compression import COMPRESSION
from gradwire.compression.feedback.ef import EF
from gradwire.compression.sparsification.countsketch import CountSketch
from gradwire.core.errors import NonFiniteError
from gradwire.core.key import Key
from gradwire.kernels.reference.sketch import _hashed

KEY = Key(3, step=5)
NUMEL = 5000


def noise(rank: int, step: int = 0, numel: int = NUMEL):
    return Key(2).at(step).private(rank).normal(numel).double()


def heavy(size: int, num_heavy: int = 50):
    """Noise of which the workers' mean has `num_heavy` elements far above the rest."""
    where = Key(6).permutation(NUMEL)[:num_heavy]
    inputs = []
    for rank in range(size):
        x = 0.1 * noise(rank)
        x[where] += 10.0 + 4.0 * (-1) ** rank
        inputs.append([x])
    return inputs, where.sort().values


def test_sketches_add() -> None:
    codec = CountSketch(5, columns=100, density=0.01)
    x, y = noise(0), noise(1)
    total = codec.sketch(x, KEY) + 2 * codec.sketch(y, KEY)
    assert torch.allclose(codec.sketch(x + 2 * y, KEY), total, rtol=0, atol=1e-11)
    assert codec.sketch(x, KEY).shape == (5, 100)


def test_an_element_goes_to_one_column_of_each_row_with_one_sign() -> None:
    codec = CountSketch(3, columns=17, density=0.1)
    table = codec.sketch(torch.eye(40, dtype=torch.float64)[7], KEY)
    assert table.abs().sum(dim=1).tolist() == [1, 1, 1]
    assert codec.estimates(table, 40, KEY)[7] == 1


def test_columns_and_signs_are_even() -> None:
    counts, totals = torch.zeros(10), 0.0
    for step in range(100):  # a single row is far more even than that
        codec, key = CountSketch(1, columns=10, density=0.1), KEY.at(step)
        table = codec.sketch(torch.ones(1000), key)
        assert float(table.sum()) % 2 == 0
        totals += float(table.sum())
        places, _ = _hashed(1000, codec._hashes(key, torch.device("cpu")), 10)
        counts += torch.bincount(places.reshape(-1), minlength=10)
    assert (counts - 10_000).abs().max() < 6 * 95  # six standard deviations
    assert abs(totals) < 6 * 1000**0.5 * 100**0.5


def test_pairs_of_elements_are_hashed_independently() -> None:
    # In a fraction 1 / columns of all draws two elements meet, with the same sign in half of them.
    codec, met, same = CountSketch(1, columns=8, density=0.1), 0, 0
    for step in range(4000):
        places, signs = _hashed(1001, codec._hashes(KEY.at(step), torch.device("cpu")), 8)
        if places[0, 3] == places[0, 1000]:
            met += 1
            same += int(signs[0, 3] == signs[0, 1000])
    assert abs(met - 500) < 6 * (4000 * 7 / 64) ** 0.5
    assert abs(same - met / 2) < 6 * (met / 4) ** 0.5


def test_the_error_of_an_estimate_is_that_of_the_theorem() -> None:
    codec = CountSketch(5, columns=400, density=0.01)
    x = noise(0)
    errors = (codec.estimates(codec.sketch(x, KEY), NUMEL, KEY) - x).abs()
    # One row: variance |x|^2 / columns. A median of five errs by 3 of its deviations in < 1%.
    assert (errors > 3 * x.norm() / 400**0.5).double().mean() < 0.01
    assert (errors < x.norm() / 400**0.5).double().mean() > 0.6


@pytest.mark.parametrize("architecture", [AllReduce(), Ring()], ids=repr)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_heavy_hitters_are_found_and_their_means_are_exact(reduce, size, architecture) -> None:
    inputs, where = heavy(size)
    results, _ = reduce(
        CountSketch(5, columns=400, density=0.01), inputs, architecture=architecture
    )
    exact = torch.stack([x for (x,) in inputs])
    for rank, (result,) in enumerate(results):
        assert torch.equal(result.mean.nonzero().reshape(-1), where)
        mean = exact.mean(dim=0)[where]
        assert torch.allclose(result.mean[where], mean, rtol=1e-14, atol=0)
        assert torch.equal(result.own()[where], exact[rank, where])


@pytest.mark.parametrize("size", [2, 3])
def test_a_sketch_and_the_candidates_travel(reduce, size) -> None:
    inputs = [[x.float()] for (x,) in heavy(size)[0]]
    _, engine = reduce(CountSketch(5, columns=400, density=0.01), inputs, architecture=Ring())
    assert engine.ledger.total_bytes == 2 * (size - 1) * 4 * (5 * 400 + 4 * 50)


def test_a_vector_shorter_than_its_sketch_travels_itself(reduce) -> None:
    inputs = [[noise(rank, numel=300)] for rank in range(2)]
    results, engine = reduce(CountSketch(5, columns=100, density=0.1), inputs)
    assert engine.ledger.total_bytes == 2 * 8 * 300
    mean = (inputs[0][0] + inputs[1][0]) / 2
    kept = mean.abs().topk(30).indices
    assert torch.equal(results[0][0].mean[kept], mean[kept])
    assert results[0][0].mean.count_nonzero() == 30


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("columns", [100, 10_000])
def test_with_feedback_nothing_is_lost(reduce, size, columns) -> None:
    inputs = [[noise(rank, step) for step in range(6)] for rank in range(size)]
    results, _ = reduce(EF(CountSketch(3, columns, density=0.01)), inputs)
    applied = size * sum(result.mean for result in results[0])
    held = sum(steps[-1].state["residual"] for steps in results)
    everything = sum(x for steps in inputs for x in steps)
    assert torch.allclose(applied + held, everything, rtol=0, atol=1e-12)
    assert held.abs().max() > 0.1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_any_dtype_and_shape(reduce, dtype) -> None:
    x = (1e4 * noise(0, numel=1200)).clamp(-6e4, 6e4).to(dtype).reshape(30, 40)
    results, _ = reduce(EF(CountSketch(3, columns=50, density=0.1)), [[x, x]] * 2)
    for result in results[0]:
        assert (result.mean.shape, result.mean.dtype) == (x.shape, dtype)
        assert torch.isfinite(result.mean).all()
        assert result.own().shape == x.shape
    results, _ = reduce(CountSketch(3, columns=50, density=0.1), [[torch.zeros(0)]] * 2)
    assert results[0][0].mean.shape == (0,)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("countsketch(4, 10, 0.1)", "rows must be odd"),
        ("countsketch(0, 10, 0.1)", "rows must be odd"),
        ("countsketch(3, 0, 0.1)", "columns must lie"),
        ("countsketch(3, 10, 2.0)", "density"),
        ("countsketch(3, 10, 0.1, oversample=0)", "oversample"),
        ("countsketch(3, 10)", "needs density"),
    ],
)
def test_nonsense_is_refused(text, message) -> None:
    with pytest.raises(ValueError, match=message):
        COMPRESSION.parse(text)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_refused(reduce, bad) -> None:
    x = torch.ones(40, 40)
    x[3, 3] = bad
    with pytest.raises(NonFiniteError):
        reduce(CountSketch(3, columns=20, density=0.1), [[x]])
    with pytest.raises(NonFiniteError):
        reduce(EF(CountSketch(3, columns=20, density=0.1)), [[x]])
