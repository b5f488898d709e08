"""What codecs report of their work: each operation once, with its elements and bytes."""

from dataclasses import dataclass

import pytest
import torch

from gradwire.compression import COMPRESSION
from gradwire.compression.quantization.sign import Sign
from gradwire.core.codec import Codec, unpack
from gradwire.core.fusion import decode_mean, encode_feedback
from gradwire.core.key import Key
from gradwire.core.metering import (
    DECODE,
    DECODE_MEAN,
    ENCODE,
    ENCODE_FEEDBACK,
    PACK,
    UNPACK,
    Work,
    metered,
)
from gradwire.core.spec import Spec

KEY = Key(3)
X = KEY.normal(1000)


def encoded(text: str):
    codec = COMPRESSION.parse(text)
    assert isinstance(codec, Codec)
    return codec, codec.encode(X, codec.init(Spec.of(X)), KEY)[0]


@pytest.mark.parametrize("text", ["sign", "topk(0.1)", "qsgd(3)", "dq(0.5)", "fp16", "identity"])
def test_encoding_and_decoding_report_once(text) -> None:
    codec, payload = encoded(text)
    with metered() as work:
        codec.encode(X, codec.init(Spec.of(X)), KEY)
        codec.decode(payload, Spec.of(X), KEY)
    assert work == [
        Work(codec, ENCODE, 1000, payload.nbytes),
        Work(codec, DECODE, 1000, payload.nbytes),
    ]


@pytest.mark.parametrize("text", ["sign", "topk(0.1)", "natural", "dctk(8, 2)"])
def test_feedback_is_one_operation_fused_or_not(text) -> None:
    codec, _ = encoded(text)
    with metered() as work:
        encode_feedback(codec, X, X / 2, codec.init(Spec.of(X)), KEY)
    (one,) = work
    assert (one.codec, one.operation, one.elements) == (codec, ENCODE_FEEDBACK, 1000)


def test_a_chain_reports_its_stages_with_what_each_gets() -> None:
    codec, payload = encoded("topk(0.1) >> qsgd(bits=4)")
    with metered() as work:
        codec.encode(X, codec.init(Spec.of(X)), KEY)
        codec.decode(payload, Spec.of(X), KEY)
    reports = [(repr(one.codec), one.operation, one.elements) for one in work]
    assert reports == [
        ("topk(0.1)", ENCODE, 1000),
        ("qsgd(bits=4)", ENCODE, 100),
        ("qsgd(bits=4)", DECODE, 100),
        ("topk(0.1)", DECODE, 1000),
    ]


def test_a_codec_of_layers_reports_every_layer() -> None:
    codec = COMPRESSION.parse("layerwise(sign)")
    spec = Spec((1000,), torch.float32, tensors=(("a", 0, 300, (300,)), ("b", 300, 1000, (700,))))
    with metered() as work:
        codec.encode(X, codec.init(spec), KEY)
    assert [(repr(one.codec), one.elements) for one in work] == [("sign", 300), ("sign", 700)]


def test_a_fused_mean_is_one_operation_and_another_one_its_parts() -> None:
    codec, payload = encoded("sign")
    with metered() as work:
        decode_mean(codec, [payload] * 3, Spec.of(X), [KEY] * 3)
    assert [(w.operation, w.elements, w.nbytes) for w in work] == [
        (DECODE_MEAN, 3000, 3 * payload.nbytes)
    ]
    codec, payload = encoded("natural")
    with metered() as work:
        decode_mean(codec, [payload] * 3, Spec.of(X), [KEY] * 3)
    assert [w.operation for w in work] == [DECODE] * 3


def test_checksums_are_reported() -> None:
    codec, payload = encoded("sign")
    with metered() as work:
        buffer = payload.buffer
        unpack(codec, buffer, Spec.of(X))
    assert work == [
        Work(None, PACK, 0, payload.nbytes),
        Work(None, UNPACK, 0, payload.nbytes),
    ]


def test_a_codec_of_anybody_reports_what_it_overrides() -> None:
    @dataclass(frozen=True, repr=False)
    class Loud(Sign):
        def encode(self, x, state, key):
            return super().encode(2 * x, state, key)

    with metered() as work:
        Loud().encode(X, None, KEY)
    assert [(type(one.codec), one.operation) for one in work] == [(Loud, ENCODE)]


def test_arguments_may_have_names() -> None:
    codec, payload = encoded("sign")
    with metered() as work:
        codec.decode(key=KEY, spec=Spec.of(X), payload=payload)
    assert work == [Work(codec, DECODE, 1000, payload.nbytes)]


def test_nothing_is_reported_outside_or_after_an_error() -> None:
    codec, _ = encoded("sign")
    with metered() as work, pytest.raises(ValueError, match="NaN"):
        codec.encode(torch.full((3,), torch.nan), None, KEY)
    assert work == []
    with metered() as work:
        codec.encode(X, None, KEY)
    codec.encode(X, None, KEY)
    assert len(work) == 1
    assert work[0].seconds == 0.0


def test_a_clock_gives_seconds() -> None:
    ticks = iter(range(100))
    codec, _ = encoded("sign")
    with metered(lambda: 0.5 * next(ticks)) as work:
        codec.encode(X, None, KEY)
    assert work[0].seconds == 0.5
