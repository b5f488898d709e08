"""Laws, and how they are checked on one expression."""

import itertools
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gradwire.core.notation import Expression, notation_name
from gradwire.experiment.run.registries import registry_of


class NotApplicable(Exception):
    """The reason why a law does not apply to an expression."""


@dataclass(frozen=True)
class Law:
    """A function that fails an assertion for what breaks it, and the examples to try it on."""

    check: Callable[..., None]
    examples: dict[str, Sequence[Any]]

    @property
    def name(self) -> str:
        return self.check.__name__.replace("_", " ")

    def __call__(self, subject: Expression, *args: Any, **kwargs: Any) -> None:
        """Checks one example; raises NotApplicable where the class declares an exemption."""
        if reason := subject.exempt_from.get(self.check.__name__):
            raise NotApplicable(reason)
        self.check(subject, *args, **kwargs)

    def check_all(self, subject: Expression, given: Mapping[str, Any]) -> None:
        """Checks all examples. Raises AssertionError with the law, the example and the reason."""
        for values in itertools.product(*self.examples.values()):
            example = {**given, **dict(zip(self.examples, values))}
            try:
                self(subject, **example)
            except NotApplicable:
                continue
            except Exception as error:
                context = "".join(f" for {name} = {_shown(v)}" for name, v in example.items())
                message = f"{subject!r} breaks the law {self.name!r}{context}: {_reason(error)}"
                raise AssertionError(message) from error


class Laws:
    """The laws of one kind of expression: `@CODEC_LAWS(x=TENSORS)` above a function adds it."""

    def __init__(self) -> None:
        self._laws: list[Law] = []

    def __call__(self, **examples: Sequence[Any]) -> Callable[[Callable[..., None]], Law]:
        def add(check: Callable[..., None]) -> Law:
            self._laws.append(Law(check, examples))
            return self._laws[-1]

        return add

    def __iter__(self) -> Iterator[Law]:
        return iter(self._laws)

    def check(self, subjects: Iterable[Expression], **given: Any) -> None:
        """Checks all laws on all of these; `given` are arguments of all laws."""
        if not __debug__:
            raise RuntimeError("laws are assertions: run Python without -O")
        for subject in subjects:
            for law in self._laws:
                law.check_all(subject, given)


def expressions_of(chosen: type[Expression] | Expression, kind: type) -> list[Any]:
    """The examples of a class, which is registered if it was not; an expression stands for itself.

    Raises ValueError for what is not of this kind.
    """
    cls = chosen if isinstance(chosen, type) else type(chosen)
    registry = registry_of(cls)
    if registry is None or not issubclass(cls, kind):
        raise ValueError(f"expected a {kind.__name__} or a class of them, got {chosen!r}")
    name = notation_name(cls)
    is_named = isinstance(chosen, type) or repr(chosen).partition("(")[0] == name  # not a chain
    if is_named and (name not in registry or registry[name] is not cls):
        registry.register(cls)
    if not isinstance(chosen, type):
        return [chosen]
    texts = chosen.examples or (name,)
    return [each for each in map(registry.parse, texts) if isinstance(each, kind)]


@contextmanager
def raises(*expected: type[Exception], text: str = "") -> Iterator[None]:
    """Asserts that one of these errors is raised in the block, with this text in its message."""
    try:
        yield
    except expected as error:
        if text not in str(error):
            raise AssertionError(f"expected {text!r} in the message, got {error}") from error
        return
    raise AssertionError(
        f"expected {' or '.join(e.__name__ for e in expected)}, nothing was raised"
    )


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)} and {value.dtype}"
    return repr(value)


def _reason(error: Exception) -> str:
    """The message, or the assertion that failed, and where."""
    where = traceback.extract_tb(error.__traceback__)[-1]
    text = str(error) or where.line
    kind = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
    return f"{kind}{text} ({where.filename}, line {where.lineno})"
