"""PolarCompressor: what travels is a codeword, near the source, the same everywhere."""

import math

import pytest
import torch

from gradwire import kernels
from gradwire.coding.polar import PolarCompressor, free_positions
from gradwire.core.key import Key

RATES = (0.1, 0.3, 0.5, 0.7, 0.9)


def random_bits(blocks: int, n: int, seed: int = 1) -> torch.Tensor:
    return (Key(seed).words(blocks * n) & 1).to(torch.uint8).view(blocks, n)


def distortion(compressor: PolarCompressor, num_bits: int, seed: int = 1) -> float:
    bits = random_bits(num_bits // compressor.N, compressor.N, seed)
    heard = compressor.decompress(compressor.compress(bits))
    return float((heard != bits).to(torch.float64).mean())


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("n", "goals"),
    [
        (256, (0.3406, 0.2155, 0.1329, 0.0695, 0.0199)),
        (512, (0.3379, 0.2103, 0.1286, 0.0671, 0.0185)),
        (1024, (0.3339, 0.2069, 0.1250, 0.0644, 0.0175)),
        (2048, (0.3305, 0.2039, 0.1223, 0.0623, 0.0168)),
        (8192, (0.3264, 0.1993, 0.1182, 0.0593, 0.0157)),
    ],
)
def test_the_distortion_is_what_was_promised(n, goals) -> None:
    if kernels.backend() != "native":
        pytest.skip("takes a minute without the C library")
    for rate, goal in zip(RATES, goals):
        assert distortion(PolarCompressor(n, round(rate * n)), 2**22) <= goal + 0.0003


def test_longer_blocks_are_better() -> None:
    found = [distortion(PolarCompressor(n, n // 2), 2**18) for n in (64, 256, 1024, 4096)]
    assert found == sorted(found, reverse=True)


@pytest.mark.parametrize("frozen", [None, 7])
@pytest.mark.parametrize("k", [1, 13, 64, 100])
def test_a_codeword_comes_back_unchanged(k, frozen) -> None:
    compressor = PolarCompressor(128, k, frozen=frozen)
    packed = Key(3).words(70 * 4).view(torch.uint8).view(70, 16)[:, : compressor.bytes_per_block]
    packed = packed.clone()
    if k % 8:
        packed[:, -1] &= (1 << k % 8) - 1
    heard = compressor.decompress(packed)
    assert torch.equal(compressor.compress(heard), packed)
    assert torch.equal(compressor.compress(heard.to(torch.bool)), packed)


def test_packed_bits_are_the_same_bits() -> None:
    compressor = PolarCompressor(128, 50, frozen=3)
    packed = compressor.compress(random_bits(5, 128))
    bits = compressor.decompress(packed)
    rows = kernels.pack_uints(bits, 1).view(5, 16)
    assert torch.equal(compressor.decompress_packed(packed), rows)


def test_everything_and_nothing() -> None:
    bits = random_bits(3, 64)
    whole = PolarCompressor(64, 64)
    assert torch.equal(whole.decompress(whole.compress(bits)), bits)
    nothing = PolarCompressor(64, 0)
    assert nothing.compress(bits).shape == (3, 0)
    assert not nothing.decompress(nothing.compress(bits)).any()
    coset = PolarCompressor(64, 0, frozen=1)
    assert coset.decompress(coset.compress(bits)).any()
    assert PolarCompressor(64, 32).compress(bits[:0]).shape == (0, 4)
    assert PolarCompressor(64, 32).decompress(bits[:0, :4]).shape == (0, 64)


def test_what_is_sent_are_the_free_inputs() -> None:
    n, k = 64, 20
    compressor, free = PolarCompressor(n, k), free_positions(n, k)
    packed = torch.zeros(k, 3, dtype=torch.uint8)
    for i in range(k):
        packed[i, i // 8] = 1 << i % 8
    heard = compressor.decompress(packed)
    matrix = torch.ones(1, 1, dtype=torch.uint8)
    while len(matrix) < n:
        matrix = torch.kron(torch.tensor([[1, 0], [1, 1]], dtype=torch.uint8), matrix)
    assert torch.equal(heard, matrix[free])


def test_frozen_bits_from_a_seed_are_shared_and_cost_nothing() -> None:
    one, same, other = (PolarCompressor(256, 128, frozen=seed) for seed in (1, 1, 2))
    bits = random_bits(64, 256)
    packed = one.compress(bits)
    assert torch.equal(packed, same.compress(bits))
    assert torch.equal(one.decompress(packed), same.decompress(packed))
    assert not torch.equal(one.decompress(packed), other.decompress(packed))
    assert distortion(one, 2**18) == pytest.approx(
        distortion(PolarCompressor(256, 128), 2**18), abs=0.001
    )


@pytest.mark.parametrize("frozen", [None, 5])
@pytest.mark.parametrize("f", ["corrected", "minsum"])
def test_ratios_of_one_size_are_bits(f, frozen) -> None:
    compressor = PolarCompressor(256, 128, f=f, frozen=frozen)
    bits = random_bits(70, 256)
    llr = (1 - 2 * bits.to(torch.float64)) * 17 / 8
    assert torch.equal(compressor.compress_llr(llr), compressor.compress(bits))


def test_uncertain_positions_give_way() -> None:
    compressor = PolarCompressor(1024, 512)
    bits = random_bits(256, 1024)
    sure = Key(8).words(1024) < 0
    llr = (1 - 2 * bits.to(torch.float32)) * torch.where(sure, 4.0, 0.5)
    wrong = compressor.decompress(compressor.compress_llr(llr)) != bits
    assert float(wrong[:, sure].float().mean()) < 0.08 < float(wrong[:, ~sure].float().mean())


@pytest.mark.parametrize("options", [{}, {"f": "exact"}, {"list_size": 4}, {"frozen": 2}])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_infinite_ratios_are_certain(dtype, options) -> None:
    compressor = PolarCompressor(256, 128, **options)
    llr = Key(5).normal(70 * 256).view(70, 256).to(dtype)
    llr[:, 200:] = 1e300 if dtype == torch.float64 else math.inf
    packed = compressor.compress_llr(llr)
    assert torch.equal(packed, compressor.compress_llr(llr.clamp(max=127 / 8)))
    assert torch.equal(packed, compressor.compress_llr(llr.clamp(max=math.inf)))
    wrong = compressor.decompress(packed)[:, 200:]
    assert float(wrong.double().mean()) < 0.01


def test_backends_and_threads_send_the_same(monkeypatch) -> None:
    bits = random_bits(200, 256)
    llr = Key(2).normal(200 * 256).view(200, 256)
    for options in ({}, {"f": "minsum"}, {"frozen": 4}, {"construction": "tal_vardy"}):
        compressor = PolarCompressor(256, 100, **options)
        before, found = torch.get_num_threads(), []
        try:
            for threads, backend in ((1, ""), (2, ""), (1, "reference")):
                torch.set_num_threads(threads)
                monkeypatch.setenv("GRADWIRE_KERNELS", backend)
                packed = compressor.compress(bits)
                found.append((packed, compressor.decompress(packed), compressor.compress_llr(llr)))
        finally:
            torch.set_num_threads(before)
        for other in found[1:]:
            assert all(torch.equal(a, b) for a, b in zip(found[0], other))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"N": 100, "K": 50}, "power of two"),
        ({"N": 32, "K": 5}, "power of two in 64"),
        ({"N": 2**20, "K": 5}, r"2\^19"),
        ({"N": 64, "K": 65}, r"0 \.\. N = 64, got 65"),
        ({"N": 64, "K": 5, "construction": "x"}, "one of monte_carlo"),
        ({"N": 64, "K": 5, "decision": "soft"}, "hard, randomized"),
        ({"N": 64, "K": 5, "f": "tanh"}, "corrected, minsum, exact"),
        ({"N": 64, "K": 5, "list_size": 0}, r"1 \.\. 32"),
        ({"N": 64, "K": 5, "list_size": 2, "decision": "randomized"}, "decision='hard'"),
        ({"N": 64, "K": 5, "frozen": -1}, "seed"),
        ({"N": 64, "K": 5, "frozen": 1.5}, "None or a seed, a whole number, got 1.5"),
        ({"N": 64.0, "K": 5}, r"N must be a whole number, got 64\.0"),
        ({"N": 64, "K": 32.5}, r"K must be a whole number, got 32\.5"),
        ({"N": 64, "K": 5, "list_size": True}, "list_size must be a whole number, got True"),
    ],
)
def test_bad_codes_are_refused(options, message) -> None:
    with pytest.raises(ValueError, match=message):
        PolarCompressor(**options)


def test_bad_tensors_are_refused() -> None:
    compressor = PolarCompressor(64, 20)
    with pytest.raises(ValueError, match=r"bool or uint8, got torch\.float32"):
        compressor.compress(torch.zeros(1, 64))
    with pytest.raises(ValueError, match=r"\[blocks, 64\] at N = 64, K = 20, got \[1, 65\]"):
        compressor.compress(torch.zeros(1, 65, dtype=torch.uint8))
    with pytest.raises(ValueError, match="zeros and ones"):
        compressor.compress(torch.full((1, 64), 2, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"\[blocks, 3\]"):
        compressor.decompress(torch.zeros(1, 4, dtype=torch.uint8))
    with pytest.raises(ValueError, match="as uint8"):
        compressor.decompress(torch.zeros(1, 3, dtype=torch.int32))
    with pytest.raises(ValueError, match="floating-point"):
        compressor.compress_llr(torch.zeros(1, 64, dtype=torch.int8))
    for options in ({}, {"f": "exact"}, {"list_size": 4}):
        with pytest.raises(ValueError, match="compress_llr takes numbers and infinities, got NaN"):
            PolarCompressor(64, 20, **options).compress_llr(torch.full((1, 64), math.nan))
    for operation in (compressor.compress, compressor.compress_llr, compressor.decompress):
        with pytest.raises(TypeError, match=r"takes a tensor.* got list"):
            operation([1])
