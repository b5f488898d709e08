"""One notation for everything that can be chosen: `ef(topk(0.01) >> qsgd(bits=4))`.

An `Expression` is a frozen dataclass whose `repr` is the text that makes it again:
`parse(repr(x)) == x` is a law. The same strings serve Python, TOML files, the command line,
logs and tables. `core/registry.py` finds the classes, `core/parser.py` reads the text.

The name of an algorithm is the name of its file.
"""

import difflib
import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, fields, replace
from typing import Any, ClassVar, TypeVar

T = TypeVar("T")


def notation_name(cls: type) -> str:
    """`TopK` in `topk.py` is `topk`; `Dirichlet` in `partition.py` is `dirichlet`."""
    file_name = cls.__module__.rpartition(".")[2]
    if file_name.replace("_", "") == cls.__name__.lower():
        return file_name
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", cls.__name__).lower()


def written_as_text(value: object) -> str:
    """A value as the notation has it."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)  # Python reads no surrogate pairs
    if isinstance(value, tuple):
        inside = ", ".join(written_as_text(item) for item in value)
        return f"({inside},)" if len(value) == 1 else f"({inside})"
    if isinstance(value, Table):
        inside = ", ".join(
            f"{written_as_text(key)}: {written_as_text(item)}" for key, item in value.items()
        )
        return f"{{{inside}}}"
    return repr(value)


class Table(Mapping[str, Any]):
    """A dictionary that never changes, so that an expression may hold it: order counts."""

    def __init__(self, items: Mapping[str, Any]) -> None:
        self._items = dict(items)

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Table):
            return NotImplemented
        return tuple(self.items()) == tuple(other.items())

    def __hash__(self) -> int:
        return hash(tuple(self.items()))

    def __repr__(self) -> str:
        return written_as_text(self)


class Expression:
    """Base of every choice a user can write down. Subclasses are frozen dataclasses."""

    paper: ClassVar[str] = ""  # authors, year, title: shown by `gradwire list`
    # How it is written. `gradwire list` shows the first, the law suites run over all of them.
    examples: ClassVar[tuple[str, ...]] = ()
    # Names by which others know it, or the part of theirs that it is; only messages use them.
    known_as: ClassVar[tuple[str, ...]] = ()
    # Laws of `gradwire.testing` that its definition breaks, by name, each with the reason.
    exempt_from: ClassVar[Mapping[str, str]] = Table({})
    # Fields whose arguments have names of their own: `ring` is a graph in `gossip(ring)` and an
    # architecture elsewhere. Each is a `Registry`, which looks for its classes when it is first
    # asked, so there is no cycle of imports. Written `registries = Table({"graph": GRAPHS})`.
    registries: ClassVar[Mapping[str, Any]] = Table({})

    def __repr__(self) -> str:
        # The first field is written by position, the others by name; defaults are left out.
        written = []
        for index, field in enumerate(fields(self)):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if field.type is float and isinstance(value, int):
                value = float(value)  # equal expressions are written alike
            if field.default is not MISSING and value == field.default:
                continue
            positional = index == 0
            written.append(
                written_as_text(value) if positional else f"{field.name}={written_as_text(value)}"
            )
        name = notation_name(type(self))
        return f"{name}({', '.join(written)})" if written else name

    @classmethod
    def summary(cls) -> str:
        """The first sentence of the documentation, in one line."""
        text = inspect.getdoc(cls) or ""
        return " ".join(text.split("\n\n")[0].split())


def unknown_name(what: str, name: str, valid: list[str]) -> str:
    """The message for a name that does not exist: the nearest, and the valid ones."""
    near = nearest(name, valid)
    hint = f" Did you mean {near}?" if near else ""
    return f"unknown {what} {name!r}.{hint} Valid names: {', '.join(valid)}."


def nearest(name: str, valid: list[str]) -> str | None:
    """The valid name that was probably meant: the same letters, or nearly."""
    plain = {plain_name(each): each for each in valid}
    near = difflib.get_close_matches(plain_name(name), list(plain), n=1, cutoff=0.5)
    return plain[near[0]] if near else None


def plain_name(name: str) -> str:
    """A name without what people write differently: case, hyphens, underscores."""
    return re.sub(r"[\W_]", "", name).lower()


def with_replaced(value: Any, kind: type[T], replacing: Callable[[T], Any]) -> Any:
    """An expression with all of a kind in it replaced; the same object if nothing changes."""
    if isinstance(value, kind):
        return replacing(value)
    if isinstance(value, tuple):
        items = tuple(with_replaced(item, kind, replacing) for item in value)
        return value if _are_same(items, value) else items
    if isinstance(value, Table):
        new = {key: with_replaced(item, kind, replacing) for key, item in value.items()}
        return value if _are_same(tuple(new.values()), tuple(value.values())) else Table(new)
    if isinstance(value, Expression):  # all are dataclasses
        own = {field.name: getattr(value, field.name) for field in fields(value)}  # type: ignore[arg-type]
        changed = {name: with_replaced(item, kind, replacing) for name, item in own.items()}
        changed = {name: item for name, item in changed.items() if item is not own[name]}
        return replace(value, **changed) if changed else value  # type: ignore[type-var]
    return value


def _are_same(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    return all(x is y for x, y in zip(a, b))
