"""Numbers that change with time."""

import copy
import math

import pytest
import torch

from gradwire.compression import COMPRESSION
from gradwire.compression.feedback.ef import EF
from gradwire.compression.sparsification.topk import TopK
from gradwire.core.errors import NotationError
from gradwire.core.lifted import Varying, lift
from gradwire.core.ramp import Ramp, at, at_end, ramps
from gradwire.core.spec import Spec


def test_dgc_s_warm_up() -> None:
    """Lin et al. 2018, sec. 3.3: 75%, 93.75%, 98.4375%, 99.6% sparse, then 99.9%."""
    ramp = Ramp(0.25, 0.001, epochs=4, hold=1)
    per_epoch = [ramp.value(10 * epoch + 9, 10.0) for epoch in range(6)]
    assert per_epoch == pytest.approx([0.25, 0.0625, 0.0156, 0.004, 0.001, 0.001], rel=0.02)
    assert ramp.value(39, 10.0) == ramp.value(30, 10.0)
    assert ramp.value(40, 10.0) == 0.001


@pytest.mark.parametrize(
    ("shape", "half"), [("exponential", 0.1), ("linear", 0.505), ("cosine", 0.505)]
)
def test_shapes(shape, half) -> None:
    ramp = Ramp(1.0, 0.01, steps=100, shape=shape)
    assert [ramp.value(s, None) for s in (0, 50, 100, 10**6)] == pytest.approx(
        [1, half, 0.01, 0.01]
    )
    quarter = {"exponential": 10**-0.5, "linear": 0.7525, "cosine": 0.5 - 0.5 * -math.sqrt(0.5)}
    expected = quarter[shape] if shape != "cosine" else 1 - 0.99 * (0.5 - 0.5 * math.sqrt(0.5))
    assert ramp.value(25, None) == pytest.approx(expected)


def test_it_may_set_off_later() -> None:
    ramp = Ramp(0.0, 1.0, steps=10, after=5, shape="linear")
    assert [ramp.value(s, None) for s in (0, 5, 10, 15, 20)] == [0, 0, 0.5, 1, 1]
    assert ramp.last_step(None) == 15


def test_whole_numbers_where_the_argument_is_one() -> None:
    codec = COMPRESSION.parse("qsgd(bits=ramp(8, 2, steps=6, shape='linear'))")
    assert [at(codec, step).bits for step in range(8)] == [8, 7, 6, 5, 4, 3, 2, 2]
    assert all(type(at(codec, step).bits) is int for step in range(8))


@pytest.mark.parametrize(
    "text",
    [
        "ef(topk(ramp(0.25, 0.001, epochs=4.0)))",
        "ef(topk(ramp(0.25, 0.001, epochs=4.0, hold=1.0)) >> qsgd(bits=ramp(8.0, 2.0, steps=9)))",
        'partition({"bias": fp16, "*": topk(ramp(0.1, 0.5, steps=5, shape="linear"))})',
        'ef21(sign, momentum=ramp(0.0, 0.9, epochs=1.0, shape="cosine", after=2.0))',
    ],
)
def test_it_is_written_as_it_is_read(text) -> None:
    assert repr(COMPRESSION.parse(text)) == text
    assert COMPRESSION.parse(repr(COMPRESSION.parse(text))) == COMPRESSION.parse(text)


def test_python_objects_hold_ramps_too() -> None:
    built = EF(TopK(Ramp(0.25, 0.001, epochs=4)))
    assert built == COMPRESSION.parse("ef(topk(ramp(0.25, 0.001, epochs=4)))")
    assert at(built, 40, 10.0) == at_end(built) == EF(TopK(0.001))


def test_a_ramp_is_not_its_first_value() -> None:
    assert Ramp(0.25, 0.001, steps=4) != 0.25
    number = 0.25
    assert number != Ramp(0.25, 0.001, steps=4)  # the number is asked first
    assert TopK(0.25) != TopK(Ramp(0.25, 0.001, steps=4))
    assert Ramp(0.25, 0.1, steps=4) != Ramp(0.25, 0.1, steps=5)


def test_the_value_of_a_step_knows_the_largest_of_the_ramp() -> None:
    now = at(TopK(Ramp(0.25, 0.001, steps=4)), 9).density
    assert (now, repr(now), now.most) == (0.001, "0.001", 0.25)
    again = copy.deepcopy(now)
    assert (again, again.most) == (now, now.most)
    assert type(at(COMPRESSION.parse("qsgd(bits=ramp(8, 2, steps=6))"), 9).bits) is int


def test_what_has_no_ramp_stays_the_same_object() -> None:
    codec = COMPRESSION.parse("ef(topk(0.1) >> qsgd(bits=4))")
    assert at(codec, 3) is codec
    assert ramps(codec) == []


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("topk(ramp(0.25, 0.1))", "in epochs or in steps"),
        ("topk(ramp(0.25, 0.1, epochs=1, steps=2))", "in epochs or in steps"),
        ("topk(ramp(0.25, 0.1, steps=-2))", "in epochs or in steps"),
        ("topk(ramp(0.25, 0.0, steps=2))", 'Write shape="linear"'),
        ("topk(ramp(0.25, 2.0, steps=2))", "at the end of a ramp"),
        ("topk(ramp(0.25, 0.1, steps=2, hold=-1))", "not negative"),
        ("topk(ramp(0.25, 0.1, steps=2, shape='square'))", "exponential"),
        ("topk(ramp(0.25, 1e999, steps=2))", "finite"),
        ("ramp(0.25, 0.1, steps=2)", "is not a compression"),
    ],
)
def test_mistakes_are_explained(text, complaint) -> None:
    with pytest.raises(NotationError, match=complaint):
        COMPRESSION.parse(text)


def test_epochs_need_their_length() -> None:
    varying = lift(COMPRESSION.parse("topk(ramp(0.25, 0.1, epochs=2))"))
    assert isinstance(varying, Varying)
    with pytest.raises(ValueError, match="how many steps an epoch has"):
        varying.at(3)
    assert repr(lift(COMPRESSION.parse("topk(ramp(0.25, 0.1, epochs=2))"), 10.0).at(20)) == (
        "topk(0.1)"
    )


def test_a_state_that_would_change_its_size_is_refused() -> None:
    text = 'partition({"*": ef(topk(0.1))}, min_size=ramp(0, 100, steps=5, shape="linear"))'
    spec = Spec((60,), torch.float32, tensors=(("a", 0, 60, (6, 10)),))
    with pytest.raises(ValueError, match="Leave that number constant"):
        lift(COMPRESSION.parse(text)).init(spec, 2)
