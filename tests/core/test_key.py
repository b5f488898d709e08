import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwire.core.key import Key

N = 20_000
KEY = Key(seed=123).at(5).child("test")


def correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(torch.corrcoef(torch.stack([a.double(), b.double()]))[0, 1])


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**64 - 1),
    step=st.integers(0, 2**32 - 1),
    rank=st.none() | st.integers(0, 2**32 - 2),
    name=st.text(max_size=10),
    count=st.integers(0, 50),
)
def test_equal_keys_draw_equal_bits_and_longer_draws_start_alike(
    seed, step, rank, name, count
) -> None:
    key, again = (Key(seed).at(step).child(name) for _ in range(2))
    if rank is not None:
        key, again = key.private(rank), again.private(rank)
    assert key == again
    assert torch.equal(key.words(count), again.words(count))
    assert torch.equal(key.words(count + 7)[:count], again.words(count))


def different_keys() -> list[Key]:
    key = Key(seed=7, step=3, rank=2, purpose=9)
    return [
        key,
        Key(seed=8, step=3, rank=2, purpose=9),
        Key(seed=7 + 2**32, step=3, rank=2, purpose=9),
        key.at(4),
        key.private(3),
        key.shared(),
        key.child("a"),
        key.child("b"),
        key.child(0),
        key.child("a").child("b"),
        key.child("b").child("a"),
        key.child("ab"),
    ]


def test_different_keys_draw_independent_bits() -> None:
    keys = different_keys()
    draws = [key.uniform(N) for key in keys]
    for i, a in enumerate(draws):
        for b in draws[:i]:
            assert abs(correlation(a, b)) < 6 / math.sqrt(N)


def test_a_child_of_a_child_is_not_the_child_of_the_joined_name() -> None:
    assert Key(1).child("a").child("b") != Key(1).child("a/b")


def test_private_keys_differ_and_their_shared_key_is_everybodys() -> None:
    first, second = KEY.private(0), KEY.private(1)
    assert not torch.equal(first.words(8), second.words(8))
    assert not torch.equal(first.words(8), KEY.words(8))
    assert first.shared() == second.shared() == KEY
    assert torch.equal(first.shared().words(8), KEY.words(8))


def test_a_private_child_is_the_child_of_the_private_key() -> None:
    assert KEY.private(3).child("x") == KEY.child("x").private(3)


def test_words_use_all_32_bits_evenly() -> None:
    words = KEY.words(N)
    assert words.dtype == torch.int32
    for bit in range(32):
        ones = float(((words >> bit) & 1).double().mean())
        assert abs(ones - 0.5) < 6 * 0.5 / math.sqrt(N), f"bit {bit}"


def test_halfwords_are_the_halves_of_words() -> None:
    words = (KEY.words(5).to(torch.int64) & 0xFFFFFFFF).tolist()
    halves = KEY.halfwords(9)
    assert halves.dtype == torch.int32
    assert halves.tolist() == [half for w in words for half in (w & 0xFFFF, w >> 16)][:9]
    assert int(KEY.halfwords(N).max()) < 2**16
    assert int(KEY.halfwords(N).min()) >= 0


@pytest.mark.parametrize("draw", [Key.uniform, Key.uniform64], ids=["float32", "float64"])
def test_uniform_draws_fill_the_unit_interval(draw) -> None:
    x = draw(KEY, N)
    assert x.dtype == (torch.float32 if draw is Key.uniform else torch.float64)
    assert float(x.min()) >= 0.0
    assert float(x.max()) < 1.0
    counts = torch.histc(x.double(), bins=20, min=0, max=1)
    chi_square = float(((counts - N / 20) ** 2 / (N / 20)).sum())
    assert chi_square < 60  # 19 degrees of freedom: exceeded with probability 4e-6
    assert abs(correlation(x[:-1], x[1:])) < 6 / math.sqrt(N)


def test_uniform_draws_are_multiples_of_their_step() -> None:
    x = KEY.uniform(1000).double() * 2**24
    assert torch.equal(x, x.round())
    y = KEY.uniform64(N) * 2.0**53
    assert torch.equal(y, y.round())
    for bit in range(53):
        ones = float(((y.to(torch.int64) >> bit) & 1).double().mean())
        assert abs(ones - 0.5) < 6 * 0.5 / math.sqrt(N), f"bit {bit}"


def test_normal_draws_have_the_moments_of_a_normal() -> None:
    x = KEY.normal(N)
    assert x.dtype == torch.float32
    assert torch.isfinite(x).all()
    x = x.double()
    # Standard errors of the first four moments: sqrt((mu_2k - mu_k^2) / N).
    for power, moment, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs(float((x**power).mean()) - moment) < 6 * math.sqrt(variance / N)
    # The two of a pair are independent.
    assert abs(correlation(x[0::2], x[1::2])) < 6 / math.sqrt(N / 2)
    assert abs(float((x > 1.959964).double().mean()) - 0.025) < 6 * math.sqrt(0.025 / N)


@pytest.mark.parametrize("high", [1, 2, 7, 1000])
def test_integers_are_uniform_below_high(high) -> None:
    x = KEY.integers(N, high)
    assert x.dtype == torch.int64
    assert int(x.min()) == 0
    assert int(x.max()) == high - 1
    deviation = math.sqrt((high**2 - 1) / 12 / N)
    assert abs(float(x.double().mean()) - (high - 1) / 2) <= 6 * deviation


@pytest.mark.parametrize("count", [0, 1, 2, 10, 1000])
def test_a_permutation_holds_every_number_once(count) -> None:
    permutation = KEY.permutation(count)
    assert permutation.dtype == torch.int64
    assert permutation.sort().values.tolist() == list(range(count))


def test_all_permutations_are_equally_likely() -> None:
    num_draws = 1200
    seen: dict[tuple[int, ...], int] = {}
    for step in range(num_draws):
        order = tuple(Key(1).at(step).permutation(3).tolist())
        seen[order] = seen.get(order, 0) + 1
    assert len(seen) == 6
    chi_square = sum((count - num_draws / 6) ** 2 / (num_draws / 6) for count in seen.values())
    assert chi_square < 35  # 5 degrees of freedom: exceeded with probability 2e-6


@pytest.mark.parametrize("count", [0, 1, 3])
def test_every_draw_has_the_length_asked_for(count) -> None:
    for draw in (KEY.words, KEY.halfwords, KEY.uniform, KEY.uniform64, KEY.normal):
        assert draw(count).shape == (count,)
    assert KEY.integers(count, 5).shape == (count,)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: Key(-1), "seed must lie in"),
        (lambda: Key(2**64), "seed must lie in"),
        (lambda: Key(0).at(-1), "step must lie in"),
        (lambda: Key(0).at(2**32), "step must lie in"),
        (lambda: Key(0).private(-1), "rank must lie in"),
        (lambda: Key(0).private(2**32 - 1), "rank must lie in"),
        (lambda: Key(0).integers(3, 0), "high >= 1"),
        (lambda: Key(0).words(-1), "count >= 0"),
    ],
)
def test_what_is_out_of_range_is_refused(make, reason) -> None:
    with pytest.raises(ValueError, match=reason):
        make()
