"""Laws of everything that is written in the notation."""

from gradwire.core.notation import Expression
from gradwire.experiment.run.registries import registry_of
from gradwire.testing.laws import Laws

NOTATION_LAWS = Laws()


@NOTATION_LAWS()
def what_is_written_parses_to_the_same(expression: Expression) -> None:
    registry = registry_of(type(expression))
    assert registry is not None
    again = registry.parse(repr(expression))
    assert again == expression
    assert hash(again) == hash(expression)
    assert repr(again) == repr(expression)


@NOTATION_LAWS()
def a_summary_says_what_it_does(expression: Expression) -> None:
    """The first sentence of the class's documentation, which `gradwire list` shows."""
    cls = type(expression)
    is_made_up = cls.summary().startswith(f"{cls.__name__}(")  # by dataclass
    assert cls.summary(), "write a docstring"
    assert not is_made_up, "write a docstring"
