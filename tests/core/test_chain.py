from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from gradwire.compression import COMPRESSION
from gradwire.compression.identity import Identity
from gradwire.compression.quantization.bf16 import BF16
from gradwire.compression.quantization.fp16 import FP16
from gradwire.compression.quantization.qsgd import QSGD
from gradwire.compression.quantization.sign import Sign
from gradwire.compression.sparsification.randomk import RandomK
from gradwire.compression.sparsification.topk import TopK
from gradwire.core.chain import Chain
from gradwire.core.codec import (
    Algebra,
    Codec,
    Guarantee,
    Kind,
    Parts,
    State,
    Traits,
    expect,
    unpack,
)
from gradwire.core.fusion import encode_feedback
from gradwire.core.key import Key
from gradwire.core.spec import Spec

KEY = Key(2).private(0)
X = torch.tensor([0.1, -5.0, 0.2, 3.0, -0.3, 4.0, 0.0, -0.4])


@dataclass(frozen=True, repr=False)
class Bytes(Codec):
    """A lossless coder of symbols for tests: one byte each, and nothing left to encode."""

    traits = Traits(takes=Kind.SYMBOLS)
    leaves = Kind.NOTHING
    parts = ("code",)

    def split(self, x: Tensor, state: State, key: Key) -> tuple[Parts, State]:
        return {"code": x.to(torch.uint8)}, state

    def join(self, parts: Parts, spec: Spec, key: Key) -> Tensor:
        return expect(parts["code"], "code", spec.numel, torch.uint8).to(torch.int32)


@dataclass(frozen=True, repr=False)
class Counting(Codec):
    """Sends what it is given and counts its steps, to test that states come back in place."""

    start: int = 0

    def init(self, spec: Spec) -> State:
        return self.start

    def split(self, x: Tensor, state: State, key: Key) -> tuple[Parts, State]:
        return {"values": x}, state + 1

    def join(self, parts: Parts, spec: Spec, key: Key) -> Tensor:
        return parts["values"]


def decoded(codec: Codec, x: Tensor = X) -> Tensor:
    payload, _ = codec.encode(x, codec.init(Spec.of(x)), KEY)
    return codec.decode(unpack(codec, payload.buffer.clone(), Spec.of(x)), Spec.of(x), KEY)


def test_chaining_is_associative_and_flat() -> None:
    a, b, c = TopK(0.5), RandomK(0.5), FP16()
    assert (a >> b) >> c == a >> (b >> c) == Chain((a, b, c))
    assert repr(a >> b >> c) == "topk(0.5) >> randomk(0.5) >> fp16"
    assert hash((a >> b) >> c) == hash(a >> (b >> c))


def test_a_chain_encodes_the_values_that_are_left() -> None:
    # Top-3 keeps -5, 3 and 4; their mean magnitude is 4.
    assert decoded(TopK(3 / 8) >> Sign()).tolist() == [0, -4, 0, 4, 0, 4, 0, 0]


def test_selecting_twice_is_selecting_fewer() -> None:
    assert torch.equal(decoded(TopK(0.5) >> TopK(0.5)), decoded(TopK(0.25)))


@pytest.mark.parametrize("codec", [TopK(0.3), RandomK(0.3), Sign(), QSGD(7), FP16()], ids=repr)
def test_identity_before_a_codec_changes_nothing_but_the_key(codec) -> None:
    chain = Identity() >> codec
    payload, _ = chain.encode(X, chain.init(Spec.of(X)), KEY)
    alone, _ = codec.encode(X, None, KEY.child(1))
    for name, part in alone.parts.items():
        assert torch.equal(payload.parts[name if name == "values" else f"1.{name}"], part)


def test_parts_are_named_by_stage_and_values_come_last() -> None:
    assert (TopK(0.1) >> QSGD(7)).parts == ("0.indices", "1.scale", "values")
    assert (TopK(0.1) >> TopK(0.1) >> FP16()).parts == ("0.indices", "1.indices", "values")
    assert (RandomK(0.1) >> FP16()).parts == ("values",)
    assert (TopK(0.1) >> Sign() >> Bytes()).parts == ("0.indices", "1.scale", "2.code")


def test_a_coder_of_symbols_ends_a_chain() -> None:
    chain = TopK(0.5) >> QSGD(7) >> Bytes()
    assert chain.leaves is Kind.NOTHING
    payload, _ = chain.encode(X, chain.init(Spec.of(X)), KEY)
    assert payload.parts["2.code"].numel() == 4
    without = TopK(0.5) >> QSGD(7)
    assert torch.equal(decoded(chain), decoded(without))
    assert chain.guarantee(Spec.of(X)) == without.guarantee(Spec.of(X))


@pytest.mark.parametrize(
    ("first", "second", "reason"),
    [
        (Bytes(), Sign(), "leaves nothing to encode"),
        (Sign() >> Bytes(), FP16(), "leaves nothing to encode"),
        (Sign(), TopK(0.1), "leaves symbols of a finite alphabet"),
        (QSGD(7), QSGD(7), "encodes real numbers"),
        (TopK(0.1) >> Sign(), FP16(), "sign leaves symbols"),
        (TopK(0.1), Bytes(), "encodes symbols of a finite alphabet"),
        (Sign(), TopK(0.1), r"Write topk\(0.1\) >> sign"),
    ],
)
def test_a_pair_that_makes_no_sense_is_refused_with_the_reason(first, second, reason) -> None:
    with pytest.raises(ValueError, match=reason):
        first >> second


def test_a_suggestion_is_made_only_if_it_would_be_accepted() -> None:
    for text in ("rans >> elias", "threelc >> rans", "signvote >> rans", "golomb >> topk(0.1)"):
        first, second = (COMPRESSION.parse(part) for part in text.split(" >> "))
        with pytest.raises(ValueError, match=">>") as caught:
            first >> second
        assert "Write" not in str(caught.value)


def test_what_all_ranks_share_cannot_come_later() -> None:
    with pytest.raises(ValueError, match="can only come first"):
        COMPRESSION.parse("topk(0.1) >> terngrad(share=True)")


@pytest.mark.parametrize(
    "text",
    [
        "topk(0.1) >> randomk(0.1, unbiased=True)",
        "topk(0.1) >> srq(1)",
        "fp16 >> randomk(0.1, unbiased=True)",
        "randomk(0.1) >> qsgd(1)",
        "aji(0.1) >> terngrad",
        "topk(0.1) >> wangni(0.1)",
        "sampledk(0.1) >> signvote",
    ],
)
def test_a_chain_with_a_stage_that_lets_errors_grow_does_not_pass_for_a_contraction(text) -> None:
    codec = COMPRESSION.parse(text)
    assert not codec.guarantee(Spec((4096,), torch.float32)).contracts


@pytest.mark.parametrize(
    "text", ["topk(0.1) >> fp16", "topk(0.1) >> qsgd(bits=8) >> rans", "sign >> rans"]
)
def test_a_chain_of_contractions_still_contracts(text) -> None:
    assert COMPRESSION.parse(text).guarantee(Spec((4096,), torch.float32)).delta


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
@pytest.mark.parametrize(
    "text",
    [
        "topk(0.1) >> fp16",
        "topk(0.1) >> qsgd(bits=4)",
        "topk(0.1) >> qsgd(bits=4) >> rans",
        "topk(0.2) >> topk(0.5) >> sign",
        "randomk(0.1) >> natural",
        "sampledk(0.1) >> fp16",
        "qsgd(bits=4) >> rans",
        "sign >> rans",
        "fp16 >> topk(0.1)",
    ],
)
def test_feedback_in_one_pass_is_feedback(text, dtype) -> None:
    codec = COMPRESSION.parse(text)
    x, residual = Key(1).normal(1003).to(dtype), Key(2).normal(1003).to(dtype)
    spec = Spec.of(x)
    payload, lost, _ = encode_feedback(codec, x, residual, codec.init(spec), KEY)
    expected, _ = codec.encode(x + residual, codec.init(spec), KEY)
    assert torch.equal(payload.buffer, expected.buffer)
    heard = codec.decode(payload, spec, KEY)
    assert torch.allclose(lost, x + residual - heard, atol=2e-3 if dtype == torch.float16 else 1e-6)


def test_only_codecs_chain() -> None:
    for other in (1, "sign", None, Sign):
        with pytest.raises(TypeError):
            TopK(0.1) >> other


def test_the_algebra_is_that_of_the_weakest_stage() -> None:
    assert (RandomK(0.5) >> FP16()).algebra is Algebra.LINEAR
    assert (RandomK(0.5) >> Sign()).algebra is Algebra.OPAQUE
    assert (TopK(0.5) >> FP16()).algebra is Algebra.OPAQUE
    assert Algebra.OPAQUE < Algebra.MERGE < Algebra.LINEAR


def test_only_chains_of_selections_select() -> None:
    assert (TopK(0.5) >> RandomK(0.5)).traits.selects
    assert not (TopK(0.5) >> FP16()).traits.selects
    assert not (RandomK(0.5, unbiased=True) >> TopK(0.5)).traits.selects


SPEC = Spec((1000,), torch.float32)
HALF_ULP = torch.finfo(torch.float16).eps / 2


@pytest.mark.parametrize(
    ("chain", "expected"),
    [
        # Selections are orthogonal: what is kept multiplies.
        (TopK(0.1) >> TopK(0.5), Guarantee(delta=0.1 * 0.5)),
        (TopK(0.1) >> FP16(), Guarantee(delta=0.1 * (1 - HALF_ULP**2))),
        (TopK(0.1) >> Sign(), Guarantee(delta=0.1 / 100)),
        # An unbiased quantiser of variance below one is a contraction of the rest.
        (TopK(0.1) >> QSGD(100), Guarantee(delta=0.1 * (1 - 100 / (4 * 100**2)))),
        (TopK(0.1) >> QSGD(1), Guarantee()),  # a variance above one promises nothing
        (
            RandomK(0.1, unbiased=True) >> QSGD(100),
            Guarantee(omega=(1 + 9) * (1 + 100 / (4 * 100**2)) - 1),
        ),
        (Identity() >> QSGD(100), Guarantee(0.0128, 1 - 0.0128)),
        (FP16() >> TopK(0.1), Guarantee()),  # errors that are not orthogonal
        (FP16() >> BF16(), Guarantee()),
    ],
    ids=lambda value: repr(value) if isinstance(value, Codec) else "",
)
def test_guarantees_combine(chain, expected) -> None:
    found = chain.guarantee(SPEC)
    assert found.omega == pytest.approx(expected.omega)
    assert found.delta == pytest.approx(expected.delta)


def test_the_guarantee_counts_the_values_that_are_really_left() -> None:
    # Of three, 0.5 keeps two, and of those one: a third, not 2/3 of 2/3.
    found = (TopK(0.5) >> TopK(0.5)).guarantee(Spec((3,), torch.float32))
    assert found.delta == pytest.approx(1 / 3)


def test_each_stage_keeps_its_own_state() -> None:
    chain = Counting(10) >> Counting(20) >> FP16()
    state = chain.init(Spec.of(X))
    assert state == (10, 20, None)
    for step in range(1, 4):
        _, state = chain.encode(X, state, KEY)
        assert state == (10 + step, 20 + step, None)


def test_stages_of_one_kind_draw_different_bits() -> None:
    chain = Identity() >> RandomK(0.5) >> RandomK(0.5)
    x = torch.arange(1.0, 65.0)
    payload, _ = chain.encode(x, chain.init(Spec.of(x)), KEY)
    first = RandomK(0.5).encode(x, None, KEY.child(1))[0].parts["values"]
    again = RandomK(0.5).encode(first, None, KEY.child(1))[0].parts["values"]
    assert not torch.equal(payload.parts["values"], again)
