"""First choices at random: C gives what the torch reference gives, whatever the threads."""

import pytest
import torch

from gradwire import kernels
from gradwire.kernels.native import drawn as native_drawn
from gradwire.kernels.reference import drawn as reference
from gradwire.kernels.reference.philox import philox_words

SEED, STREAM = 0x1234567890ABCDEF, (3, 0xFFFFFFFE, 7)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("count", [1, 7, 3071, 3072, 3073, 300_007])
@pytest.mark.parametrize("factor", [0.0, 30.0, 65536.0])
@pytest.mark.parametrize("capacity", [0, 100, 400_000])
def test_candidates_are_those_of_the_reference(native, threads, count, factor, capacity) -> None:
    x = torch.randn(count, generator=torch.Generator().manual_seed(0))
    x[count // 2 :] *= 1e-3  # threads find different numbers
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = native_drawn.draw_candidates(x, factor, SEED, STREAM, capacity)
    finally:
        torch.set_num_threads(before)
    expected = reference.draw_candidates(x, factor, SEED, STREAM, capacity)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert [part.dtype for part in found] == [torch.int64, torch.float32, torch.int32]


def test_an_element_is_a_candidate_if_its_bits_may_let_it_pass() -> None:
    x = torch.full((4000,), -0.25)
    indices, values, halves = kernels.draw_candidates(x, 65536.0, SEED, STREAM)
    words = philox_words(SEED, STREAM, 2000, torch.device("cpu"))
    bits = torch.stack([words & 0xFFFF, words >> 16 & 0xFFFF], dim=1).reshape(-1)
    assert torch.equal(indices, (bits <= 16385).nonzero().reshape(-1))
    assert torch.equal(halves, bits[indices])
    assert (values == -0.25).all()


@pytest.mark.parametrize("factor", [-1.0, float("inf"), float("nan")])
def test_no_factor_is_refused(factor) -> None:
    with pytest.raises(ValueError, match="takes a factor"):
        kernels.draw_candidates(torch.ones(3), factor, SEED, STREAM)
