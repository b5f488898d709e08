"""Philox 4x32-10: the published known answers, native against reference, and independence of
how and where a stream is drawn."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gradwire import kernels
from gradwire.kernels.native import philox as native_philox
from gradwire.kernels.reference import philox as reference_philox

CPU = torch.device("cpu")
WORD = st.integers(0, 2**32 - 1)

# Random123's kat_vectors: counter (block number, then stream), key (low word first), output.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ((2**32 - 1,) * 4, (2**32 - 1,) * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]


@pytest.mark.parametrize("module", [reference_philox, native_philox], ids=["reference", "native"])
@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_known_answers(module, counter, key, answer, request):
    if module is native_philox:
        request.getfixturevalue("native")
    first_block, *stream = counter
    words = module.philox_words(key[0] | key[1] << 32, tuple(stream), 4, CPU, first_block)
    assert " ".join(f"{word & 0xFFFFFFFF:08x}" for word in words.tolist()) == answer


@pytest.mark.usefixtures("native")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 2**64 - 1),
    stream=st.tuples(WORD, WORD, WORD),
    count=st.integers(0, 1000),
    first_block=st.one_of(WORD, st.integers(2**32 - 200, 2**32 - 1)),
)
def test_native_equals_reference(seed, stream, count, first_block):
    ours = native_philox.philox_words(seed, stream, count, CPU, first_block)
    assert torch.equal(ours, reference_philox.philox_words(seed, stream, count, CPU, first_block))
    assert ours.dtype == torch.int32


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("count", [3, 64, 96, 97, 383, 384, 385, 100_003])
def test_the_block_counter_wraps(count):
    """Native vectors that straddle block 2^32 - 1 continue at block 0."""
    first_block = 2**32 - 5
    ours = native_philox.philox_words(7, (1, 2, 3), count, CPU, first_block)
    assert torch.equal(ours, reference_philox.philox_words(7, (1, 2, 3), count, CPU, first_block))
    assert torch.equal(ours[20:], native_philox.philox_words(7, (1, 2, 3), count, CPU)[:-20])


def test_any_part_of_a_stream_can_be_drawn_alone():
    whole = kernels.philox_words(5, (1, 2, 3), 1000, CPU)
    assert torch.equal(whole[400:], kernels.philox_words(5, (1, 2, 3), 600, CPU, first_block=100))


def test_threads_do_not_change_draws():
    before = torch.get_num_threads()
    draws = []
    try:
        for num_threads in (1, 2):
            torch.set_num_threads(num_threads)
            draws.append(kernels.philox_words(5, (1, 2, 3), 100_000, CPU))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(draws[0], draws[1])
    with ThreadPoolExecutor(4) as pool:
        parts = pool.map(
            lambda i: kernels.philox_words(5, (1, 2, 3), 10_000, CPU, 2500 * i), range(10)
        )
        assert torch.equal(torch.cat(list(parts)), draws[0])


def test_a_negative_count_is_refused():
    with pytest.raises(ValueError, match="count >= 0, got -1"):
        kernels.philox_words(0, (0, 0, 0), -1, CPU)
