"""The expressions of one kind by name: those of a package here, of plugins, and of the script.

There is no list to edit: a registry looks into its package, then at the entry points of its group.
"""

import importlib
import inspect
import pkgutil
import types
from collections.abc import Iterator
from dataclasses import is_dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar

from gradwire.core.errors import NotationError
from gradwire.core.notation import Expression, notation_name, unknown_name
from gradwire.core.parser import parse_expression
from gradwire.core.plugins import Plugin, leave_out, load_plugins

E = TypeVar("E", bound=Expression)


class Registry(Generic[E]):
    """The expressions of one kind, found by looking into a package or module, and at plugins."""

    def __init__(
        self, what: str, kind: type[E], where: str, *, varies: bool = False, group: str = ""
    ) -> None:
        self.what = what  # what a user calls it, for messages: "compression", "optimizer"
        self.kind = kind
        self.where = where
        self.varies = varies  # whether its numbers may change with time, see core/ramp.py
        self.group = group  # of entry points; empty: plugins add nothing
        self._origins: dict[str, str] = {}  # name -> where it comes from, if not from `where`

    @cached_property
    def _classes(self) -> dict[str, type[E]]:
        found: dict[str, type[E]] = {}
        for cls in self._classes_in(importlib.import_module(self.where)):
            name = notation_name(cls)
            assert name not in found, f"{self.what} {name} is defined twice"
            found[name] = cls
        for plugin in load_plugins(self.group):
            for cls in self._offered(plugin):
                name = notation_name(cls)
                if name in found:
                    leave_out(plugin.origin, self._taken(name, found[name]))
                    continue
                found[name], self._origins[name] = cls, plugin.origin
        return dict(sorted(found.items()))

    def _offered(self, plugin: Plugin) -> list[type[E]]:
        """The classes of a plugin: the one that it names, or those in the module that it names."""
        if isinstance(plugin.value, types.ModuleType):
            found = list(self._classes_in(plugin.value))
            if not found:
                leave_out(plugin.origin, f"has no {self.what}: no finished {self.kind.__name__}")
            return found
        if reason := self._unfit(plugin.value):
            leave_out(plugin.origin, reason)
            return []
        return [plugin.value]

    def _classes_in(self, module: types.ModuleType) -> Iterator[type[E]]:
        """The finished expressions of this kind that a module or package defines."""
        for inner in _modules(module):
            for cls in vars(inner).values():
                if not self._unfit(cls) and cls.__module__ == inner.__name__:
                    yield cls

    def _unfit(self, cls: Any) -> str:
        """Why something is no finished expression of this kind; empty if it is one."""
        derived: bool = inspect.isclass(cls) and issubclass(cls, self.kind)
        if not derived:
            return f"is no {self.what}: expected a class derived from {self.kind.__name__}"
        if inspect.isabstract(cls):
            return f"lacks {', '.join(sorted(cls.__abstractmethods__))}"
        if cls.__name__.startswith("_"):
            return f"is private: {cls.__name__} begins with an underscore"
        if not is_dataclass(cls):
            return "is no dataclass: write @dataclass(frozen=True, repr=False) above it"
        return ""

    def _taken(self, name: str, other: type[E]) -> str:
        origin = self._origins.get(name, f"{other.__module__}.{other.__qualname__}")
        return (
            f"has a name that exists already: {self.what} {name!r} is {origin}. "
            "Give its file and class another name"
        )

    def register(self, cls: type[E]) -> None:
        """Adds a class in this process. The same class defined again replaces the earlier one."""
        origin = f"{cls.__module__}.{cls.__qualname__}"
        if reason := self._unfit(cls):
            raise ValueError(f"{origin} {reason}")
        name = notation_name(cls)
        other = self._classes.get(name)
        if other is not None and f"{other.__module__}.{other.__qualname__}" != origin:
            raise ValueError(f"{origin} {self._taken(name, other)}")
        self._origins[name] = origin
        self._classes = dict(sorted({**self._classes, name: cls}.items()))

    def names(self) -> list[str]:
        return list(self._classes)

    def builtin_names(self) -> list[str]:
        """Without those of plugins: what pages and tables of this package are about."""
        return [name for name in self._classes if name not in self._origins]

    def origin(self, name: str) -> str:
        """The plugin or script that a name comes from; empty for those of this package."""
        return self._origins.get(name, "")

    def __iter__(self) -> Iterator[type[E]]:
        return iter(self._classes.values())

    def __contains__(self, name: str) -> bool:
        return name in self._classes

    def __getitem__(self, name: str) -> type[E]:
        if name in self._classes:
            return self._classes[name]
        for here, cls in self._classes.items():
            if name.lower() in cls.known_as:
                raise NotationError(
                    f"unknown {self.what} {name!r}. Did you mean {here}? {cls.summary()}"
                )
        raise NotationError(unknown_name(self.what, name, self.names()))

    def parse(self, text: "str | E") -> E:
        """The expression that `text` writes; an expression is returned as it is."""
        if isinstance(text, self.kind):
            return text
        if not isinstance(text, str):
            raise NotationError(
                f"{self.what} must be a string such as {self.names()[0]!r} or a "
                f"{self.kind.__name__}, got {type(text).__name__}"
            )
        value: E = parse_expression(self, text)
        return value


def _modules(module: types.ModuleType) -> Iterator[types.ModuleType]:
    """A module, and if it is a package those in it that are not private."""
    yield module
    for info in pkgutil.iter_modules(getattr(module, "__path__", ())):
        if not info.name.startswith("_"):
            yield from _modules(importlib.import_module(f"{module.__name__}.{info.name}"))
