"""Each tensor by itself in one message: the inner codec layer by layer, in fewer bytes."""

import pytest
import torch
from torch import Tensor

import gradwire
from gradwire.compression import COMPRESSION
from gradwire.compression._layers import join_messages, split_messages
from gradwire.compression.layerwise import Layerwise
from gradwire.compression.quantization.sign import Sign
from gradwire.compression.sparsification.topk import TopK
from gradwire.core.codec import Algebra, Codec, Kind, unpack
from gradwire.core.errors import NonFiniteError, NotationError, WireError
from gradwire.core.fusion import encode_feedback
from gradwire.core.key import Key
from gradwire.core.lifted import lift
from gradwire.core.payload import Payload
from gradwire.core.spec import Spec

TENSORS = (
    ("conv.weight", 0, 540, (20, 3, 9)),
    ("conv.bias", 540, 560, (20,)),
    ("gone", 560, 560, (0,)),
    ("fc.weight", 560, 2560, (40, 50)),
    ("fc.bias", 2560, 2600, (40,)),
)
NUMEL = 2600
SPEC = Spec((NUMEL,), torch.float32, tensors=TENSORS)
KEY = Key(5).at(2).private(1)
INNER = (
    "topk(0.05)",
    "sign",
    "sign(bucket=64)",
    "topk(0.1) >> qsgd(bits=4)",
    "qsgd(bits=2) >> rans",
    "stc(0.05)",
    "randomk(0.1)",
    "randomk(0.1) >> fp16",
    "atomo(2)",
    "dq(1.0)",
    "identity",
    "gaussiank(0.05)",
    "layerwise(topk(0.05))",
)


def layers(x: Tensor) -> list[Tensor]:
    return [x[start:stop].reshape(shape) for _, start, stop, shape in TENSORS]


def gradient(dtype: torch.dtype = torch.float32, seed: int = 1) -> Tensor:
    """Layers of very different magnitude."""
    x = Key(seed).normal(NUMEL).to(dtype)
    x[:560] *= 100
    x[2560:] *= 0.01
    return x


def codec(text: str) -> Codec:
    parsed = COMPRESSION.parse(text)
    assert isinstance(parsed, Codec)
    return parsed


@pytest.mark.parametrize("text", INNER)
def test_it_is_the_inner_codec_layer_by_layer(text) -> None:
    inner, x = codec(text), gradient()
    whole = Layerwise(inner)
    payload, _ = whole.encode(x, whole.init(SPEC), KEY)
    decoded = whole.decode(unpack(whole, payload.buffer.clone(), SPEC), SPEC, KEY)
    each, sizes = [], []
    for (name, *_), piece in zip(TENSORS, layers(x)):
        spec, key = Spec.of(piece), KEY.child(name)
        own, _ = inner.encode(piece, inner.init(spec), key)
        each.append(inner.decode(own, spec, key).reshape(-1))
        sizes.append(own.nbytes)
    assert torch.equal(decoded, torch.cat(each))
    # One header and one checksum, and at most two bytes for a length of each tensor.
    assert payload.nbytes < sum(sizes) - 8 * (len(TENSORS) - 2)


def test_a_bucket_without_a_layout_is_one_tensor() -> None:
    x = gradient()
    for text in INNER:
        inner, whole = codec(text), Layerwise(codec(text))
        a, _ = inner.encode(x, inner.init(Spec.of(x)), KEY)
        b, _ = whole.encode(x, whole.init(Spec.of(x)), KEY)
        assert b.nbytes <= a.nbytes + 4  # the empty part of lengths, and what it is aligned to
        spec = Spec.of(x)
        assert torch.equal(inner.decode(a, spec, KEY), whole.decode(b, spec, KEY))


def test_the_wire_of_scaled_signs_is_a_bit_and_a_scale_per_tensor() -> None:
    x, whole = gradient(), Layerwise(Sign())
    payload, _ = whole.encode(x, whole.init(SPEC), KEY)
    signs = 68 + 3 + 0 + 250 + 5  # ceil(numel / 8) of each tensor
    # Equal lengths are not told. 8 of header, three entries of a table (2, 2, 3), one of padding.
    assert payload.nbytes == 8 + 7 + 1 + 5 * 4 + signs
    means = [p.abs().double().mean() if p.numel() else 0.0 for p in layers(x)]
    assert torch.equal(payload.parts["each.scale"], torch.tensor(means, dtype=torch.float32))


def test_every_layer_keeps_its_own_largest() -> None:
    x, whole = gradient(), Layerwise(TopK(0.05))
    decoded = whole.decode(whole.encode(x, whole.init(SPEC), KEY)[0], SPEC, KEY)
    counts = [int(piece.count_nonzero()) for piece in layers(decoded)]
    assert counts == [27, 1, 0, 100, 2]
    # By itself top-k takes all of them from where magnitudes are large.
    alone = TopK(0.05).decode(TopK(0.05).encode(x, None, KEY)[0], Spec.of(x), KEY)
    assert alone[560:].count_nonzero() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize(
    "text",
    [f"layerwise({text})" for text in INNER]
    + [
        "layerwise(topk(0.1)) >> qsgd(bits=4)",
        "layerwise(topk(0.1)) >> qsgd(bits=4) >> rans",
        "layerwise(randomk(0.5)) >> fp16",
        "topk(0.1) >> layerwise(sign)",
    ],
)
def test_feedback_sends_the_same_and_loses_nothing(text, dtype) -> None:
    whole, x, e = codec(text), gradient(dtype), gradient(dtype, seed=2) / 4
    spec = Spec((NUMEL,), dtype, tensors=TENSORS)
    state = whole.init(spec)
    payload, lost, _ = encode_feedback(whole, x, e, state, KEY)
    plain, _ = whole.encode(x + e, state, KEY)
    assert torch.equal(payload.buffer, plain.buffer)
    spec = spec if whole.traits.layered else Spec.of(x)
    heard = whole.decode(unpack(whole, payload.buffer, spec), spec, KEY)
    error = (heard.double() + lost.double() - (x + e).double()).abs()
    assert (error <= 4 * torch.finfo(dtype).eps * (heard.abs() + (x + e).abs()).double()).all()


def test_linear_codecs_stay_linear(reduce) -> None:
    whole = Layerwise(codec("randomk(0.1) >> fp16"))
    assert whole.algebra is Algebra.LINEAR
    assert whole.parts == ("values",)
    inputs = [[gradient(seed=rank)] for rank in range(3)]
    results, engine = reduce(lift(whole), inputs, SPEC)
    exact = torch.stack([steps[0] for steps in inputs]).mean(0)
    mean = results[0][0].mean
    kept = mean != 0
    assert [int(p.count_nonzero()) for p in layers(mean)] == [54, 2, 0, 200, 4]
    assert torch.allclose(mean[kept], exact[kept], rtol=2**-8, atol=1e-2)
    # An all-reduce of 260 values of two bytes among three.
    assert engine.ledger.total_bytes == 2 * 2 * 260 * 2


@pytest.mark.parametrize("text", ["sign", "topk(0.1) >> fp16"])
def test_feedback_around_it_conserves_what_every_layer_owes(reduce, text) -> None:
    inputs = [
        [gradient(torch.float64, seed=3 * step + rank) for step in range(4)] for rank in range(3)
    ]
    whole, _ = reduce(COMPRESSION.parse(f"ef(layerwise({text}))"), inputs, SPEC)
    names = [name for name, *_ in TENSORS]
    applied = 3 * sum(result.mean for result in whole[0])
    held = sum(steps[-1].state["residual"] for steps in whole)
    exact = sum(x for steps in inputs for x in steps)
    assert torch.allclose(applied + held, exact, rtol=0, atol=1e-9)
    assert len(names) == len(whole[0][-1].state["inner"]["codec"]["inner"])


def test_the_guarantee_is_the_worst_over_the_tensors() -> None:
    assert Layerwise(Sign()).guarantee(SPEC).delta == 1 / 2000
    kept = Layerwise(TopK(0.05)).guarantee(SPEC).delta
    assert kept == min(27 / 540, 1 / 20, 100 / 2000, 2 / 40)
    omegas = [
        codec("qsgd(bits=4)").guarantee(Spec(shape, torch.float32)).omega for *_, shape in TENSORS
    ]
    assert Layerwise(codec("qsgd(bits=4)")).guarantee(SPEC).omega == max(omegas)
    # Without tensors it is that of the inner codec.
    assert Layerwise(Sign()).guarantee(Spec((0,), torch.float32)).delta == 1


def test_states_are_kept_for_each_tensor() -> None:
    whole = Layerwise(codec("dq(0.5)"))
    state = whole.init(SPEC)
    assert [own["tensors"][0][3] for own in state["inner"]] == [shape for *_, shape in TENSORS]
    _, after = whole.encode(gradient(), state, KEY)
    assert after["tensors"] == state["tensors"]
    assert after["inner"][3]["start"] is not None
    assert state["inner"][3]["start"] is None


def test_values_can_be_encoded_together() -> None:
    # One scale for the survivors of all layers instead of one for each.
    together = codec("layerwise(topk(0.05)) >> qsgd(bits=4, bucket=4096)")
    assert Layerwise(TopK(0.05)).leaves is Kind.REAL
    assert Layerwise(Sign()).leaves is Kind.NOTHING
    payload, _ = together.encode(gradient(), together.init(SPEC), KEY)
    assert payload.parts["1.scale"].numel() == 1
    decoded = together.decode(unpack(together, payload.buffer, SPEC), SPEC, KEY)
    assert decoded.count_nonzero() <= 130


def test_what_is_not_finite_is_named() -> None:
    x = gradient()
    x[2560] = float("nan")
    for text in ("topk(0.1)", "sign", "qsgd(bits=4)"):
        whole = Layerwise(codec(text))
        with pytest.raises(NonFiniteError, match=r"fc.bias: NaN or infinity"):
            whole.encode(x, whole.init(SPEC), KEY)
        with pytest.raises(NonFiniteError, match=r"fc.bias: NaN or infinity"):
            encode_feedback(whole, x, x, whole.init(SPEC), KEY)


def test_damaged_lengths_of_several_tensors_never_crash() -> None:
    for text in ("topk(0.05)", "dq(1.0)", "gaussiank(0.05) >> qsgd(bits=4)", "sign"):
        whole = Layerwise(codec(text))
        payload, _ = whole.encode(gradient(), whole.init(SPEC), KEY)
        lengths = payload.parts["lengths"]
        variants = [
            lengths[:-1],
            torch.cat([lengths, lengths[:1]]),
            lengths[:0],
            lengths.repeat(99),
        ]
        variants += [torch.full((7,), 255, dtype=torch.uint8), torch.ones(1, dtype=torch.uint8)]
        for position in range(lengths.numel()):
            for value in (0, 1, 0x7F, 0x80, 0xFF):
                wrong = lengths.clone()
                wrong[position] = value
                variants.append(wrong)
        for wrong in variants:
            crafted = payload.replace(lengths=wrong)
            if torch.equal(wrong, lengths):
                continue
            try:
                assert whole.decode(crafted, SPEC, KEY).shape == (NUMEL,)
            except WireError:
                continue


def test_lengths_that_do_not_add_up_are_refused() -> None:
    specs = [Spec((80,), torch.float32)] * 3
    inner = TopK(0.1)
    sent = [inner.encode(Key(i).normal(80), None, KEY)[0].parts for i in range(3)]
    parts = join_messages(inner, sent, torch.device("cpu"))
    again = split_messages(inner, parts, specs)
    assert all(torch.equal(a[n], b[n]) for a, b in zip(again, sent) for n in ("indices", "values"))
    for lengths in (b"\1", b"\1\x7f\x7f", b"\1\1", b"\1\1\1\1", b"\2", b"\0\0"):
        wrong = torch.tensor(list(lengths), dtype=torch.uint8)
        with pytest.raises(WireError):
            split_messages(inner, {**parts, "lengths": wrong}, specs)
    with pytest.raises(WireError, match="values"):
        split_messages(inner, {**parts, "values": parts["values"][1:]}, specs)


def test_it_trains() -> None:
    common = {"steps": 3, "batch_size": 8, "workers": 2, "model": "mlp((16,))"}
    common |= {"compute": "fixed(0.001)"}
    plain = gradwire.simulate(**common)
    same = gradwire.simulate(**common, compression="layerwise(identity)")
    assert torch.equal(same.params, plain.params)
    layer = gradwire.simulate(
        **common, compression="ef(topk(0.1))", scheduling='sequential("layer")'
    )
    one = gradwire.simulate(**common, compression="ef(layerwise(topk(0.1)))")
    assert torch.equal(layer.params, one.params)
    assert one.summary["bytes_sent"] < layer.summary["bytes_sent"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("layerwise(ef(topk(0.1)))", r"way of averaging.*put layerwise inside: ef\(layerwise"),
        ("layerwise(signvote)", "merge on their way"),
        ("layerwise(terngrad(share=True))", "share is one number"),
        ("layerwise(rans)", "must follow a quantiser"),
        ("layerwise(3)", "inner must be"),
        ("layerwise", "needs inner"),
        ("layerwise(sign) >> fp16", "leaves nothing to encode"),
    ],
)
def test_nonsense_is_refused(text, message) -> None:
    with pytest.raises(NotationError, match=message):
        COMPRESSION.parse(text)


def test_bytes_for_other_tensors_are_refused() -> None:
    whole = Layerwise(TopK(0.05))
    payload, _ = whole.encode(gradient(), whole.init(SPEC), KEY)
    other = (("a", 0, 1300, (1300,)), ("b", 1300, 2600, (1300,)))
    with pytest.raises(WireError):
        whole.decode(
            Payload(payload.buffer, payload.parts, 0),
            Spec((NUMEL,), torch.float32, tensors=other),
            KEY,
        )
