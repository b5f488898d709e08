"""Header objects as bytes: frozen dataclasses of plain values whose classes are on a list.

An object is the number of its class (its place on the list, one byte) and then its fields, each as
its declared type says:

    int, float          signed, f64 (see core/binary.py)
    str, bytes          text, chunk
    bool, torch.dtype   one byte
    Literal, unions     one byte: the number of the alternative; then the value of a union
    tuples              the items; before those of tuple[x, ...] their number as a varint
    other classes       an object whose class is that one, or a subclass, and is on the list
    expressions         their text, which a parser that comes with the list reads again

Nothing that comes from the network is trusted. Lengths are checked before anything is allocated,
every value has one encoding, and nothing may be left over. Whatever else is wrong, such as
arguments that a constructor refuses, is a `WireError`. What cannot be sent is a `ValueError`.
"""

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import lru_cache
from hashlib import blake2b
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, NoReturn, Union, get_args, get_origin, get_type_hints

import torch

from gradwire.core.binary import (
    ByteReader,
    write_chunk,
    write_f64,
    write_signed,
    write_text,
    write_varint,
)
from gradwire.core.errors import WireError
from gradwire.core.payload import DTYPES

Parse = Callable[[str], Any]

_MAX_DEPTH = 8  # objects in objects
_MAX_EXPRESSION_NBYTES = 10_000


class _HeaderReader(ByteReader):
    """Also counts how many objects enclose the one that is read."""

    __slots__ = ("depth",)

    def __init__(self, data: bytes, what: str) -> None:
        super().__init__(data, what)
        self.depth = 0


class _Field(NamedTuple):
    """How values of one type are written and read."""

    kind: Any  # the type
    fits: Callable[[Any], bool]  # whether it is for this value, not whether that can be sent
    write: Callable[[bytearray, Any], None]
    read: Callable[[_HeaderReader], Any]
    min_nbytes: int


class Headers:
    """The classes of header objects that may travel, and what they may hold.

    `parse` has a parser for each kind of expression: `{Codec: COMPRESSION.parse}`.
    """

    def __init__(self, *classes: type, parse: Mapping[type, Parse] | None = None) -> None:
        self.classes = classes
        self._parse = {kind: lru_cache(maxsize=256)(read) for kind, read in (parse or {}).items()}
        self._numbers = {cls: number for number, cls in enumerate(classes)}
        if len(self._numbers) != len(classes) or len(classes) > 256:
            raise TypeError("a list of headers has at most 256 classes, each of them once")
        self._fields: list[list[tuple[str, _Field]]] = []
        description = []
        for cls in classes:
            if not is_dataclass(cls) or not cls.__dataclass_params__.frozen:  # type: ignore[attr-defined]
                raise TypeError(f"{cls.__name__} is no frozen dataclass, so it cannot be a header")
            hints = get_type_hints(cls)
            self._fields.append(
                [(one.name, self._field(hints[one.name])) for one in fields(cls) if one.init]
            )
            names = [f"{name}: {field.kind}" for name, field in self._fields[-1]]
            description.append(f"{cls.__module__}.{cls.__qualname__}({', '.join(names)})")
        # Two sides understand each other if they have the same.
        self.digest = blake2b("\n".join(description).encode(), digest_size=8).digest()

    def encode(self, header: Any) -> bytes:
        """None is no bytes."""
        out = bytearray()
        if header is not None:
            self._write(out, header)
        return bytes(out)

    def decode(self, data: bytes) -> Any:
        if not data:
            return None
        reader = _HeaderReader(data, "a header object")
        header = self._read(reader)
        reader.end()
        return header

    def _write(self, out: bytearray, value: Any) -> None:
        number = self._numbers.get(type(value))
        if number is None:
            known = ", ".join(cls.__name__ for cls in self.classes)
            raise ValueError(
                f"a header of class {type(value).__name__} cannot be sent; this transport knows "
                f"{known or 'none'}"
            )
        out.append(number)
        for name, field in self._fields[number]:
            inner = getattr(value, name)
            if not field.fits(inner):
                raise ValueError(
                    f"{type(value).__name__}.{name} should be {field.kind}, got {inner!r}"
                )
            field.write(out, inner)

    def _read(self, reader: _HeaderReader, kind: type = object) -> Any:
        number = reader.byte()
        if number >= len(self.classes):
            raise WireError(f"header class {number}; there are {len(self.classes)}")
        cls = self.classes[number]
        if kind not in cls.__mro__:
            raise WireError(f"a {cls.__name__} where a {kind.__name__} belongs")
        if reader.depth == _MAX_DEPTH:
            raise WireError(f"header objects are nested more than {_MAX_DEPTH} deep")
        reader.depth += 1
        values = {name: field.read(reader) for name, field in self._fields[number]}
        reader.depth -= 1
        try:
            return cls(**values)
        except Exception as error:  # the constructor does not like what came
            raise WireError(f"no {cls.__name__}: {error}") from error

    def _field(self, kind: Any) -> _Field:
        origin, args = get_origin(kind), get_args(kind)
        if kind is None:
            kind = NoneType
        if kind in _PLAIN:
            return _PLAIN[kind]
        if origin is Literal:
            return _literal(kind, args)
        if origin in (Union, UnionType):
            return _union(kind, [self._field(arg) for arg in args])
        if origin is tuple and len(args) == 2 and args[1] is Ellipsis:
            return _many(kind, self._field(args[0]))
        if origin is tuple:
            return _tuple(kind, [self._field(arg) for arg in args])
        if isinstance(kind, type):
            for base in kind.__mro__:
                if base in self._parse:
                    return _expression(kind, self._parse[base])
            if any(kind in cls.__mro__ and kind is not object for cls in self.classes):
                return _Field(
                    kind,
                    lambda value: kind in type(value).__mro__,
                    self._write,
                    lambda reader: self._read(reader, kind),
                    1,
                )
        raise TypeError(
            f"a header field of type {kind} cannot travel: only plain values, tuples of these, "
            "expressions that have a parser, and objects whose class is on the list"
        )


def _write_nothing(out: bytearray, value: None) -> None:
    pass


_PLAIN = {
    int: _Field(int, lambda value: type(value) is int, write_signed, ByteReader.signed, 1),
    float: _Field(
        float,
        lambda value: type(value) in (float, int),
        write_f64,
        ByteReader.f64,
        8,
    ),
    bool: _Field(
        bool,
        lambda value: type(value) is bool,
        lambda out, value: out.append(value),
        lambda reader: bool(reader.choice(2, "a bool")),
        1,
    ),
    str: _Field(str, lambda value: type(value) is str, write_text, ByteReader.text, 1),
    bytes: _Field(bytes, lambda value: type(value) is bytes, write_chunk, ByteReader.chunk, 1),
    NoneType: _Field(NoneType, lambda value: value is None, _write_nothing, lambda reader: None, 0),
    torch.dtype: _Field(
        torch.dtype,
        lambda value: value in DTYPES,
        lambda out, value: out.append(DTYPES.index(value)),
        lambda reader: DTYPES[reader.choice(len(DTYPES), "a dtype")],
        1,
    ),
}


def _literal(kind: Any, choices: tuple[Any, ...]) -> _Field:
    typed = [(type(choice), choice) for choice in choices]
    return _Field(
        kind,
        lambda value: (type(value), value) in typed,
        lambda out, value: out.append(typed.index((type(value), value))),
        lambda reader: choices[reader.choice(len(choices), kind)],
        1,
    )


def _union(kind: Any, choices: list[_Field]) -> _Field:
    choices.sort(key=lambda choice: choice.kind is float)  # last: it takes integers, too

    def write(out: bytearray, value: Any) -> None:
        number = next(number for number, choice in enumerate(choices) if choice.fits(value))
        out.append(number)
        choices[number].write(out, value)

    return _Field(
        kind,
        lambda value: any(choice.fits(value) for choice in choices),
        write,
        lambda reader: choices[reader.choice(len(choices), kind)].read(reader),
        1,
    )


def _many(kind: Any, item: _Field) -> _Field:
    if not item.min_nbytes:
        raise TypeError(f"a header field of type {kind} cannot travel: its items have no bytes")

    def write(out: bytearray, value: tuple[Any, ...]) -> None:
        write_varint(out, len(value))
        for one in value:
            item.write(out, one)

    def read(reader: _HeaderReader) -> tuple[Any, ...]:
        count = reader.varint()
        if count * item.min_nbytes > reader.num_left:
            raise WireError(f"{count} items in {reader.num_left} bytes of a header")
        return tuple(item.read(reader) for _ in range(count))

    def fits(value: Any) -> bool:
        return type(value) is tuple and all(map(item.fits, value))

    return _Field(kind, fits, write, read, 1)


def _tuple(kind: Any, items: list[_Field]) -> _Field:
    def write(out: bytearray, value: tuple[Any, ...]) -> None:
        for item, one in zip(items, value):
            item.write(out, one)

    return _Field(
        kind,
        lambda value: (
            type(value) is tuple
            and len(value) == len(items)
            and all(item.fits(one) for item, one in zip(items, value))
        ),
        write,
        lambda reader: tuple(item.read(reader) for item in items),
        sum(item.min_nbytes for item in items),
    )


def _expression(kind: type, parse: Parse) -> _Field:
    def write(out: bytearray, value: Any) -> None:
        text = repr(value)
        try:
            again = parse(text)
        except ValueError as error:
            _cannot_send(value, error)
        is_short = len(text.encode()) <= _MAX_EXPRESSION_NBYTES
        if type(again) is not type(value) or again != value or not is_short:
            _cannot_send(value, None)
        write_text(out, text)

    def read(reader: _HeaderReader) -> Any:
        nbytes = reader.varint()
        if nbytes > _MAX_EXPRESSION_NBYTES:
            raise WireError(
                f"an expression of {nbytes} bytes; the limit is {_MAX_EXPRESSION_NBYTES}"
            )
        data = reader.take(nbytes)
        try:
            value = parse(data.decode())
            text = repr(value)  # a number may be too long to be written
        except Exception as error:  # whatever a text can do to a parser
            raise WireError(f"no {kind.__name__}: {error!r}") from error
        if not isinstance(value, kind):
            raise WireError(f"{text} where a {kind.__name__} belongs")
        if text.encode("utf-8", "replace") != data:
            raise WireError(f"{data!r} is another way to write {text}")
        return value

    return _Field(kind, lambda value: isinstance(value, kind), write, read, 1)


def _cannot_send(value: Any, error: Exception | None) -> NoReturn:
    raise ValueError(f"{value!r} cannot be sent: its text does not make it again") from error
