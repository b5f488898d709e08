from dataclasses import dataclass, make_dataclass
from typing import Literal
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwire.compression import COMPRESSION
from gradwire.compression.feedback.ef import EF
from gradwire.compression.quantization.bf16 import BF16
from gradwire.compression.quantization.fp16 import FP16
from gradwire.compression.quantization.qsgd import QSGD
from gradwire.compression.quantization.sign import Sign
from gradwire.compression.sparsification.randomk import RandomK
from gradwire.compression.sparsification.topk import TopK
from gradwire.core import parser
from gradwire.core.codec import payload_context
from gradwire.core.errors import NotationError
from gradwire.core.notation import Expression, Table, notation_name
from gradwire.core.registry import Registry
from gradwire.core.spec import Spec


class Toy(Expression):
    """Expressions of this test: one for every type that a field may have."""


@dataclass(frozen=True, repr=False)
class Plain(Toy):
    """A toy without
    fields.

    And a second paragraph.
    """


@dataclass(frozen=True, repr=False)
class ManyFields(Toy):
    number: float
    count: int = 3
    flag: bool = False
    name: str = "x"
    mode: Literal["a", "b"] = "a"
    limit: int | None = None
    ranks: tuple[int, ...] = ()
    inner: Toy | None = None


@dataclass(frozen=True, repr=False)
class HTTPServer2(Toy):
    port: int


class NotADataclass(Toy):
    pass


TOYS = Registry("toy", Toy, __name__)


class Shape(Expression):
    """Expressions that are arguments of others, with names of their own."""


# Written like the toy of that name: what `plain` is depends on where it stands.
PlainShape = make_dataclass(
    "Plain", [], bases=(Shape,), namespace={"__module__": __name__}, frozen=True, repr=False
)


@dataclass(frozen=True, repr=False)
class Polygon(Shape):
    corners: int = 3
    inside: Shape | None = None
    toy: Toy | None = None

    registries = Table({"toy": TOYS})


SHAPES = Registry("shape", Shape, __name__)


class Drawing(Expression):
    """What holds both."""


@dataclass(frozen=True, repr=False)
class Sketch(Drawing):
    shape: Shape
    toy: Toy | None = None
    more: tuple[Shape, ...] = ()
    inner: Drawing | None = None

    registries = Table({"shape": SHAPES, "toy": TOYS, "more": SHAPES})


DRAWINGS = Registry("drawing", Drawing, __name__, varies=True)

numbers = st.floats(allow_nan=False, allow_infinity=False)
toys = st.recursive(
    st.just(Plain()) | st.builds(HTTPServer2, st.integers()),
    lambda inner: st.builds(
        ManyFields,
        number=numbers,
        count=st.integers(),
        flag=st.booleans(),
        name=st.text(st.characters(exclude_categories=("Cs",)), max_size=8),
        mode=st.sampled_from(("a", "b")),
        limit=st.none() | st.integers(),
        ranks=st.lists(st.integers(), max_size=3).map(tuple),
        inner=st.none() | inner,
    ),
    max_leaves=4,
)

shapes = st.recursive(
    st.just(PlainShape()) | st.builds(Polygon, st.integers()),
    lambda inner: st.builds(Polygon, st.integers(), st.none() | inner, st.none() | toys),
    max_leaves=3,
)
drawings = st.recursive(
    st.builds(Sketch, shapes, st.none() | toys, st.lists(shapes, max_size=2).map(tuple)),
    lambda inner: st.builds(Sketch, shapes, inner=inner),
    max_leaves=2,
)

densities = st.floats(min_value=0, max_value=1, exclude_min=True)
sparsifiers = st.builds(TopK, densities) | st.builds(RandomK, densities, st.booleans())
quantizers = (
    st.sampled_from((FP16(), BF16(), Sign()))
    | st.builds(QSGD, levels=st.integers(1, 2**15 - 1), norm=st.sampled_from(("max", "l2")))
    | st.builds(QSGD, bits=st.integers(2, 16), bucket=st.integers(1, 10**6))
)
codecs = (
    sparsifiers
    | quantizers
    | st.builds(lambda a, b: a >> b, sparsifiers, quantizers)
    | st.builds(lambda a, b, c: a >> (b >> c), sparsifiers, sparsifiers, quantizers)
)
compressions = codecs | st.builds(EF, codecs)


@settings(max_examples=300, deadline=None)
@given(toy=toys)
def test_any_expression_reads_back_from_what_it_writes(toy) -> None:
    again = TOYS.parse(repr(toy))
    assert again == toy
    assert hash(again) == hash(toy)


@settings(max_examples=150, deadline=None)
@given(drawing=drawings)
def test_any_expression_of_several_kinds_reads_back_from_what_it_writes(drawing) -> None:
    again = DRAWINGS.parse(repr(drawing))
    assert again == drawing
    assert hash(again) == hash(drawing)


@settings(max_examples=150, deadline=None)
@given(compression=compressions)
def test_any_compression_reads_back_from_what_it_writes(compression) -> None:
    assert COMPRESSION.parse(repr(compression)) == compression


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("topk(0.01)", TopK(0.01)),
        ("topk(density=0.01)", TopK(0.01)),
        ("  topk( 0.01 )  ", TopK(0.01)),
        ("topk(1)", TopK(1.0)),
        ("sign", Sign()),
        ("sign()", Sign()),
        ("qsgd(bits=4)", QSGD(bits=4)),
        ("qsgd(7, bucket=64, norm='l2')", QSGD(7, bucket=64, norm="l2")),
        ("topk(0.1) >> fp16", TopK(0.1) >> FP16()),
        ("(topk(0.1) >> topk(0.5)) >> sign", TopK(0.1) >> TopK(0.5) >> Sign()),
        ("topk(0.1) >> (topk(0.5) >> sign)", TopK(0.1) >> TopK(0.5) >> Sign()),
        ("ef(topk(0.01) >> qsgd(bits=4))", EF(TopK(0.01) >> QSGD(bits=4))),
        ("randomk(0.1, True)", RandomK(0.1, unbiased=True)),
    ],
)
def test_text_means_what_it_says(text, expected) -> None:
    assert COMPRESSION.parse(text) == expected


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        (TopK(0.01), "topk(0.01)"),
        (Sign(), "sign"),
        (QSGD(bits=4), "qsgd(bits=4)"),
        (QSGD(7), "qsgd(7)"),
        (QSGD(7, norm="l2"), 'qsgd(7, norm="l2")'),
        (RandomK(0.1, unbiased=True), "randomk(0.1, unbiased=True)"),
        (EF(TopK(0.01) >> QSGD(bits=4)), "ef(topk(0.01) >> qsgd(bits=4))"),
        (ManyFields(1.0, ranks=(2,)), "many_fields(1.0, ranks=(2,))"),
        (ManyFields(-1.5, ranks=(0, -3)), "many_fields(-1.5, ranks=(0, -3))"),
        (ManyFields(0.0, name='say "hi"\n'), 'many_fields(0.0, name="say \\"hi\\"\\n")'),
    ],
)
def test_the_first_field_is_written_by_position_and_defaults_are_left_out(expression, text) -> None:
    assert repr(expression) == text


def test_equal_expressions_are_written_alike() -> None:
    assert TopK(1) == TopK(1.0)
    assert repr(TopK(1)) == repr(TopK(1.0)) == "topk(1.0)"
    spec = Spec((10,), torch.float32)
    assert payload_context(TopK(1), spec) == payload_context(
        TopK(1.0), spec
    )  # they understand each other


def test_an_expression_is_returned_as_it_is() -> None:
    codec = TopK(0.5)
    assert COMPRESSION.parse(codec) is codec


def test_names_come_from_files_and_classes() -> None:
    assert notation_name(TopK) == "topk"
    assert notation_name(FP16) == "fp16"
    assert notation_name(QSGD) == "qsgd"
    assert notation_name(ManyFields) == "many_fields"
    assert notation_name(HTTPServer2) == "http_server2"


def test_a_registry_finds_concrete_dataclasses_of_its_module_only() -> None:
    assert TOYS.names() == ["http_server2", "many_fields", "plain"]
    assert list(TOYS) == [HTTPServer2, ManyFields, Plain]
    assert "plain" in TOYS
    assert "toy" not in TOYS
    assert "not_a_dataclass" not in TOYS
    assert TOYS["plain"] is Plain


def test_every_file_of_a_dimension_is_a_name() -> None:
    names = COMPRESSION.names()
    assert names == sorted(names)
    assert {"identity", "sign", "qsgd", "topk", "randomk", "fp16", "bf16", "ef"} <= set(names)
    assert not any(name.startswith("_") for name in names)


def test_a_summary_is_the_first_paragraph_in_one_line() -> None:
    assert Plain.summary() == "A toy without fields."


def refusal(registry: Registry, text: object) -> str:
    with pytest.raises(NotationError) as caught:
        registry.parse(text)
    return str(caught.value)


def test_an_unknown_name_lists_the_valid_ones_and_the_nearest() -> None:
    message = refusal(COMPRESSION, "topq(0.1)")
    assert "'topq'" in message
    assert "Did you mean topk?" in message
    for name in COMPRESSION.names():
        assert name in message


def test_a_name_like_no_other_gets_no_suggestion() -> None:
    message = refusal(COMPRESSION, "zzzzzzzz")
    assert "Did you mean" not in message
    assert "topk" in message


def test_an_unknown_argument_names_the_nearest() -> None:
    message = refusal(COMPRESSION, "randomk(0.1, unbased=True)")
    assert "'unbased'" in message
    assert "Did you mean unbiased?" in message


def test_a_missing_argument_shows_how_to_write_it() -> None:
    message = refusal(COMPRESSION, "topk")
    assert "topk needs density" in message
    assert "topk(density)" in message


def test_too_many_arguments_show_the_signature() -> None:
    message = refusal(COMPRESSION, "topk(0.1, 0.2)")
    assert "at most 1" in message
    assert "topk(density)" in message


def test_an_argument_given_by_position_and_name_is_refused() -> None:
    assert "density twice" in refusal(COMPRESSION, "topk(0.1, density=0.2)")


def test_an_argument_given_twice_by_name_is_refused() -> None:
    assert "twice" in refusal(COMPRESSION, "topk(density=0.1, density=0.2)")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("topk('0.1')", "density must be float"),
        ("topk(True)", "density must be float"),
        ("topk(sign)", "density must be float"),
        ("topk(None)", "density must be float"),
        ("topk((0.1,))", "density must be float"),
        ("qsgd(7.0)", "levels must be int or nothing"),
        ("qsgd(7, norm='l3')", 'norm must be one of "max", "l2"'),
        ("qsgd(7, bucket='64')", "bucket must be int"),
        ("randomk(0.1, unbiased=1)", "unbiased must be bool"),
        ("ef(0.1)", "inner must be Codec or Reducer"),
        ("ef('sign')", "inner must be Codec or Reducer"),
    ],
)
def test_a_wrong_type_says_what_is_wanted(text, reason) -> None:
    message = refusal(COMPRESSION, text)
    assert reason in message
    assert repr(text) in message


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("topk(0.0)", "density"),
        ("topk(-0.1)", "density"),
        ("topk(1.5)", "density"),
        ("topk(1e999)", "density"),
        ("qsgd", "levels or bits"),
        ("qsgd(3, bits=4)", "levels or bits"),
        ("qsgd(bits=1)", "bits must lie in 2 .. 16"),
        ("qsgd(0)", "levels must lie in 1 .. 32767"),
        ("qsgd(7, bucket=0)", "bucket must be at least 1"),
    ],
)
def test_a_value_out_of_range_says_the_range_and_the_text(text, reason) -> None:
    message = refusal(COMPRESSION, text)
    assert reason in message
    assert repr(text) in message


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os')",
        "__import__('os').system('true')",
        "topk.__class__",
        "topk(0.1).__class__",
        "().__class__",
        "lambda: 1",
        "topk(lambda: 0.1)",
        "[topk(x) for x in (1,)]",
        "topk([x for x in (0.1,)][0])",
        "topk((x for x in (0.1,)))",
        "{1: topk(1)}",
        "{topk(1)}",
        "f'{topk}'",
        "topk(f'{1}')",
        "topk(**{'density': 1})",
        "topk(*(0.1,))",
        "topk(0.1 + 0.1)",
        "topk(2 ** -1)",
        "topk(1 / 2)",
        "topk(8 >> 3)",
        "topk(+1)",
        "topk(not 0)",
        "topk(~0)",
        "topk(1 if True else 2)",
        "topk(1 < 2)",
        "topk(x := 0.1)",
        "topk(1j)",
        "topk(b'1')",
        "topk(...)",
        "sign[0]",
        "sign or fp16",
        "sign >> 1",
        "1 >> sign",
        "1 >> 2",
        "'a' >> 'b'",
        "sign | fp16",
        "await sign",
        "(yield)",
        "sign; fp16",
        "sign\nfp16",
        "x = sign",
        "import os",
        "sign()()",
        "(sign)(1).x",
        "eval('1')",
        "print(1)",
        "open('/etc/passwd')",
        "",
        "   ",
        "(",
        ")",
        "topk(",
        "\0",
        "\ud800",
        "# nothing",
        "0.1",
        "'sign'",
        "sign, fp16",
        "[sign]",
        "()",
        "None",
        "True",
    ],
)
def test_anything_else_is_refused(text) -> None:
    assert refusal(COMPRESSION, text)


@pytest.mark.parametrize(
    "text",
    [
        "x" * 10_001,
        "sign" + " " * 10_001,
        "'" + "a" * 20_000 + "'",
        "topk(" + "9" * 400 + ")",
        "topk(" + "9" * 5_000 + ")",
        "topk(-" + "9" * 400 + ")",
        "-" * 9_000 + "1",
        "(" * 5_000 + ")" * 5_000,
        "ef(" * 3_000 + "sign",
        "a" + ".b" * 4_900,
        "fp16>>" * 1_600 + "fp16",
        "sign>>" * 1_600 + "sign",
        "topk(1)" + ">>1" * 3_000,
    ],
    ids=lambda text: f"{text[:12]}...{len(text)}",
)
def test_huge_text_is_refused_and_not_a_crash(text) -> None:
    assert refusal(COMPRESSION, text)


@settings(max_examples=300, deadline=None)
@given(text=st.text(st.sampled_from("topk(0.1)>> sign,ef*[]'\"\\-=\n"), max_size=30))
def test_random_text_is_an_expression_or_a_notation_error(text) -> None:
    try:
        value = COMPRESSION.parse(text)
    except NotationError:
        return
    assert COMPRESSION.parse(repr(value)) == value


@pytest.mark.parametrize("value", [None, 1, 0.1, ["sign"], Plain(), object()])
def test_what_is_neither_text_nor_of_the_kind_is_refused(value) -> None:
    message = refusal(COMPRESSION, value)
    assert "compression" in message
    assert type(value).__name__ in message


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("sign >> topk(0.1)", "sign leaves symbols of a finite alphabet"),
        ("sign >> topk(0.1)", "topk(0.1) encodes real numbers"),
        ("sign >> topk(0.1)", "Write topk(0.1) >> sign"),
        ("qsgd(7) >> sign", "qsgd(7) leaves symbols"),
        ("ef(topk(0.1)) >> fp16", "Write ef(topk(0.1) >> fp16)"),
        ("topk(0.1) >> ef(fp16)", "ef(fp16) is a way of averaging, not a codec"),
        ("gtopk(0.1) >> qsgd(7)", "gtopk(0.1) is a way of averaging and leaves no values"),
    ],
)
def test_a_chain_that_makes_no_sense_is_refused_with_the_reason(text, reason) -> None:
    assert reason in refusal(COMPRESSION, text)


# Arguments with names of their own.


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("sketch(plain)", Sketch(PlainShape())),
        ("sketch(plain, plain)", Sketch(PlainShape(), Plain())),
        ("sketch(toy=plain, shape=plain)", Sketch(PlainShape(), Plain())),
        ("sketch(polygon(4, plain, plain))", Sketch(Polygon(4, PlainShape(), Plain()))),
        (
            "sketch(plain, more=(plain, polygon))",
            Sketch(PlainShape(), None, (PlainShape(), Polygon())),
        ),
        ("sketch(plain, inner=sketch(polygon))", Sketch(PlainShape(), inner=Sketch(Polygon()))),
        (
            "sketch(plain, many_fields(1, inner=plain))",
            Sketch(PlainShape(), ManyFields(1, inner=Plain())),
        ),
    ],
)
def test_a_name_is_looked_up_where_it_stands(text, expected) -> None:
    assert DRAWINGS.parse(text) == expected


def test_an_argument_may_be_written_like_what_holds_it() -> None:
    """As `ring` is a graph of gossip and an architecture."""
    assert repr(Sketch(PlainShape(), Plain())) == "sketch(plain, toy=plain)"
    assert DRAWINGS.parse("sketch(plain, toy=plain)").shape == SHAPES.parse("plain")
    assert SHAPES.parse("plain") != TOYS.parse("plain")


def test_an_unknown_name_lists_those_of_its_place() -> None:
    message = refusal(DRAWINGS, "sketch(polygone(3))")
    assert "unknown shape 'polygone'. Did you mean polygon? Valid names: plain, polygon." in message
    message = refusal(DRAWINGS, "sketch(plain, polygon)")
    assert "unknown toy 'polygon'" in message
    assert "Valid names: http_server2, many_fields, plain." in message
    assert "unknown drawing" in refusal(DRAWINGS, "sketch(plain, inner=plain)")
    assert "unknown shape" in refusal(DRAWINGS, "sketch(sketch(plain))")


def test_what_is_no_expression_gets_the_names_that_are() -> None:
    message = refusal(DRAWINGS, "sketch('plain')")
    assert 'sketch: shape must be Shape (plain, polygon), got "plain"' in message
    message = refusal(DRAWINGS, "sketch(plain, 3)")
    assert "toy must be Toy or nothing (http_server2, many_fields, plain), got 3" in message


def test_an_argument_of_a_kind_that_does_not_change_with_time_has_no_ramp() -> None:
    message = refusal(DRAWINGS, "sketch(polygon(ramp(3, 5, steps=4)))")
    assert "a shape does not change with time" in message


@pytest.mark.parametrize(
    "text",
    [
        " >> ".join(["topk(0.9)"] * 33),
        " >> ".join(["topk(0.9)"] * 700),
        "ef(" * 32 + "sign" + ")" * 32,
        "ef(" * 150 + "sign" + ")" * 150,
        "topk(" + "-" * 40 + "1)",
        "ef(codec=" * 40 + "sign" + ")" * 40,
    ],
)
def test_deep_expressions_are_refused_before_anything_is_built(text) -> None:
    built = []
    with (
        patch.object(parser._Reader, "build", lambda *args: built.append(args)),
        pytest.raises(NotationError, match=r"is nested \d+ deep, at most 32; each >> counts"),
    ):
        COMPRESSION.parse(text)
    assert not built


def test_expressions_that_are_not_too_deep() -> None:
    assert repr(COMPRESSION.parse(" >> ".join(["topk(0.9)"] * 31))).count(">>") == 30
    rules = ", ".join(f'"layer{i}.weight": ef(topk(0.01) >> qsgd(bits=4))' for i in range(160))
    assert repr(COMPRESSION.parse(f"partition({{{rules}}})")).count("layer") == 160


def test_long_expressions_are_refused_before_they_are_parsed() -> None:
    with (
        patch.object(parser.ast, "parse", side_effect=AssertionError("it was parsed")),
        pytest.raises(NotationError, match="10001 characters, at most 10000"),
    ):
        COMPRESSION.parse("x" * 10_001)
