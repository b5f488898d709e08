"""Checks the values of options before tyro parses them, for better messages than tyro's."""

import types
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import tyro

from gradwire.core.notation import unknown_name
from gradwire.experiment.run.advice import advice

_NUMBERS = {int: "a whole number", float: "a number"}


class _Option(NamedTuple):
    kind: Any  # int, float, str, bool, Path or a Literal
    is_several: bool = False
    is_optional: bool = False  # tyro reads the word None
    is_positional: bool = False


def check_values(name: str, command: Any, argv: list[str]) -> None:
    """Refuses a value that is not of its option's type, or none where there must be one."""
    if {"-h", "--help"} & set(argv):
        return
    options = _options(command)
    for given, values in given_options(command, argv):
        option = options[given]
        shown = given if option.is_positional else f"--{given.replace('_', '-')}"
        if not (values or option.is_several or option.kind is bool):
            wanted = _NUMBERS.get(option.kind, "a value")
            raise ValueError(f"{shown} needs {wanted} after it. See gradwire {name} --help.")
        for value in values:
            if option.is_optional and value == "None":
                continue
            if wrong := _wrong(shown, option.kind, value):
                raise ValueError(f"{wrong} See gradwire {name} --help.")


def given_options(command: Any, argv: list[str]) -> Iterator[tuple[str, list[str]]]:
    """The options in the arguments that the command has, each with its values, in order."""
    options = _options(command)
    positional = [name for name, option in options.items() if option.is_positional]
    position = 0
    while position < len(argv):
        name, equals, value = argv[position].partition("=")
        position += 1
        if not name.startswith("-"):
            if positional:
                yield positional.pop(0), [argv[position - 1]]
            continue
        end = position
        while end < len(argv) and not argv[end].startswith("--"):
            end += 1
        option = options.get(name.removeprefix("--").replace("-", "_"))
        if option is None or option.is_positional or not name.startswith("--"):
            position = end  # `explain_unknown` reports these, with what follows them
            continue
        limit = len(argv) if option.is_several else 0 if option.kind is bool or equals else 1
        end = min(end, position + limit)
        yield (
            name.removeprefix("--").replace("-", "_"),
            ([value] if equals else []) + argv[position:end],
        )
        position = end


def _wrong(shown: str, kind: Any, value: str) -> str | None:
    """What is wrong with a value; None if nothing is."""
    if kind in _NUMBERS:
        try:
            kind(value)
        except ValueError:
            return f"{shown} takes {_NUMBERS[kind]}, got {value!r}."
    if get_origin(kind) is Literal and value not in get_args(kind):
        message = unknown_name(shown, value, [each for each in get_args(kind) if each])
        return " ".join(filter(None, (message, advice(value))))
    return None


def _options(command: Any) -> dict[str, _Option]:
    """The options of a command by name, including those of a configuration inside it."""
    hints = get_type_hints(type(command), include_extras=True)
    found: dict[str, _Option] = {}
    for field in fields(command):
        value = getattr(command, field.name)
        found |= (
            _options(value) if is_dataclass(value) else {field.name: _option(hints[field.name])}
        )
    return found


def _option(hint: Any) -> _Option:
    """An option of this type: `int | None`, `tuple[int, ...]` and `Annotated[...]` are of int."""
    if get_origin(hint) is Annotated:
        inner, *notes = get_args(hint)
        return _option(inner)._replace(is_positional=tyro.conf.Positional in notes)
    if get_origin(hint) in (Union, types.UnionType):
        (hint,) = (each for each in get_args(hint) if each is not type(None))
        return _option(hint)._replace(is_optional=True)
    if get_origin(hint) is tuple:
        return _option(get_args(hint)[0])._replace(is_several=True)
    assert hint in (int, float, str, bool, Path) or get_origin(hint) is Literal, hint
    return _Option(hint)
