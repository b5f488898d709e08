"""One notation for everything that can be chosen: `ef(topk(0.01) >> qsgd(bits=4))`.

An `Expression` is a frozen dataclass whose `repr` is the text that makes it again:
`parse(repr(x)) == x` is a law. The same strings serve Python, TOML files, the command line,
logs and tables. Text is read by a walk over its syntax tree that knows calls, names, constants,
tuples, tables `{"name": expression}` and `>>`; nothing is ever evaluated.

The name of an algorithm is the name of its file. A `Registry` finds the classes of one kind in
a package; there is no list to edit. An argument may have names of its own (`registries`).
"""

import ast
import difflib
import importlib
import inspect
import json
import pkgutil
import re
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache, cached_property
from typing import Any, ClassVar, Generic, TypeVar

from gradwire.core.errors import NotationError

_MAX_REPAIRED = 200  # characters of a wrong expression for which the right one is looked for
_MAX_LENGTH = 10_000  # characters; a longer expression is a mistake
_MAX_DEPTH = 32  # expressions in expressions; a chain of n stages counts n


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
    # Fields whose arguments have names of their own: `ring` is a graph in `gossip(ring)` and an
    # architecture elsewhere. A registry looks for its classes when it is first asked, so there is
    # no cycle of imports. Written `registries = Table({"graph": GRAPHS})`.
    registries: ClassVar[Mapping[str, "Registry[Any]"]] = Table({})

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


E = TypeVar("E", bound=Expression)


class Registry(Generic[E]):
    """The expressions of one kind, found by looking into a package or module."""

    def __init__(self, what: str, kind: type[E], where: str, varies: bool = False) -> None:
        self.what = what  # what a user calls it, for messages: "compression", "optimizer"
        self.kind = kind
        self.where = where
        self.varies = varies  # whether its numbers may change with time, see core/ramp.py

    @cached_property
    def _classes(self) -> dict[str, type[E]]:
        found: dict[str, type[E]] = {}
        for module in _modules(self.where):
            for cls in vars(module).values():
                if self._belongs(cls) and cls.__module__ == module.__name__:
                    name = notation_name(cls)
                    assert name not in found, f"{self.what} {name} is defined twice"
                    found[name] = cls
        return dict(sorted(found.items()))

    def _belongs(self, cls: Any) -> bool:
        """Whether something found in a module is a finished expression of this kind."""
        return (
            inspect.isclass(cls)
            and issubclass(cls, self.kind)
            and not inspect.isabstract(cls)
            and not cls.__name__.startswith("_")
            and is_dataclass(cls)
        )

    def names(self) -> list[str]:
        return list(self._classes)

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
        try:
            return self._parse(text)
        except NotationError as error:
            meant = self._repaired(text) if isinstance(text, str) else None
            if meant is None or "Did you mean" in str(error):
                raise
            raise NotationError(f"{error}. Did you mean {meant}?") from None

    def _repaired(self, text: str) -> str | None:
        """What was probably meant: `topk(0.01)` for `top-k(0.01)`, `TopK(0.01)` and `topk(1%)`."""
        if len(text) > _MAX_REPAIRED:
            return None
        known = {_plain(name): name for name in self.names()}
        repaired = re.sub(r"\d+(\.\d+)?\s*%", lambda m: f"{float(m[0][:-1]) / 100:g}", text)
        repaired = re.sub(r"[A-Za-z_]\w*(-\w+)*", lambda m: known.get(_plain(m[0]), m[0]), repaired)
        try:
            return repr(self._parse(repaired)) if repaired != text else None
        except NotationError:
            return None

    def _parse(self, text: "str | E") -> E:
        if not isinstance(text, str):
            if isinstance(text, self.kind):
                return text
            raise NotationError(
                f"{self.what} must be a string such as {self.names()[0]!r} or a "
                f"{self.kind.__name__}, got {type(text).__name__}"
            )
        if len(text) > _MAX_LENGTH:
            raise NotationError(f"{self.what}: {len(text)} characters, at most {_MAX_LENGTH}")
        try:
            tree = ast.parse(text.strip(), mode="eval")
            if isinstance(tree.body, ast.Constant) and tree.body.value is None:
                tree.body = ast.Name(id="none", ctx=ast.Load())  # Python's word for nothing
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            why = error.args[0] if error.args else "nested too deeply"
            raise NotationError(
                f"{self.what} {text!r} is not an expression ({why}); "
                f"write it like {self.names()[0]}, name(argument) or a >> b"
            ) from None
        if (depth := _depth(tree.body)) > _MAX_DEPTH:
            raise NotationError(
                f"{self.what} {text[:60]!r}... is nested {depth} deep, at most {_MAX_DEPTH}; each "
                ">> counts"
            )
        value = _Reader(self, text).read_whole(tree.body)
        if not isinstance(value, self.kind):
            raise NotationError(
                f"{text!r} is not a {self.what}; try one of {', '.join(self.names())}"
            )
        if _ramps().ramps(value):
            for where, values in (("start", _ramps().begun), ("end", _ramps().settled)):
                try:
                    values(value)
                except ValueError as error:
                    raise NotationError(
                        f"{error} (in {text!r}, at the {where} of a ramp)"
                    ) from None
        return value


def unknown_name(what: str, name: str, valid: list[str]) -> str:
    """The message for a name that does not exist: the nearest, and the valid ones."""
    near = nearest(name, valid)
    hint = f" Did you mean {near}?" if near else ""
    return f"unknown {what} {name!r}.{hint} Valid names: {', '.join(valid)}."


def nearest(name: str, valid: list[str]) -> str | None:
    """The valid name that was probably meant: the same letters, or nearly."""
    plain = {_plain(each): each for each in valid}
    near = difflib.get_close_matches(_plain(name), list(plain), n=1, cutoff=0.5)
    return plain[near[0]] if near else None


def _plain(name: str) -> str:
    """A name without what people write differently: case, hyphens, underscores."""
    return re.sub(r"[\W_]", "", name).lower()


def _depth(node: ast.expr) -> int:
    """How deep the expressions in a syntax tree are nested, without recursion."""
    deepest, stack = 0, [(node, 1)]
    while stack:
        inner, depth = stack.pop()
        deepest = max(deepest, depth)
        for child in ast.iter_child_nodes(inner):
            if isinstance(child, ast.expr):
                stack.append((child, depth + 1))
            elif isinstance(child, ast.keyword):
                stack.append((child.value, depth + 1))
    return deepest


def _modules(where: str) -> Iterator[types.ModuleType]:
    module = importlib.import_module(where)
    yield module
    for info in pkgutil.iter_modules(getattr(module, "__path__", ())):
        if not info.name.startswith("_"):
            yield from _modules(f"{where}.{info.name}")


class _Reader:
    """Walks a syntax tree and builds the expression it writes."""

    def __init__(self, registry: Registry[Any], text: str) -> None:
        self.registry = registry
        self.text = text

    def read_whole(self, node: ast.expr) -> Any:
        """What stands where an expression of this registry belongs."""
        value = self.read(node)
        if not self.registry.varies and (found := _ramps().ramps(value)):
            self.fail(f"{found[0]!r}: a {self.registry.what} does not change with time")
        return value

    def read(self, node: ast.expr) -> Any:  # noqa: RET503
        match node:
            case ast.Constant(value=bool() | int() | float() | str() | None as value):
                return value
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
                return -value
            case ast.Tuple(elts=items) | ast.List(elts=items):
                return tuple(self.read(item) for item in items)
            case ast.Dict(keys=keys, values=items):
                table: dict[str, Any] = {}
                for key, item in zip(keys, items):
                    if not (isinstance(key, ast.Constant) and isinstance(key.value, str)):
                        self.fail(f"the keys of {ast.unparse(node)} must be strings")
                    if key.value in table:
                        self.fail(f"{ast.unparse(node)} has {written_as_text(key.value)} twice")
                    table[key.value] = self.read(item)
                return Table(table)
            case ast.Name(id=name) | ast.UnaryOp(op=ast.USub(), operand=ast.Name(id=name)) if (
                name.lower() in ("nan", "inf", "infinity")
            ):
                self.fail(f"{name} is not a number of the notation: write a finite one")
            case ast.Name(id=name):
                return self.build(name, [], [])
            case ast.Call(func=ast.Name(id=name), args=args, keywords=keywords):
                return self.build(name, args, keywords)
            case ast.BinOp(op=ast.RShift(), left=left, right=right):
                first, second = self.read(left), self.read(right)
                try:
                    if isinstance(first, Expression):  # two numbers would be shifted
                        return first >> second
                except TypeError:
                    pass
                except ValueError as error:
                    raise NotationError(str(error)) from None
                self.fail(
                    f"{written_as_text(first)} and {written_as_text(second)} cannot be joined by >>"
                )
        self.fail(f"{ast.unparse(node)!r} is not part of the notation")

    def build(self, name: str, args: list[ast.expr], keywords: list[ast.keyword]) -> Expression:
        cls: type[Expression] = _ramps().Ramp if name == "ramp" else self.registry[name]
        known = {field.name: field for field in fields(cls)}  # type: ignore[arg-type]
        signature = f"{name}({', '.join(_signature(cls))})"
        if len(args) > len(known):
            self.fail(f"{name} takes at most {len(known)} arguments: {signature}")
        written = dict(zip(known, args))
        for keyword in keywords:
            if keyword.arg is None:
                self.fail("`**` is not part of the notation")
            if keyword.arg not in known:
                self.fail(unknown_name(f"argument of {name}", keyword.arg, list(known)))
            if keyword.arg in written:
                self.fail(f"{name} got {keyword.arg} twice: {signature}")
            written[keyword.arg] = keyword.value
        given = {key: self.argument(cls, key, node) for key, node in written.items()}
        hints = _hints(cls)  # type: ignore[arg-type]  # classes are hashable
        for key, field in known.items():
            if key not in given:
                if field.default is MISSING and field.default_factory is MISSING:
                    self.fail(f"{name} needs {key}: write {signature}")
            elif not _fits(given[key], hints[key]):
                wanted = _spelled(hints[key])
                if key in cls.registries:
                    wanted += f" ({', '.join(cls.registries[key].names())})"
                self.fail(f"{name}: {key} must be {wanted}, got {written_as_text(given[key])}")
            elif isinstance(given[key], _ramps().Ramp):
                if not _fits(0.5, hints[key]):
                    given[key] = given[key].whole()
            elif hints[key] is float:
                try:
                    given[key] = float(given[key])
                except OverflowError:
                    self.fail(f"{name}: {key} is too large for a float")
        try:
            return cls(**given)
        except NotationError:
            raise
        except ValueError as error:
            raise NotationError(f"{error} (in {self.text!r})") from None

    def argument(self, cls: type[Expression], key: str, node: ast.expr) -> Any:
        if key in cls.registries:
            return _Reader(cls.registries[key], self.text).read_whole(node)
        return self.read(node)

    def fail(self, message: str) -> typing.NoReturn:
        raise NotationError(f"{message} (in {self.text!r})")


def _ramps() -> types.ModuleType:
    """Numbers that change with time are expressions themselves: the import goes both ways."""
    from gradwire.core import ramp

    return ramp


@cache
def _hints(cls: Any) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _signature(cls: type[Expression]) -> Iterator[str]:
    for field in fields(cls):  # type: ignore[arg-type]
        default = "" if field.default is MISSING else f"={written_as_text(field.default)}"
        yield field.name + default


def _spelled(hint: Any) -> str:
    if typing.get_origin(hint) is typing.Literal:
        return "one of " + ", ".join(written_as_text(choice) for choice in typing.get_args(hint))
    names = [getattr(option, "__name__", str(option)) for option in _options(hint)]
    return " or ".join("nothing" if name == "NoneType" else name for name in names)


def _options(hint: Any) -> tuple[Any, ...]:
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return typing.get_args(hint) if union else (hint,)


def _fits(value: object, hint: Any) -> bool:
    """Whether a value read from text may stand where `hint` is declared."""
    for option in _options(hint):
        origin = typing.get_origin(option)
        if origin is typing.Literal:
            if value in typing.get_args(option):
                return True
        elif origin is tuple:
            item = typing.get_args(option)[0]
            if isinstance(value, tuple) and all(_fits(part, item) for part in value):
                return True
        elif option is float:
            if isinstance(value, int | float) and not isinstance(value, bool):
                return True
        elif option is int:
            if isinstance(value, int | _ramps().Ramp) and not isinstance(value, bool):
                return True
        elif isinstance(value, origin or option):
            return True
    return False
