"""Reads the text of an expression: a walk over its syntax tree; nothing is ever evaluated.

The walk knows calls, names, constants, tuples, tables `{"name": expression}` and `>>`.
"""

import ast
import re
import types
import typing
from collections.abc import Iterator
from dataclasses import MISSING, fields
from functools import cache
from typing import TYPE_CHECKING, Any

from gradwire.core.errors import NotationError
from gradwire.core.notation import Expression, Table, plain_name, unknown_name, written_as_text
from gradwire.core.ramp import Ramp, at_end, at_start, ramps

if TYPE_CHECKING:
    from gradwire.core.registry import Registry

_MAX_REPAIRED = 200  # characters of a wrong expression for which the right one is looked for
_MAX_LENGTH = 10_000  # characters; a longer expression is a mistake
_MAX_DEPTH = 32  # expressions in expressions; a chain of n stages counts n


def parse_expression(registry: "Registry[Any]", text: str) -> Any:
    """The expression that `text` writes, with names of this registry."""
    try:
        return _parse(registry, text)
    except NotationError as error:
        meant = _repaired(registry, text)
        if meant is None or "Did you mean" in str(error):
            raise
        raise NotationError(f"{error}. Did you mean {meant}?") from None


def _repaired(registry: "Registry[Any]", text: str) -> str | None:
    """What was probably meant: `topk(0.01)` for `top-k(0.01)`, `TopK(0.01)` and `topk(1%)`."""
    if len(text) > _MAX_REPAIRED:
        return None
    known = {plain_name(name): name for name in registry.names()}
    repaired = re.sub(r"\d+(\.\d+)?\s*%", lambda m: f"{float(m[0][:-1]) / 100:g}", text)
    repaired = re.sub(r"[A-Za-z_]\w*(-\w+)*", lambda m: known.get(plain_name(m[0]), m[0]), repaired)
    try:
        return repr(_parse(registry, repaired)) if repaired != text else None
    except NotationError:
        return None


def _parse(registry: "Registry[Any]", text: str) -> Any:
    if len(text) > _MAX_LENGTH:
        raise NotationError(f"{registry.what}: {len(text)} characters, at most {_MAX_LENGTH}")
    try:
        tree = ast.parse(text.strip(), mode="eval")
        if isinstance(tree.body, ast.Constant) and tree.body.value is None:
            tree.body = ast.Name(id="none", ctx=ast.Load())  # Python's word for nothing
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        why = error.args[0] if error.args else "nested too deeply"
        raise NotationError(
            f"{registry.what} {text!r} is not an expression ({why}); "
            f"write it like {registry.names()[0]}, name(argument) or a >> b"
        ) from None
    if (depth := _depth(tree.body)) > _MAX_DEPTH:
        raise NotationError(
            f"{registry.what} {text[:60]!r}... is nested {depth} deep, at most {_MAX_DEPTH}; each "
            ">> counts"
        )
    value = _Reader(registry, text).read_whole(tree.body)
    if not isinstance(value, registry.kind):
        raise NotationError(
            f"{text!r} is not a {registry.what}; try one of {', '.join(registry.names())}"
        )
    if ramps(value):
        for where, values in (("start", at_start), ("end", at_end)):
            try:
                values(value)
            except ValueError as error:
                raise NotationError(f"{error} (in {text!r}, at the {where} of a ramp)") from None
    return value


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


class _Reader:
    """Walks a syntax tree and builds the expression it writes."""

    def __init__(self, registry: "Registry[Any]", text: str) -> None:
        self.registry = registry
        self.text = text

    def read_whole(self, node: ast.expr) -> Any:
        """What stands where an expression of this registry belongs."""
        value = self.read(node)
        if not self.registry.varies and (found := ramps(value)):
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
        cls: type[Expression] = Ramp if name == "ramp" else self.registry[name]
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
            elif isinstance(given[key], Ramp):
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
            if isinstance(value, int | Ramp) and not isinstance(value, bool):
                return True
        elif isinstance(value, origin or option):
            return True
    return False
