"""Descriptions of all registered algorithms, for `gradwire list`."""

import ast
import contextlib
import inspect
import re
from collections.abc import Iterator
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import torch

import gradwire
from gradwire.core.codec import Codec, Guarantee, Kind, drops_for_good
from gradwire.core.errors import NotationError
from gradwire.core.notation import Expression, nearest, written_as_text
from gradwire.core.protocols import Architecture, Synchronization
from gradwire.core.reducer import Reducer
from gradwire.core.registry import Registry
from gradwire.core.spec import Spec
from gradwire.experiment.run.record import Row
from gradwire.experiment.run.registries import REGISTRIES

_MAX_EXPRESSION = 200  # characters, so that no expression is nested too deeply to parse
_NUMEL = 100_000  # of the vector for which guarantees are shown


def entries() -> list[Row]:
    """A short description of each algorithm."""
    return [
        {
            "dimension": kind,
            "name": name,
            "example": (registry[name].examples or (name,))[0],
            "summary": registry[name].summary(),
            "paper": registry[name].paper,
        }
        for kind, registry in REGISTRIES.items()
        for name in registry.names()
    ]


def about(text: str) -> list[Row]:
    """Descriptions of the algorithms of this name, or in an expression such as qsgd(bits=4).

    A name may have several: `ring` is an architecture and a graph.
    """
    return [entry for name in _stage_names(text) for entry in _entries_of(name)]


def _stage_names(text: str) -> list[str]:
    """`topk` and `qsgd` of `topk(0.01) >> qsgd(bits=4)`; the text if it is no expression."""

    def names(node: ast.expr) -> list[str]:
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.RShift):
            return names(node.left) + names(node.right)
        if isinstance(node, ast.Call):
            return names(node.func)
        return [node.id] if isinstance(node, ast.Name) else []

    if len(text) > _MAX_EXPRESSION:
        return [text]
    try:
        found = names(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError):
        return [text]
    return list(dict.fromkeys(found)) or [text]


def _entries_of(name: str) -> list[Row]:
    found = [
        _about(kind, name, registry) for kind, registry in REGISTRIES.items() if name in registry
    ]
    if found:
        return found
    for registry in REGISTRIES.values():
        if any(name in cls.known_as for cls in registry):
            registry[name]  # raises an error with its name here
    near = nearest(
        name, sorted({each for registry in REGISTRIES.values() for each in registry.names()})
    )
    hint = f" Did you mean {near}?" if near else ""
    raise ValueError(f"unknown algorithm {name!r}.{hint} gradwire list shows all.")


def _about(kind: str, name: str, registry: Registry[Any]) -> Row:
    cls: type[Expression] = registry[name]
    doc = inspect.getdoc(inspect.getmodule(cls)) or ""
    return {
        "dimension": kind,
        "name": name,
        "write": f"{name}({', '.join(_arguments(cls))})" if fields(cls) else name,  # type: ignore[arg-type]
        "summary": cls.summary(),
        "about": _unwrapped(doc if _is_own(name, cls) else inspect.getdoc(cls) or ""),
        "paper": cls.paper,
        "examples": list(cls.examples or (name,)),
        "properties": list(_properties(_example(name, registry))),
        "file": _file(cls),
        "plugin": registry.origin(name),
    }


def _unwrapped(text: str) -> str:
    """The text with one line per paragraph, for any width; formulas and lists are unchanged."""
    paragraphs = text.split("\n\n")
    stay = (" ", "-", "|")
    return "\n\n".join(
        each if any(line.startswith(stay) for line in each.splitlines()) else " ".join(each.split())
        for each in paragraphs
    )


def _arguments(cls: type[Expression]) -> Iterator[str]:
    for field in fields(cls):  # type: ignore[arg-type]
        text = field.type if isinstance(field.type, str) else inspect.formatannotation(field.type)
        hint = re.sub(r"\b(\w+\.)+(?=[A-Z])", "", text)  # without the names of modules
        default = "" if field.default is MISSING else f" = {written_as_text(field.default)}"
        yield f"{field.name}: {hint}{default}"


def _is_own(name: str, cls: type[Expression]) -> bool:
    """Whether its file describes only this class."""
    return cls.__module__.rpartition(".")[2] == name


def _file(cls: type[Expression]) -> str:
    try:
        path = Path(inspect.getfile(cls))
    except (OSError, TypeError):  # written in a notebook or an interpreter
        return ""
    root = Path(gradwire.__file__).parent.parent
    return str(path.relative_to(root)) if path.is_relative_to(root) else str(path)


def _example(name: str, registry: Registry[Any]) -> Expression | None:
    """An instance of this class: its name without arguments, if that parses, or an example."""
    cls = registry[name]
    for text in (name, *cls.examples):
        with contextlib.suppress(NotationError):
            found: Expression = registry.parse(text)
            if isinstance(found, cls):
                return found
    return None


def _properties(example: Expression | None) -> Iterator[str]:
    """What it guarantees, needs or offers, for the arguments of the example."""
    if isinstance(example, Codec):
        yield from _codec(example)
    elif isinstance(example, Reducer):
        yield "a way of averaging among workers: it is written alone, without >>"
        where = {"after": "on the mean", "before": "before compression", "inside": "in the method"}
        yield f"momentum of the optimizer acts {where[example.momentum_lives]}"
    elif isinstance(example, Synchronization):
        yield f"needs an architecture with {' or '.join(example.needs)}"
    elif isinstance(example, Architecture):
        yield f"offers {', '.join(example.offers)}"


def _codec(codec: Codec) -> Iterator[str]:
    spec = Spec((_NUMEL,), torch.float32)
    yield {
        "LINEAR": "payloads add up on the way: works in an all-reduce without decoding",
        "MERGE": "payloads merge on the way, two into one",
        "OPAQUE": "payloads are decoded before they are averaged",
    }[codec.algebra.name]
    takes = codec.traits.takes
    if takes is Kind.REAL:
        yield _class(codec.guarantee(spec))
    else:
        yield f"encodes {takes.value}: follows a codec that leaves them, by >>"
    if codec.traits.needs_feedback:
        yield "works inside ef(...) only"
    elif drops_for_good(codec, spec):
        yield f"biased: write ef({codec!r}), or what it drops is lost"
    if codec.leaves is not Kind.NOTHING:
        yield f"leaves {codec.leaves.value}, which another codec can encode: {codec!r} >> ..."


def _class(guarantee: Guarantee) -> str:
    where = f"on vectors of {_NUMEL:,} elements"
    if guarantee.omega == 0:
        return "lossless"
    if guarantee.omega is not None:
        return f"unbiased, relative variance at most {guarantee.omega:.3g} {where}"
    if guarantee.delta is not None:
        return f"contraction: keeps at least {guarantee.delta:.3g} of the squared norm {where}"
    return "no guarantee is known" + (": errors that are fed back may grow" * guarantee.grows)
