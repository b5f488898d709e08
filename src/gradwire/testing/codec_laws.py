"""Laws of codecs: what decoding gives, what the bytes are, what guarantees and algebra mean."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.architecture.allreduce.allreduce import AllReduce
from gradwire.compression import COMPRESSION
from gradwire.core.chain import Chain
from gradwire.core.codec import Algebra, Codec, Guarantee, merge, unpack
from gradwire.core.fusion import encode_feedback
from gradwire.core.key import Key
from gradwire.core.lifted import lift
from gradwire.core.node import Node
from gradwire.core.payload import Payload
from gradwire.core.spec import Spec
from gradwire.runtime.network.network import Network
from gradwire.runtime.virtual.engine import VirtualEngine
from gradwire.testing.guarantees import assert_guarantee
from gradwire.testing.inputs import DTYPES, OTHER_CODECS, SHAPES, TENSORS
from gradwire.testing.laws import Laws, NotApplicable, raises

CODEC_LAWS = Laws()
KEY = Key(seed=11, step=3).private(1).child("fc1.weight")


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Unlike `torch.equal` alone, this distinguishes -0.0 from 0.0."""
    return torch.equal(a, b) and torch.equal(a.signbit(), b.signbit())


def encoded(codec: Codec, x: Tensor, key: Key = KEY) -> Payload:
    return codec.encode(x, codec.init(Spec.of(x)), key)[0]


def bytes_sent(buffer: Tensor) -> int:
    """The bytes that the ledger counts when this buffer is sent to another node."""

    async def sender(node: Node) -> None:
        await node.send(1, "payload", buffer)

    async def receiver(node: Node) -> Tensor:
        return await node.recv(0, "payload")

    engine = VirtualEngine(Network.uniform(2))
    _, received = engine.run([sender, receiver])
    assert received is not None
    assert torch.equal(received, buffer)
    return engine.ledger.total_bytes


@CODEC_LAWS(x=TENSORS[:10])
def declared_size_is_what_the_network_counts(codec: Codec, x: Tensor) -> None:
    payload = encoded(codec, x)
    assert payload.buffer.dtype == torch.uint8
    assert payload.buffer.dim() == 1
    assert payload.nbytes == len(payload.buffer) == bytes_sent(payload.buffer)
    # The parts lie inside the buffer: nothing travels beside it.
    start = payload.buffer.data_ptr()
    for part in filter(Tensor.numel, payload.parts.values()):
        assert start <= part.data_ptr()
        assert part.data_ptr() + part.numel() * part.element_size() <= start + payload.nbytes


@CODEC_LAWS(x=TENSORS[:5])
def an_average_costs_what_its_payloads_weigh(codec: Codec, x: Tensor) -> None:
    size, inputs = 3, [x, -x, x / 2]

    async def program(node: Node) -> None:
        own, reducer = inputs[node.rank], lift(codec)
        group = AllReduce("gather").group(node, "x")
        state = reducer.init(Spec.of(own), size)
        residual = torch.zeros_like(own) if codec.traits.needs_feedback else None
        await reducer.mean(own, state, KEY.private(node.rank), group, residual)

    engine = VirtualEngine(Network.uniform(size))
    engine.run([program] * size)
    payloads = [
        codec.encode(y, codec.init(Spec.of(y)), KEY.private(r))[0] for r, y in enumerate(inputs)
    ]
    if codec.algebra is Algebra.OPAQUE:
        expected = [2 * payload.nbytes for payload in payloads]
    elif codec.algebra is Algebra.LINEAR:  # values alone: scattered, then gathered
        values = payloads[0].parts["values"]
        chunks = [part.nbytes for part in values.tensor_split(size)]
        expected = [sum(chunks) - own + 2 * own for own in chunks]
        if values.numel() < size:  # too short to be scattered: gathered at once
            expected = [2 * values.nbytes] * size
    else:
        return  # merged payloads may grow on their way: the codec's own test counts them
    assert [engine.ledger.sent_by(rank) for rank in range(size)] == expected


@CODEC_LAWS(x=TENSORS)
def feedback_loses_nothing(codec: Codec, x: Tensor) -> None:
    spec, residual = Spec.of(x), (x / 4).flip(0) if x.dim() else x / 4
    payload, lost, _ = encode_feedback(codec, x, residual, codec.init(spec), KEY)
    corrected = x + residual
    plain, _ = codec.encode(corrected, codec.init(spec), KEY)
    assert torch.equal(payload.buffer, plain.buffer)
    decoded = codec.decode(payload, spec, KEY)
    error = (decoded.double() + lost.double() - corrected.double()).abs()
    rounding = torch.finfo(x.dtype).eps * (corrected.abs().double() + decoded.abs().double())
    assert (error <= 2 * rounding).all()
    assert (lost.shape, lost.dtype) == (x.shape, x.dtype)


@CODEC_LAWS(x=TENSORS)
def received_bytes_decode_to_what_was_encoded(codec: Codec, x: Tensor) -> None:
    spec, before = Spec.of(x), x.clone()
    payload = encoded(codec, x)
    assert same_bits(x, before), "encode changed its input"
    here = codec.decode(payload, spec, KEY)
    copied = torch.frombuffer(bytearray(bytes(payload.buffer.tolist())), dtype=torch.uint8)
    there = codec.decode(unpack(codec, copied, spec), spec, KEY)
    assert same_bits(here, there)
    assert here.shape == x.shape
    assert here.dtype == x.dtype
    assert here.device == x.device
    assert torch.isfinite(here).all()


@CODEC_LAWS(x=TENSORS[:10])
def encoding_again_with_the_same_key_gives_the_same_bytes(codec: Codec, x: Tensor) -> None:
    first, again = encoded(codec, x), encoded(codec, x.clone())
    assert torch.equal(first.buffer, again.buffer)


@CODEC_LAWS(x=TENSORS)
def memory_layout_does_not_change_the_bytes(codec: Codec, x: Tensor) -> None:
    assert torch.equal(encoded(codec, x).buffer, encoded(codec, x.contiguous()).buffer)


@CODEC_LAWS(dtype=DTYPES)
def zeros_decode_to_zeros(codec: Codec, dtype: torch.dtype) -> None:
    for shape in SHAPES:
        x = torch.zeros(shape, dtype=dtype)
        decoded = codec.decode(encoded(codec, x), Spec.of(x), KEY)
        assert decoded.shape == x.shape
        assert torch.equal(decoded, x)  # false if any is NaN


@CODEC_LAWS()
def a_gradient_that_needs_one_is_encoded_without_its_graph(codec: Codec) -> None:
    x = torch.linspace(-1, 1, 20).requires_grad_()
    payload = encoded(codec, x)
    assert not codec.decode(payload, Spec.of(x), KEY).requires_grad


def cases() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    gaussian = torch.randn(300, generator=generator)
    uniform = torch.rand(150, generator=generator) - 0.5
    laplacian = -uniform.sign() * torch.log1p(-2 * uniform.abs())
    sparse = torch.randn(257, generator=generator)
    sparse = sparse * (torch.rand(257, generator=generator) < 0.05)
    one_hot = torch.zeros(10)
    one_hot[3] = -2.0
    return {
        "gaussian": gaussian,
        "laplacian": laplacian,
        "sparse": sparse,
        "one-hot": one_hot,
        "flat": torch.ones(33),  # the worst case of selecting: every element counts the same
        "three": torch.ones(3),
        "one": torch.tensor([0.7]),
    }


CASES = cases()


@CODEC_LAWS(case=tuple(CASES))
def the_stated_guarantee_holds(codec: Codec, case: str) -> None:
    x = CASES[case]
    guarantee = codec.guarantee(Spec.of(x))
    if guarantee == Guarantee():
        raise NotApplicable("states none")
    assert_guarantee(codec, x, num_keys=250)


@CODEC_LAWS()
def a_guarantee_covers_every_length(codec: Codec) -> None:
    for numel in (0, 1, 2, 1000):
        guarantee = codec.guarantee(Spec((numel,), torch.float32))
        for number in (guarantee.omega, guarantee.delta):
            assert number is None or (number >= 0 and math.isfinite(number))


def pair(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(9)
    x, y = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    return x, y


@CODEC_LAWS(shape=((0,), (1,), (300,), (3, 5)), dtype=DTYPES)
def linear_payloads_add(codec: Codec, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if codec.algebra is not Algebra.LINEAR:
        raise NotApplicable("payloads do not add")
    x, y = pair(shape, dtype)
    spec = Spec.of(x)
    a, b = encoded(codec, x), encoded(codec, y, KEY.private(2))
    merged = merge(codec, a, b)
    assert merged.nbytes == a.nbytes
    total = codec.decode(unpack(codec, merged.buffer, spec), spec, KEY.shared())
    parts = codec.decode(a, spec, KEY), codec.decode(b, spec, KEY.private(2))
    wire = a.parts["values"].dtype
    eps = max(torch.finfo(wire).eps, torch.finfo(dtype).eps)
    expected = parts[0].double() + parts[1].double()
    bound = eps * expected.abs() + torch.finfo(wire).tiny
    assert ((total.double() - expected).abs() <= bound).all()


@CODEC_LAWS()
def payloads_that_merge_do_so_in_any_order(codec: Codec) -> None:
    x, y = pair((100,), torch.float32)
    a, b = encoded(codec, x), encoded(codec, y, KEY.private(2))
    if codec.algebra is Algebra.OPAQUE:
        with raises(TypeError, text="cannot be merged"):
            merge(codec, a, b)
        return
    spec, key = Spec.of(x), KEY.shared()
    ab, ba = (codec.decode(merge(codec, *order), spec, key) for order in ((a, b), (b, a)))
    assert torch.equal(ab, ba)


@CODEC_LAWS(codecs=(OTHER_CODECS,))
def every_pair_of_codecs_chains_or_is_refused_with_both_names(
    codec: Codec, codecs: Sequence[Codec]
) -> None:
    x = torch.linspace(-3, 2, 41)
    spec = Spec.of(x)
    for other in codecs:
        fits = codec.leaves is other.traits.takes
        adapts = _first(other).traits.following is not None
        try:
            chain = codec >> other
        except ValueError as error:
            refusal = str(error)
            assert adapts or not fits
            assert f"{_last(codec)!r} >> {_first(other)!r}" in refusal
            continue
        assert fits or adapts
        payload = encoded(chain, x)
        decoded = chain.decode(unpack(chain, payload.buffer.clone(), spec), spec, KEY)
        assert decoded.shape == x.shape
        assert torch.isfinite(decoded).all()
        assert chain.algebra == min(codec.algebra, other.algebra)
        assert COMPRESSION.parse(repr(chain)) == chain


def _first(codec: Codec) -> Codec:
    return codec.stages[0] if isinstance(codec, Chain) else codec


def _last(codec: Codec) -> Codec:
    return codec.stages[-1] if isinstance(codec, Chain) else codec


@CODEC_LAWS()
def a_layered_codec_feeds_back_what_it_lost_of_the_layers(codec: Codec) -> None:
    if not codec.traits.layered:
        raise NotApplicable("looks at no layers")
    tensors = (("a", 0, 240, (12, 20)), ("b", 240, 247, (7,)), ("c", 247, 397, (15, 10)))
    x, residual = KEY.child("x").normal(397), KEY.child("e").normal(397)
    spec = Spec((397,), torch.float32, tensors=tensors)
    payload, lost, _ = encode_feedback(codec, x, residual, codec.init(spec), KEY)
    decoded = codec.decode(unpack(codec, payload.buffer.clone(), spec), spec, KEY)
    assert torch.allclose(lost, x + residual - decoded, atol=1e-5)
