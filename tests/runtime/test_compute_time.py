import math

import pytest

from gradwire.core.errors import NotationError
from gradwire.core.key import Key
from gradwire.runtime.virtual.compute_time import (
    COMPUTE_TIME,
    STRAGGLERS,
    Always,
    Computer,
    Fixed,
    Nobody,
)

N = 3000


def samples(text: str) -> list[float]:
    distribution = COMPUTE_TIME.parse(text)
    return [distribution.sample(Key(4).at(step)) for step in range(N)]


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("text", "mean", "deviation", "least"),
    [
        ("fixed(0.01)", 0.01, 0.0, 0.01),
        ("uniform(0.01, high=0.03)", 0.02, 0.02 / math.sqrt(12), 0.01),
        ("exponential(0.01)", 0.01, 0.01, 0.0),
        ("exponential(0.01, shift=0.004)", 0.01, 0.006, 0.004),
        ("lognormal(0.01, sigma=0.5)", 0.01, 0.01 * math.sqrt(math.exp(0.25) - 1), 0.0),
        ("lognormal(0.01, sigma=0.0)", 0.01, 0.0, 0.0),
    ],
)
def test_samples_have_the_mean_and_deviation_of_their_distribution(
    text, mean, deviation, least
) -> None:
    found = samples(text)
    average = sum(found) / N
    assert abs(average - mean) <= 6 * deviation / math.sqrt(N) + 1e-15
    spread = math.sqrt(sum((x - average) ** 2 for x in found) / N)
    assert spread == pytest.approx(deviation, rel=0.15, abs=1e-12)
    assert min(found) >= least


def test_a_uniform_time_stays_below_its_upper_end() -> None:
    assert max(samples("uniform(0.01, high=0.03)")) < 0.03


@pytest.mark.parametrize(
    "text",
    [
        "fixed(-1.0)",
        "fixed(1e999)",
        "uniform(0.2, high=0.1)",
        "uniform(-0.1, high=0.1)",
        "exponential(-0.1)",
        "exponential(0.01, shift=0.02)",
        "lognormal(-1.0)",
        "lognormal(0.1, sigma=-1.0)",
        "normal(0.1)",
        "fixed",
    ],
)
def test_times_that_make_no_sense_are_refused(text) -> None:
    with pytest.raises(NotationError):
        COMPUTE_TIME.parse(text)


@pytest.mark.parametrize("registry", [COMPUTE_TIME, STRAGGLERS], ids=lambda r: r.what)
def test_every_example_reads_back_from_what_it_writes(registry) -> None:
    for cls in registry:
        for text in cls.examples:
            assert registry.parse(repr(registry.parse(text))) == registry.parse(text)


def computer(base: str, stragglers: str = "nobody", speeds=(1.0, 1.0, 1.0, 1.0)) -> Computer:
    return Computer(COMPUTE_TIME.parse(base), STRAGGLERS.parse(stragglers), speeds, Key(7))


def test_times_are_drawn_anew_for_each_step_and_rank_and_always_the_same() -> None:
    first, second = computer("exponential(0.01)"), computer("exponential(0.01)")
    drawn = {(rank, step): first.seconds(rank, step) for rank in range(4) for step in range(10)}
    assert len(set(drawn.values())) == 40
    for (rank, step), seconds in reversed(list(drawn.items())):  # in any order
        assert second.seconds(rank, step) == seconds


def test_another_seed_draws_other_times() -> None:
    one = Computer(COMPUTE_TIME.parse("exponential(0.01)"), Nobody(), (1.0,), Key(1))
    other = Computer(COMPUTE_TIME.parse("exponential(0.01)"), Nobody(), (1.0,), Key(2))
    assert one.seconds(0, 0) != other.seconds(0, 0)


def test_a_node_of_double_speed_takes_half_the_time() -> None:
    timer = computer("fixed(0.1)", speeds=(1.0, 2.0, 0.5, 4.0))
    assert [timer.seconds(rank, 0) for rank in range(4)] == [0.1, 0.05, 0.2, 0.025]


def test_those_always_slow_are_slow_in_every_step() -> None:
    timer = computer("fixed(0.1)", "always((0, 3), slowdown=2.0)")
    for step in range(5):
        seconds = [timer.seconds(rank, step) for rank in range(4)]
        assert seconds == [0.2, 0.1, 0.1, 0.2]


def test_those_sometimes_slow_are_slow_as_often_as_said() -> None:
    timer = computer("fixed(1.0)", "sometimes(0.2, slowdown=5.0)")
    found = [timer.seconds(rank, step) for rank in range(4) for step in range(N // 4)]
    assert set(found) == {1.0, 5.0}
    share = found.count(5.0) / len(found)
    assert abs(share - 0.2) < 6 * math.sqrt(0.2 * 0.8 / len(found))


@pytest.mark.parametrize("probability", [0.0, 1.0])
def test_probabilities_of_zero_and_one_are_certain(probability) -> None:
    timer = computer("fixed(1.0)", f"sometimes({probability}, slowdown=3.0)")
    found = {timer.seconds(rank, step) for rank in range(4) for step in range(20)}
    assert found == {3.0 if probability else 1.0}


def test_slowness_and_duration_are_drawn_independently() -> None:
    timer = computer("uniform(1.0, high=2.0)", "sometimes(0.5, slowdown=10.0)")
    found = [timer.seconds(0, step) for step in range(2000)]
    slow = [x / 10 for x in found if x >= 10]
    fast = [x for x in found if x < 10]
    difference = sum(slow) / len(slow) - sum(fast) / len(fast)
    assert abs(difference) < 6 * math.sqrt(1 / 12 * (1 / len(slow) + 1 / len(fast)))


@pytest.mark.parametrize(
    "text", ["sometimes(1.5)", "sometimes(-0.1)", "sometimes(0.1, slowdown=-1.0)", "always(3)"]
)
def test_stragglers_that_make_no_sense_are_refused(text) -> None:
    with pytest.raises(NotationError):
        STRAGGLERS.parse(text)


def test_a_time_that_was_not_measured_cannot_be_used() -> None:
    with pytest.raises(AssertionError, match="measured"):
        computer("measured").seconds(0, 0)


def test_values_may_be_made_in_python_too() -> None:
    timer = Computer(Fixed(0.5), Always((1,), slowdown=3.0), (1.0, 1.0), Key(0))
    assert [timer.seconds(rank, 9) for rank in range(2)] == [0.5, 1.5]


def test_each_worker_may_have_a_distribution_of_its_own() -> None:
    timer = computer("per_node((fixed(0.01), fixed(0.02), uniform(1.0, high=2.0), fixed(0.03)))")
    alone = computer("uniform(1.0, high=2.0)")
    for step in range(5):
        assert [timer.seconds(rank, step) for rank in (0, 1, 3)] == [0.01, 0.02, 0.03]
        assert timer.seconds(2, step) == alone.seconds(2, step)


def test_speeds_and_stragglers_apply_to_each_workers_own_time() -> None:
    timer = computer("per_node((fixed(1.0), fixed(3.0)))", "always((1,), slowdown=2.0)", (1.0, 4.0))
    assert [timer.seconds(rank, 0) for rank in range(2)] == [1.0, 1.5]


def test_as_many_distributions_as_workers_are_needed() -> None:
    with pytest.raises(ValueError, match="has 2 distributions for 4 workers: give one for each"):
        computer("per_node((fixed(0.01), fixed(0.02)))")


@pytest.mark.parametrize(
    "text",
    [
        "per_node(fixed(0.01))",
        "per_node((0.01, 0.02))",
        "per_node((measured, fixed(0.01)))",
        "per_node((per_node((fixed(0.01),)),))",
    ],
)
def test_distributions_that_one_worker_cannot_have_are_refused(text) -> None:
    with pytest.raises(NotationError):
        COMPUTE_TIME.parse(text)
