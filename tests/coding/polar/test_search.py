"""Drawn decisions, the exact f and lists."""

import itertools
import math

import pytest
import torch

from gradwire import kernels
from gradwire.coding.polar import PolarCompressor, free_positions, search
from gradwire.core.key import Key
from gradwire.kernels.native import _library


def random_bits(blocks: int, n: int, seed: int = 1) -> torch.Tensor:
    return (Key(seed).words(blocks * n) & 1).to(torch.uint8).view(blocks, n)


def distortion(compressor: PolarCompressor, blocks: int) -> float:
    bits = random_bits(blocks, compressor.N)
    return float((compressor.decompress(compressor.compress(bits)) != bits).double().mean())


def found_for(llr: torch.Tensor, n: int, k: int, f: str = "corrected", size: int = 1):
    return search.quantise(llr, free_positions(n, k), f, False, size, Key(0))


@pytest.mark.parametrize("f", ["corrected", "minsum"])
def test_a_list_of_one_is_the_kernel(f) -> None:
    for k in (13, 128, 220):
        compressor = PolarCompressor(256, k, f=f)
        llr = 2 * Key(k).normal(100 * 256).view(100, 256)
        found = found_for(llr, 256, k, f)
        assert torch.equal(found, compressor.decompress(compressor.compress_llr(llr)))


def test_the_exact_f_is_the_exact_f() -> None:
    tree = search._CodewordSearch([], "exact", False, 1, Key(0))
    a, b = 3 * Key(1).normal(1000), 3 * Key(2).normal(1000)
    exact = 2 * torch.atanh(torch.tanh(a.double() / 2) * torch.tanh(b.double() / 2))
    assert torch.allclose(tree._f(torch.stack([a, b]))[0].double(), exact, atol=1e-5)
    far = tree._f(torch.tensor([[80.0], [-90.0]]))
    assert float(far) == pytest.approx(-80.0)


def test_the_exact_f_finds_nearly_what_integers_find() -> None:
    exact = distortion(PolarCompressor(256, 128, f="exact"), 512)
    assert exact == pytest.approx(distortion(PolarCompressor(256, 128), 512), abs=0.001)


@pytest.mark.parametrize("f", ["exact", "corrected"])
def test_drawn_decisions_are_worse_than_hard_ones(f) -> None:
    for k in (64, 128, 192):
        drawn = distortion(PolarCompressor(256, k, decision="randomized", f=f), 512)
        assert drawn > distortion(PolarCompressor(256, k, f=f), 512) + 0.001


def test_drawn_decisions_depend_on_the_key_alone() -> None:
    compressor = PolarCompressor(256, 128, decision="randomized")
    bits = random_bits(20, 256)
    one, same, other = (compressor.compress(bits, Key(seed)) for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_drawn_decisions_follow_the_posterior() -> None:
    # All free: the codeword's bits are independent, each zero with probability 1 / (1 + e^-llr).
    free = torch.ones(64, dtype=torch.bool)
    for f in ("exact", "corrected"):
        llr = torch.full((4096, 64), 0.5)
        found = search.quantise(llr, free, f, True, 1, Key(4))
        assert float(found.double().mean()) == pytest.approx(1 / (1 + math.exp(0.5)), abs=0.004)


@pytest.mark.parametrize(
    ("rate", "goal", "construction"),
    [
        (0.1, 0.3261, "tal_vardy"),
        (0.3, 0.1990, "monte_carlo"),
        (0.5, 0.1181, "monte_carlo"),
        (0.7, 0.0597, "monte_carlo"),
        (0.9, 0.0165, "monte_carlo"),
    ],
)
def test_a_list_of_eight_is_as_near_as_was_promised(rate, goal, construction) -> None:
    compressor = PolarCompressor(1024, round(rate * 1024), construction, list_size=8)
    assert distortion(compressor, 512) <= goal + 0.0003


@pytest.mark.few(2)
@pytest.mark.parametrize("f", ["corrected", "minsum"])
@pytest.mark.parametrize("size", [2, 4, 8, 16, 32])
def test_lists_in_c_find_what_lists_in_torch_find(size, f) -> None:
    for n, k in ((64, 5), (64, 40), (256, 128), (256, 240), (128, 128)):
        for blocks, scale in ((1, 1.0), (70, 0.3), (66, 8.0)):
            llr = scale * Key(k).normal(blocks * n).view(blocks, n)
            expected = search.in_torch(llr, free_positions(n, k), f, False, size, Key(0))
            assert torch.equal(found_for(llr, n, k, f, size), expected)


@pytest.mark.parametrize("level", [0, 1])
def test_lists_in_c_do_not_depend_on_the_instructions(level) -> None:
    if kernels.backend() != "native":
        pytest.skip("the C library was not built")
    llr = Key(1).normal(70 * 128).view(70, 128)
    library = _library.load()
    expected = found_for(llr, 128, 60, size=8)
    library.gw_polar_widest(level)
    try:
        assert torch.equal(found_for(llr, 128, 60, size=8), expected)
    finally:
        library.gw_polar_widest(2)


def test_longer_lists_are_better() -> None:
    found = [distortion(PolarCompressor(256, 100, list_size=size), 128) for size in (1, 2, 4, 16)]
    assert found == sorted(found, reverse=True)


@pytest.mark.parametrize("f", ["exact", "minsum"])
def test_lists_take_every_f(f) -> None:
    many = distortion(PolarCompressor(256, 128, f=f, list_size=4), 128)
    assert many < distortion(PolarCompressor(256, 128, f=f), 128) - 0.002


def test_a_list_that_holds_all_words_finds_the_nearest() -> None:
    n, k = 64, 4
    compressor = PolarCompressor(n, k, list_size=16)
    bits = random_bits(50, n)
    words = compressor.decompress(torch.arange(16, dtype=torch.uint8).unsqueeze(1))
    nearest = (bits[:, None] != words[None]).sum(dim=2).amin(dim=1)
    heard = compressor.decompress(compressor.compress(bits))
    assert torch.equal((heard != bits).sum(dim=1), nearest)


@pytest.mark.parametrize(("count", "n"), [(2, 4), (4, 8), (8, 8), (5, 3), (32, 8)])
@pytest.mark.parametrize("parity", [False, True])
def test_the_best_words_are_among_the_patterns(count, n, parity) -> None:
    patterns = search._patterns(count, n, parity)
    for seed in range(20):
        costs = Key(seed).uniform(n).double().sort().values
        every = torch.tensor(list(itertools.product([False, True], repeat=n)))
        for odd in (0, 1) if parity else (None,):
            sets, some = every, patterns
            if odd is not None:
                sets, some = (x[x.sum(dim=1) % 2 == odd] for x in (every, patterns))
            best = (sets.double() @ costs).sort().values[:count]
            found = (some.double() @ costs[: some.shape[1]]).sort().values[: len(best)]
            assert torch.allclose(found, best)
