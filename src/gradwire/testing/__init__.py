"""The laws of gradwire, for a class of your own, with one call each.

    from gradwire.testing import check_codec
    check_codec(Halves)

runs every law of codecs on each of the class's `examples` (or on its bare name), and registers the
class if it was not. What breaks a law is an AssertionError with the law, the example and the
assertion. A law that a definition breaks on purpose is declared on the class, with the reason:
`exempt_from = {"errors_are_the_same_at_every_magnitude": "the threshold is given"}`.

The law suite of this repository (tests/laws) runs the same functions on all registered classes.
Begin reading with `laws.py`, then `codec_laws.py`.
"""

from gradwire.core.codec import Codec
from gradwire.core.protocols import Architecture, Synchronization
from gradwire.core.reducer import Reducer
from gradwire.models.base import Model
from gradwire.testing.codec_laws import CODEC_LAWS
from gradwire.testing.laws import Law, Laws, NotApplicable, expressions_of
from gradwire.testing.notation_laws import NOTATION_LAWS
from gradwire.testing.pair_laws import ARCHITECTURE_LAWS, SYNCHRONIZATION_LAWS
from gradwire.testing.range_laws import RANGE_LAWS, REDUCER_RANGE_LAWS
from gradwire.testing.reducer_laws import COMPRESSION_LAWS, REDUCER_LAWS
from gradwire.testing.training_laws import MODEL_LAWS, OPTIMIZER_LAWS
from gradwire.testing.wire_laws import WIRE_LAWS
from gradwire.training.optimizer import Optimizer

__all__ = [
    "Law",
    "Laws",
    "NotApplicable",
    "check_architecture",
    "check_codec",
    "check_model",
    "check_optimizer",
    "check_reducer",
    "check_synchronization",
]


def check_codec(codec: type[Codec] | Codec) -> None:
    """Checks the laws of codecs, of the bytes they receive, and of averages with them."""
    found = expressions_of(codec, Codec)
    for laws in (NOTATION_LAWS, CODEC_LAWS, WIRE_LAWS, RANGE_LAWS, COMPRESSION_LAWS):
        laws.check(found)


def check_reducer(reducer: type[Reducer] | Reducer) -> None:
    """Checks the laws of reducers: one mean for all ranks, states that can be saved, magnitudes."""
    found = expressions_of(reducer, Reducer)
    for laws in (NOTATION_LAWS, REDUCER_LAWS, REDUCER_RANGE_LAWS, COMPRESSION_LAWS):
        laws.check(found)


def check_synchronization(synchronization: type[Synchronization] | Synchronization) -> None:
    """Checks that it runs on every architecture with what it needs, and is refused by others."""
    found = expressions_of(synchronization, Synchronization)
    for laws in (NOTATION_LAWS, SYNCHRONIZATION_LAWS):
        laws.check(found)


def check_architecture(architecture: type[Architecture] | Architecture) -> None:
    """Checks that it runs under every synchronization that it offers something to, and its mean."""
    found = expressions_of(architecture, Architecture)
    for laws in (NOTATION_LAWS, ARCHITECTURE_LAWS):
        laws.check(found)


def check_model(
    model: type[Model] | Model, input_shape: tuple[int, ...], num_classes: int = 10
) -> None:
    """Checks a network for inputs of this shape; text has a shape (length,) and many classes."""
    found = expressions_of(model, Model)
    NOTATION_LAWS.check(found)
    MODEL_LAWS.check(found, shape=input_shape, num_classes=num_classes)


def check_optimizer(optimizer: type[Optimizer] | Optimizer) -> None:
    """Checks that steps are pure functions, go down, and continue from a saved state."""
    found = expressions_of(optimizer, Optimizer)
    for laws in (NOTATION_LAWS, OPTIMIZER_LAWS):
        laws.check(found)
