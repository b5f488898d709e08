"""The contract of codecs is small, and everything optional is optional."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from gradwire.compression import COMPRESSION
from gradwire.core.codec import Codec, Parts, State, Traits, merge, unpack
from gradwire.core.fusion import decode_mean, encode_feedback
from gradwire.core.key import Key
from gradwire.core.notation import Expression
from gradwire.core.spec import Spec

KEY = Key(5)
X = KEY.normal(100)


def public(cls: type) -> set[str]:
    return {name for name in dir(cls) if not name.startswith("_")}


def test_an_author_sees_at_most_twelve_members_besides_the_notation() -> None:
    members = public(Codec) - public(Expression)
    assert members == {
        "algebra",
        "decode",
        "encode",
        "fusion",
        "guarantee",
        "init",
        "join",
        "leaves",
        "parts",
        "split",
        "traits",
        "values_spec",
    }
    assert len(members) <= 12


@dataclass(frozen=True, repr=False)
class Halved(Codec):
    """The least that an author writes."""

    def split(self, x: Tensor, state: State, key: Key) -> tuple[Parts, State]:
        return {"values": x / 2}, state

    def join(self, parts: Parts, spec: Spec, key: Key) -> Tensor:
        return parts["values"]


def test_a_codec_of_two_methods_does_all_that_callers_ask() -> None:
    codec, spec = Halved(), Spec.of(X)
    assert codec.fusion is None
    assert codec.traits == Traits()
    payload, state = codec.encode(X, codec.init(spec), KEY)
    assert torch.equal(codec.decode(unpack(codec, payload.buffer, spec), spec, KEY), X / 2)
    _, lost, _ = encode_feedback(codec, X, X, state, KEY)
    assert torch.equal(lost, X)
    assert torch.equal(decode_mean(codec, [payload] * 2, spec, [KEY] * 2), X / 2)
    with pytest.raises(TypeError, match="OPAQUE"):
        merge(codec, payload, payload)


@pytest.mark.parametrize(
    "text",
    [
        "topk(0.1)",
        "sign",
        "qsgd(bits=4)",
        "drive",
        "natural",
        "fp16",
        "dctk(8, 2)",
        "threshold(1.0)",
    ],
)
def test_without_its_fusion_a_codec_gives_the_same(text) -> None:
    fused = COMPRESSION.parse(text)
    assert isinstance(fused, Codec)
    assert fused.fusion is not None
    plain = type(f"Plain{type(fused).__name__}", (type(fused),), {"fusion": None})
    codec = plain(**{name: getattr(fused, name) for name in fused.__dataclass_fields__})
    spec = Spec.of(X)
    payloads = [c.encode(X, c.init(spec), KEY)[0] for c in (fused, codec)]
    for name in fused.parts:
        assert torch.equal(payloads[0].parts[name], payloads[1].parts[name])
    a, b = (c.decode(p, spec, KEY) for c, p in zip((fused, codec), payloads))
    assert torch.allclose(a, b, rtol=1e-6, atol=0)
    results = [encode_feedback(c, X, X / 3, c.init(spec), KEY) for c in (fused, codec)]
    assert torch.allclose(results[0][1], results[1][1], rtol=1e-5, atol=1e-6)
