"""Header objects as bytes: all kinds of values come out as they went in, in few bytes, and forged
bytes only ever give a WireError."""

import struct
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradwire.compression import COMPRESSION
from gradwire.compression.sparsification.topk import TopK
from gradwire.core.codec import Codec
from gradwire.core.errors import WireError
from gradwire.core.key import Key
from gradwire.core.payload import DTYPES
from gradwire.core.spec import Spec
from gradwire.runtime.process.headers import Headers
from gradwire.training.wire import PushHeader


class Task(Protocol):
    pass


@dataclass(frozen=True)
class Coded(Task):
    codec: Codec
    spec: Spec
    key: Key
    members: tuple[int, ...] = ()


@dataclass(frozen=True)
class Sparse(Task):
    codec: TopK


@dataclass(frozen=True)
class Nested(Task):
    task: Task | None


@dataclass(frozen=True)
class Everything:
    kind: Literal["a", "b", 1]
    count: int
    ratio: float
    flag: bool
    name: str
    one_of: float | int | str | None
    pair: tuple[float, int] | None
    many: tuple[tuple[str, tuple[int, ...]], ...]
    task: Task | None


@dataclass(frozen=True)
class Empty:
    pass


@dataclass(frozen=True)
class Positive:
    value: int

    def __post_init__(self) -> None:
        if self.value <= 0:
            raise ValueError(f"{self.value} is not positive")


HEADERS = Headers(
    Everything, Empty, Positive, Coded, Sparse, Nested, Spec, Key, parse={Codec: COMPRESSION.parse}
)
INTEGERS = st.integers(-(2**64), 2**64 - 1)
FLOATS = st.floats(allow_nan=False)
TEXTS = st.text(max_size=12)
SPECS = st.builds(
    Spec,
    st.lists(st.integers(0, 2**40), max_size=4).map(tuple),
    st.sampled_from(DTYPES),
    st.none() | INTEGERS,
    st.lists(
        st.tuples(TEXTS, INTEGERS, INTEGERS, st.lists(INTEGERS, max_size=2).map(tuple)), max_size=3
    ).map(tuple),
)
KEYS = st.builds(
    Key,
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**32 - 1),
    st.none() | st.integers(0, 2**32 - 2),
    st.integers(0, 2**32 - 1),
)
CODECS = st.sampled_from(
    ["topk(0.01)", "sign", "topk(0.1) >> qsgd(4)", "terngrad(scale=0.125)", "identity"]
).map(COMPRESSION.parse)
TASKS = st.recursive(
    st.none()
    | st.builds(Coded, CODECS, SPECS, KEYS, st.lists(INTEGERS, max_size=3).map(tuple))
    | st.builds(Sparse, st.floats(0.001, 1).map(TopK)),
    lambda inner: st.builds(Nested, inner),
    max_leaves=3,
)
ALL = st.builds(
    Everything,
    st.sampled_from(["a", "b", 1]),
    INTEGERS,
    FLOATS,
    st.booleans(),
    TEXTS,
    FLOATS | INTEGERS | TEXTS | st.none(),
    st.none() | st.tuples(FLOATS, INTEGERS),
    st.lists(st.tuples(TEXTS, st.lists(INTEGERS, max_size=3).map(tuple)), max_size=3).map(tuple),
    TASKS,
)


@given(ALL | SPECS | KEYS | st.just(Empty()) | st.none())
def test_headers_come_out_as_they_went_in(header: Any) -> None:
    again = HEADERS.decode(HEADERS.encode(header))
    assert again == header
    assert repr(again) == repr(header)  # also where 1 == 1.0, and what equality leaves out


def test_headers_are_short() -> None:
    headers = Headers(PushHeader)
    assert len(headers.encode(PushHeader(3, 0, 1, 20, True))) == 1 + 4 + 1 + 8
    assert len(headers.encode(PushHeader(1000, 0, 1, 10**6, True))) == 1 + 7 + 1 + 8


@given(st.binary(max_size=60), st.sampled_from(range(10)))
def test_random_bytes(data: bytes, number: int) -> None:
    try:
        header = HEADERS.decode(bytes([number]) + data)
    except WireError:
        return
    assert HEADERS.encode(header) == bytes([number]) + data  # there is one way to write it


@given(ALL, st.data())
def test_forged_bytes(header: Everything, data: st.DataObject) -> None:
    forged = bytearray(HEADERS.encode(header))
    for _ in range(data.draw(st.integers(1, 3))):
        forged[data.draw(st.integers(0, len(forged) - 1))] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        forged = forged[: data.draw(st.integers(1, len(forged)))]
    try:
        again = HEADERS.decode(bytes(forged))
    except WireError:
        return
    assert type(again) in HEADERS.classes
    HEADERS.encode(again)


@given(ALL)
def test_no_part_of_a_header_is_one(header: Everything) -> None:
    data = HEADERS.encode(header)
    for stop in range(1, len(data)):
        with pytest.raises(WireError):
            HEADERS.decode(data[:stop])
    with pytest.raises(WireError, match="left over"):
        HEADERS.decode(data + b"\0")


SMALL = Headers(Positive, Nested, Spec, Sparse, parse={Codec: COMPRESSION.parse})


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"\x07", "header class 7"),
        (b"\0\0", "0 is not positive"),
        (b"\0" + b"\xff" * 9 + b"\x08", "more than 64 bits"),
        (b"\0" + b"\x80" * 10, "more than 10 bytes"),
        (b"\0\x82\0", "more bytes than it needs"),
        (b"\0", "too early"),
        (b"\x01" * 60, "nested|left over|choices|belongs"),
        (b"\x01\x00" * 20, "deep"),
        (b"\x01\x00\x02\x00\x00\x01\x00", "a Spec where a Task belongs"),
        (b"\x02\xff\xff\xff\xff\x0f", "items in"),  # four thousand million dimensions
        (b"\x02\x00\x63", "a dtype has 9 choices"),
        (b"\x02\x00\x07\x01\x01\x02\xff\xfe\0\0\0", "utf-8"),
        (b"\x03\x04sign", "sign where a TopK belongs"),
        (b"\x03\x04nope", "unknown compression"),
        (b"\x03\x07topk(2)", "no TopK"),
        (b"\x03\x02\xff\xfe", "no TopK"),
        (b"\x03\x86\x4e((((((", "too early"),
        (b"\x03\xff\xff\x7f", "the limit is"),
        (b"\x03\x06((((((", "is not an expression"),
        (b"\x03\x0atopk( 0.5)", "another way"),
        (
            b"\x03\xa9\x03" + b" >> ".join([b"topk(0.5)"] * 33),
            "is nested 34 deep",
        ),
    ],
)
def test_what_is_refused(data: bytes, why: str) -> None:
    with pytest.raises(WireError, match=why):
        SMALL.decode(data)


def test_bombs_are_refused_before_anything_is_built() -> None:
    @dataclass(frozen=True)
    class Floats:
        many: tuple[tuple[float, float], ...]

    headers = Headers(Floats)
    assert headers.decode(b"\0\x01" + struct.pack("<dd", 1, 2)) == Floats(((1.0, 2.0),))
    with pytest.raises(WireError, match="2 items in 31 bytes"):
        headers.decode(b"\0\x02" + bytes(31))


@pytest.mark.parametrize(
    ("header", "why"),
    [
        (Positive(2**64), "more than 64 bits"),
        (Positive(1.5), "Positive.value should be"),  # type: ignore[arg-type]
        (Positive(True), "Positive.value should be"),
        (Nested(Positive(1)), "Nested.task should be"),  # type: ignore[arg-type]
        (Nested(Coded(TopK(0.1), Spec((1,), torch.float32), Key(0))), "class Coded cannot be sent"),
        (Spec((1,), torch.complex64), "Spec.dtype should be"),
        (Spec((1.5,), torch.float32), "Spec.shape should be"),  # type: ignore[arg-type]
        (Spec([1], torch.float32), "Spec.shape should be"),  # type: ignore[arg-type]
        (Sparse(COMPRESSION.parse("sign")), "Sparse.codec should be"),  # type: ignore[arg-type]
        (Key(0), "class Key cannot be sent; this transport knows Positive, Nested, Spec, Sparse"),
        ("text", "class str cannot be sent"),
    ],
)
def test_what_cannot_be_sent(header: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        SMALL.encode(header)


def test_an_expression_that_its_text_does_not_make_again() -> None:
    @dataclass(frozen=True)
    class Holder:
        codec: Codec

    headers = Headers(Holder, parse={Codec: lambda text: COMPRESSION.parse("sign")})
    with pytest.raises(ValueError, match="does not make it again"):
        headers.encode(Holder(TopK(0.1)))


def test_classes_that_cannot_travel() -> None:
    @dataclass(frozen=True)
    class Fancy:
        what: object

    @dataclass(frozen=True)
    class Holder:
        key: Key

    @dataclass(frozen=True)
    class Nothings:
        many: tuple[None, ...]

    @dataclass
    class Mutable:
        what: int

    for cls in (Fancy, Holder, Nothings, Coded):
        with pytest.raises(TypeError, match="cannot travel"):
            Headers(cls)
    with pytest.raises(TypeError, match="no frozen dataclass"):
        Headers(Mutable)
    with pytest.raises(TypeError, match="once"):
        Headers(Empty, Empty)


def test_lists_have_a_digest() -> None:
    assert Headers(Empty, Positive).digest == Headers(Empty, Positive).digest
    assert Headers(Empty, Positive).digest != Headers(Positive, Empty).digest
    assert len(HEADERS.digest) == 8


def test_a_number_that_is_too_long_to_be_written() -> None:
    @dataclass(frozen=True)
    class Holder:
        codec: Codec

    @dataclass(frozen=True)
    class Text:
        text: str

    parse = {Codec: COMPRESSION.parse}
    data = Headers(Text).encode(Text("onebit(0x" + 5000 * "f" + ")"))
    with pytest.raises(WireError, match="Exceeds the limit"):
        Headers(Holder, parse=parse).decode(data)
