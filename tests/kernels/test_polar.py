"""Polar kernels: C against torch, and torch against what is defined."""

import pytest
import torch

from gradwire import kernels
from gradwire.core.key import Key
from gradwire.kernels import _dispatch
from gradwire.kernels.native import _library
from gradwire.kernels.native import polar as native
from gradwire.kernels.reference import polar as reference

COST = torch.zeros(255, dtype=torch.int32)
needs_library = pytest.mark.skipif(
    _dispatch.cpu_backend() != "native", reason="the C library was not built"
)


def ratios(groups: int, n: int, largest: int = 127, seed: int = 0) -> torch.Tensor:
    words = Key(seed).words(groups * n * 64, torch.device("cpu"))
    return (words % (2 * largest + 1) - largest).clamp(-127, 127).to(torch.int8).view(groups, n, 64)


def some(n: int, share: float, seed: int = 0) -> torch.Tensor:
    """Free positions as a code has them: rather at the end."""
    weight = torch.arange(n).float() / n + Key(seed).uniform(n)
    return weight >= weight.sort().values[min(n - 1, int((1 - share) * n))]


@pytest.fixture(params=[0, 1, 2], ids=["plain", "avx2", "avx512"])
def level(request):
    """The instructions that C may use."""
    if _dispatch.cpu_backend() != "native":
        pytest.skip("the C library was not built")
    _library.load().gw_polar_widest(request.param)
    yield
    _library.load().gw_polar_widest(2)


@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("n", [1, 2, 4, 8, 64, 256])
@pytest.mark.parametrize("lanes", [8, 16, 32, 64])
@pytest.mark.usefixtures("level")
def test_the_backends_agree(n, corrected, lanes) -> None:
    for seed, share in enumerate((0.0, 0.1, 0.3, 0.5, 0.8, 0.95, 1.0)):
        free = some(n, share, seed) if share else torch.zeros(n, dtype=torch.bool)
        kinds = kernels.polar_kinds(free)
        for largest in (3, 20, 127):  # small ones tie often, large ones saturate
            llr = ratios(2, n, largest, seed)[..., :lanes]
            found = native.polar_quantise(llr, kinds, corrected)
            assert torch.equal(found, reference.polar_quantise(llr, kinds, corrected))
        signs = Key(seed).words(2 * n * 2).view(torch.uint8).view(2, n, 8)[..., : lanes // 8]
        for magnitude in (0, 17, 127):
            found = native.polar_quantise_bits(signs, magnitude, kinds, corrected)
            expected = reference.polar_quantise_bits(signs, magnitude, kinds, corrected)
            assert torch.equal(found, expected)


@pytest.mark.parametrize("n", [1, 2, 64, 256])
@pytest.mark.usefixtures("level")
def test_the_genies_agree(n) -> None:
    cost = torch.arange(255, dtype=torch.int32) ** 2 % 1009
    llr = ratios(3, n, 30)
    assert torch.equal(native.polar_genie(llr, cost), reference.polar_genie(llr, cost))


@pytest.mark.usefixtures("level")
def test_ratios_agree() -> None:
    x = torch.cat([40 * Key(1).normal(1003), torch.arange(-300, 300) / 2, torch.full((1,), 3e38)])
    for part in (x, x[1:], x[:0], x[:17]):
        found = native.polar_ratios(part, 3.0)
        assert torch.equal(found, reference.polar_ratios(part, 3.0))


@pytest.mark.parametrize("blocks", [1, 3, 8, 13, 32, 63, 64, 65, 128])
@pytest.mark.parametrize("n", [64, 256])
@pytest.mark.usefixtures("level")
def test_signs_agree(blocks, n) -> None:
    kinds, lanes = kernels.polar_kinds(some(n, 0.5)), kernels.polar_width(blocks)
    for count in {n * blocks, n * blocks - min(3, blocks - 1), (n - 1) * blocks}:
        if count <= (blocks - 1) // lanes * lanes * -(-count // blocks):
            continue
        x = Key(count).normal(count)
        found = native.polar_signs(x, 9.0, 0.75, blocks, n, lanes, kinds)
        expected = reference.polar_signs(x, 9.0, 0.75, blocks, n, lanes, kinds)
        assert torch.equal(found[0], expected[0])
        assert torch.equal(found[1], expected[1])
        public = kernels.polar_signs(x, 9.0, 0.75, blocks, lanes, kinds)
        assert torch.equal(public[0], expected[0])


@pytest.mark.parametrize("blocks", [1, 3, 8, 9, 17, 33, 64])
@pytest.mark.parametrize("n", [64, 512])
def test_fewer_lanes_find_what_64_find(blocks, n) -> None:
    width = kernels.polar_width(blocks)
    assert blocks <= width <= max(8, 2 * blocks)
    llr, kinds = ratios(1, n, 30), kernels.polar_kinds(some(n, 0.5))
    wide = kernels.polar_quantise(llr, kinds)
    narrow = kernels.polar_quantise(llr[..., :width].contiguous(), kinds)
    assert torch.equal(narrow, wide[..., : width // 8])
    inputs = kernels.polar_transform(narrow)
    assert torch.equal(inputs, kernels.polar_transform(wide)[..., : width // 8])


def test_stepwise_operations_go_through_the_cpu() -> None:
    llr, kinds = ratios(2, 64, 20), kernels.polar_kinds(some(64, 0.5))
    run = _dispatch._run_on_cpu(llr.device, reference.polar_quantise)
    assert torch.equal(run(llr, kinds, True), reference.polar_quantise(llr, kinds, True))
    other = torch.device("meta")  # not the CPU; a result of its kind comes back
    picked = _dispatch.pick_stepwise(other, native.polar_quantise, reference.polar_quantise)
    if _dispatch.cpu_backend() == "native":
        assert picked(llr, kinds, True).device == other
    else:
        assert picked is reference.polar_quantise


@needs_library
@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("n", [1, 2, 4, 8, 16, 32, 64, 1024])
def test_the_transforms_agree(n, width) -> None:
    bits = Key(1).words(2 * n * 2, torch.device("cpu")).view(torch.uint8).view(2, n, 8)
    bits = bits[..., :width]
    assert torch.equal(native.polar_transform(bits), reference.polar_transform(bits))


@needs_library
def test_the_number_of_threads_changes_nothing() -> None:
    llr, kinds = ratios(9, 4096, 40), kernels.polar_kinds(some(4096, 0.5))
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            bits = native.polar_quantise(llr, kinds, True)
            found.append((bits, native.polar_transform(bits)))
    finally:
        torch.set_num_threads(before)
    for bits, inputs in found[1:]:
        assert torch.equal(bits, found[0][0])
        assert torch.equal(inputs, found[0][1])


def matrix(n: int) -> torch.Tensor:
    """F^(n) by its definition, the Kronecker power of [1 0; 1 1]."""
    power = torch.ones(1, 1, dtype=torch.int64)
    while len(power) < n:
        power = torch.kron(torch.tensor([[1, 0], [1, 1]]), power)
    return power


def lanes(bits: torch.Tensor) -> torch.Tensor:
    """[groups, n, 8] of bytes as [groups * 64, n] of bits."""
    spread = bits.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8) & 1
    return spread.flatten(2).transpose(1, 2).flatten(0, 1).to(torch.int64)


@pytest.mark.parametrize("n", [1, 2, 8, 32])
def test_the_transform_is_the_kronecker_power_and_its_own_inverse(n) -> None:
    bits = Key(1).words(n * 2, torch.device("cpu")).view(torch.uint8).view(1, n, 8)
    found = kernels.polar_transform(bits)
    assert torch.equal(lanes(found), lanes(bits) @ matrix(n) % 2)
    assert torch.equal(kernels.polar_transform(found), bits)


@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
def test_what_is_found_is_a_codeword(share) -> None:
    free = some(64, share)
    bits = kernels.polar_quantise(ratios(2, 64), kernels.polar_kinds(free))
    inputs = kernels.polar_transform(bits)
    assert not inputs[:, ~free].any()
    assert inputs[:, free].any()


def test_a_codeword_is_found_again() -> None:
    free = some(64, 0.4)
    inputs = Key(3).words(128, torch.device("cpu")).view(torch.uint8).view(1, 64, 8).clone()
    inputs[:, ~free] = 0
    word = kernels.polar_transform(inputs)
    llr = (40 - 80 * lanes(word).t().unsqueeze(0)).to(torch.int8)
    assert torch.equal(kernels.polar_quantise(llr, kernels.polar_kinds(free)), word)


def test_two_positions_by_hand() -> None:
    # u0 frozen, u1 free: both positions repeat the sign of the sum. A tie decides zero.
    repeat = kernels.polar_kinds(torch.tensor([False, True]))
    llr = torch.zeros(1, 2, 64, dtype=torch.int8)
    llr[0, :, 0] = torch.tensor([5, -9])
    llr[0, :, 1] = torch.tensor([9, -5])
    llr[0, :, 2] = torch.tensor([7, -7])
    assert lanes(kernels.polar_quantise(llr, repeat))[:3].tolist() == [[1, 1], [0, 0], [0, 0]]
    # Four positions of even parity: of three minus signs the weakest turns, of equals the first.
    check = kernels.polar_kinds(torch.tensor([False, True, True, True]))
    llr = torch.zeros(1, 4, 64, dtype=torch.int8)
    llr[0, :, 0] = torch.tensor([-9, -3, -8, 20])
    llr[0, :, 1] = torch.tensor([-9, 3, 3, 20])
    found = lanes(kernels.polar_quantise(llr, check))[:2].tolist()
    assert found == [[1, 0, 1, 0], [1, 1, 0, 0]]


def test_f_comes_within_a_fifth_of_a_nat_of_the_exact_one() -> None:
    a, b = torch.meshgrid(torch.arange(-127, 128), torch.arange(-127, 128), indexing="ij")
    exact = 16 * torch.atanh(torch.tanh(a.double() / 16) * torch.tanh(b.double() / 16))
    found = reference.f_corrected(a, b)
    small = exact.abs() < 100  # beyond, atanh runs out of digits
    assert (found - exact)[small].abs().max() < 8 / 5
    plain = reference.f_minsum(a, b)
    assert (plain - exact)[small].abs().max() > 5  # up to log 2 in units of an eighth


def test_the_genie_sees_every_input_knowing_those_before() -> None:
    # Two inputs: f of both ratios, then their sum, since the first is known to be zero.
    llr = torch.zeros(1, 2, 64, dtype=torch.int8)
    llr[0, 0], llr[0, 1] = 40, 60
    cost = torch.arange(-127, 128, dtype=torch.int32)
    expected = [int(reference.f_corrected(torch.tensor(40), torch.tensor(60))), 100]
    assert kernels.polar_genie(llr, cost).tolist() == [64 * value for value in expected]


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (lambda: kernels.polar_kinds(torch.ones(3, dtype=torch.bool)), r"bool \[2\^k\]"),
        (lambda: kernels.polar_transform(torch.zeros(1, 3, 8, dtype=torch.uint8)), "2\\^k"),
        (lambda: kernels.polar_transform(torch.zeros(1, 4, 7, dtype=torch.uint8)), "groups"),
        (lambda: kernels.polar_quantise(ratios(1, 4), torch.zeros(4, dtype=torch.uint8)), "kinds"),
        (lambda: kernels.polar_genie(ratios(1, 4), torch.zeros(4, dtype=torch.int32)), "cost"),
        (lambda: kernels.polar_quantise(ratios(1, 4), torch.full((8,), 4).byte()), "polar_kinds"),
        (lambda: kernels.polar_genie(torch.full((1, 4, 64), -128).char(), COST), "-128"),
    ],
)
def test_bad_arguments_are_refused(run, message) -> None:
    with pytest.raises(ValueError, match=message):
        run()
