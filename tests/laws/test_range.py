"""The laws of magnitudes, for every registered codec and reducer."""

import pytest
import torch

from gradwire.core.codec import Codec, Guarantee
from gradwire.core.reducer import Reducer
from gradwire.core.spec import Spec
from gradwire.testing import range_laws

# What depends on magnitudes because its definition names one, by what it is written with.
ABSOLUTE = {
    "fp16": "float16 has a range of its own, see `Guarantee.within`",
    "signvote": "the scale of a vote is given",
    "threshold": "the threshold is given",
    "terngrad(scale": "the scale is given",
    "clip=": "the norm to clip to is given",
    "demo(dctk(64": "steps are signs",
    "demo(topk": "steps are signs",
    "onebit_adam": "Adam's steps are relative to its own mean",
}


def skip_absolute(compression: Codec | Reducer) -> None:
    for written, reason in ABSOLUTE.items():
        if written in repr(compression):
            pytest.skip(reason)


def test_the_stated_guarantee_holds_at_every_magnitude(codec) -> None:
    range_laws.the_stated_guarantee_holds_at_every_magnitude(codec)


def test_errors_are_the_same_at_every_magnitude(codec) -> None:
    skip_absolute(codec)
    range_laws.errors_are_the_same_at_every_magnitude(codec)


@pytest.mark.parametrize("shape", [(12, 10), (300,)], ids=str)
def test_means_are_the_same_at_every_magnitude(reducer, shape) -> None:
    skip_absolute(reducer)
    range_laws.means_are_the_same_at_every_magnitude(reducer, shape)


def test_a_range_is_stated_where_it_is_needed(codec) -> None:
    """What names no magnitude of its own needs no range."""
    guarantee = codec.guarantee(Spec((300,), torch.float32))
    if guarantee in (Guarantee(), Guarantee(grows=True)):
        pytest.skip("states none")
    assert (guarantee.within is not None) == ("fp16" in repr(codec))
