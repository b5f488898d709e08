"""The checks of gradwire.testing: what breaks a law is reported with law, example and assertion."""

import re
import subprocess
import sys
from dataclasses import dataclass

import pytest
from torch import Tensor

from gradwire.compression import COMPRESSION
from gradwire.compression.identity import Identity
from gradwire.core.codec import Codec, Parts, State
from gradwire.core.key import Key
from gradwire.core.notation import Table
from gradwire.core.spec import Spec
from gradwire.experiment.run.registries import OPTIMIZERS
from gradwire.testing import check_codec, check_optimizer, check_synchronization
from gradwire.testing.codec_laws import CODEC_LAWS
from gradwire.testing.laws import Laws, NotApplicable, raises
from gradwire.training.optimizer import SGD


@dataclass(frozen=True, repr=False)
class Doubling(Codec):
    """Decode to twice what was encoded, which is not what it claims."""

    guarantee = Identity.guarantee
    values_spec = Identity.values_spec
    split = Identity.split

    def join(self, parts: Parts, spec: Spec, key: Key) -> Tensor:
        return 2 * parts["values"]


@dataclass(frozen=True, repr=False)
class Scribbling(Codec):
    """Write into what it is given."""

    guarantee = Identity.guarantee
    values_spec = Identity.values_spec
    join = Identity.join

    def split(self, x: Tensor, state: State, key: Key) -> tuple[Parts, State]:
        return {"values": x.add_(1)}, state


@pytest.fixture(autouse=True)
def _registered_for_this_test_only():
    before = dict(COMPRESSION._classes)
    yield
    COMPRESSION._classes = before


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (Doubling, r"(?s)doubling breaks .* stated guarantee holds' for case = 'gau.*, line \d+\)"),
        (Scribbling, r"scribbling breaks the law '.+' for x = a tensor of shape \[.*\] and torch"),
    ],
)
def test_a_law_that_is_broken_is_named_with_its_example(cls, message) -> None:
    with pytest.raises(AssertionError, match=message):
        check_codec(cls)


def test_an_exemption_is_declared_with_its_reason() -> None:
    laws = Laws()

    @laws()
    def values_are_doubled(codec: Codec) -> None:
        raise AssertionError("they are not")

    with pytest.raises(AssertionError, match="breaks the law 'values are doubled': they are not"):
        laws.check([Identity()])

    @dataclass(frozen=True, repr=False)
    class Exempt(Doubling):
        exempt_from = Table({"values_are_doubled": "on purpose"})

    laws.check([Exempt()])
    with pytest.raises(NotApplicable, match="on purpose"):
        values_are_doubled(Exempt())


def test_an_optimizer_that_writes_in_place_is_reported() -> None:
    @dataclass(frozen=True, repr=False)
    class Hasty(SGD):
        """Step in place."""

        def update(self, params, gradient, state, lr):
            return params.sub_(lr * gradient), dict(state)

    before = dict(OPTIMIZERS._classes)
    try:
        with pytest.raises(AssertionError, match="changed in place': params was changed"):
            check_optimizer(Hasty(0.1))
    finally:
        OPTIMIZERS._classes = before


def test_what_is_no_codec_is_refused() -> None:
    with pytest.raises(ValueError, match="expected a Synchronization or a class of them, got"):
        check_synchronization(Doubling)  # type: ignore[arg-type]


def test_an_error_that_is_not_raised_is_an_assertion() -> None:
    unmet = pytest.raises(AssertionError, match="expected KeyError or TypeError, nothing was")
    with unmet, raises(KeyError, TypeError):
        pass
    other = pytest.raises(AssertionError, match="expected 'this' in the message, got that")
    with other, raises(ValueError, text="this"):
        raise ValueError("that")


def test_laws_have_names_that_say_what_holds() -> None:
    names = [law.name for law in CODEC_LAWS]
    assert len(set(names)) == len(names) >= 10
    assert all(re.fullmatch(r"[a-z ]+", name) for name in names)


@pytest.mark.slow
def test_pytest_and_hypothesis_are_not_needed() -> None:
    code = (
        "import sys, gradwire.testing; "
        "assert not {'pytest', 'hypothesis', 'matplotlib'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
