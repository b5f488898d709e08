"""The laws of codecs, for every registered one and some chains."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gradwire.architecture.allreduce.allreduce import AllReduce
from gradwire.compression import COMPRESSION
from gradwire.core.chain import Chain
from gradwire.core.codec import Algebra, Codec, Guarantee, merge, unpack
from gradwire.core.fusion import encode_feedback
from gradwire.core.key import Key
from gradwire.core.lifted import lift
from gradwire.core.node import Node
from gradwire.core.spec import Spec
from gradwire.runtime.network.network import Network
from gradwire.runtime.virtual.engine import VirtualEngine
from laws.guarantees import assert_guarantee

KEY = Key(seed=11, step=3).private(1).child("fc1.weight")
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
SHAPES = ((0,), (1,), (7,), (8,), (65,), (300,), (3, 5), (0, 4), (2, 3, 7), ())
# Powers of two by which a standard normal is multiplied. At the upper end a codec that scales (by
# 100, at a density of 0.01) leaves the range of float16, and must saturate.
EXPONENTS = {torch.float16: (-6, 12)}


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.sampled_from(SHAPES))
    exponent = draw(st.integers(*EXPONENTS.get(dtype, (-40, 40))))
    zeros = draw(st.sampled_from((0.0, 0.5, 0.95)))
    layout = draw(st.sampled_from(("contiguous", "transposed", "strided")))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    wide = (*shape[:-1], 2 * shape[-1]) if layout == "strided" and shape else shape
    x = torch.randn(wide, generator=generator, dtype=torch.float64) * 2.0**exponent
    x = x * (torch.rand(wide, generator=generator) >= zeros)
    x = x.to(dtype)
    if layout == "strided" and shape:
        x = x[..., ::2]
    if layout == "transposed" and x.dim() >= 2:
        x = x.transpose(0, -1)
    return x


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Unlike `torch.equal` alone, this tells -0.0 from 0.0."""
    return torch.equal(a, b) and torch.equal(a.signbit(), b.signbit())


def encoded(codec: Codec, x: Tensor, key: Key = KEY):
    return codec.encode(x, codec.init(Spec.of(x)), key)[0]


def bytes_sent(buffer: Tensor) -> int:
    """What the ledger says when this buffer goes from one node to another."""

    async def sender(node: Node) -> None:
        await node.send(1, "payload", buffer)

    async def receiver(node: Node) -> Tensor:
        return await node.recv(0, "payload")

    engine = VirtualEngine(Network.uniform(2))
    _, received = engine.run([sender, receiver])
    assert torch.equal(received, buffer)
    return engine.ledger.total_bytes


@settings(max_examples=20, deadline=None)
@given(x=tensors())
def test_declared_size_is_what_the_network_counts(codec, x) -> None:
    payload = encoded(codec, x)
    assert payload.buffer.dtype == torch.uint8
    assert payload.buffer.dim() == 1
    assert payload.nbytes == len(payload.buffer) == bytes_sent(payload.buffer)
    # The parts lie inside the buffer: nothing travels beside it.
    start = payload.buffer.data_ptr()
    for part in filter(Tensor.numel, payload.parts.values()):
        assert start <= part.data_ptr()
        assert part.data_ptr() + part.numel() * part.element_size() <= start + payload.nbytes


@settings(max_examples=5, deadline=None)
@given(x=tensors())
def test_an_average_costs_what_its_payloads_weigh(codec, x) -> None:
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


@settings(max_examples=10, deadline=None)
@given(x=tensors())
def test_feedback_loses_nothing(codec, x) -> None:
    spec, residual = Spec.of(x), (x / 4).flip(0) if x.dim() else x / 4
    payload, lost, _ = encode_feedback(codec, x, residual, codec.init(spec), KEY)
    corrected = x + residual
    plain, _ = codec.encode(corrected, codec.init(spec), KEY)
    assert torch.equal(payload.buffer, plain.buffer)
    heard = codec.decode(payload, spec, KEY)
    error = (heard.double() + lost.double() - corrected.double()).abs()
    rounding = torch.finfo(x.dtype).eps * (corrected.abs().double() + heard.abs().double())
    assert (error <= 2 * rounding).all()
    assert (lost.shape, lost.dtype) == (x.shape, x.dtype)


@settings(max_examples=30, deadline=None)
@given(x=tensors())
def test_received_bytes_decode_to_what_was_encoded(codec, x) -> None:
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


@settings(max_examples=10, deadline=None)
@given(x=tensors())
def test_encoding_again_with_the_same_key_gives_the_same_bytes(codec, x) -> None:
    first, again = encoded(codec, x), encoded(codec, x.clone())
    assert torch.equal(first.buffer, again.buffer)


@settings(max_examples=15, deadline=None)
@given(x=tensors())
def test_memory_layout_does_not_change_the_bytes(codec, x) -> None:
    assert torch.equal(encoded(codec, x).buffer, encoded(codec, x.contiguous()).buffer)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_zeros_decode_to_zeros(codec, dtype) -> None:
    for shape in SHAPES:
        x = torch.zeros(shape, dtype=dtype)
        decoded = codec.decode(encoded(codec, x), Spec.of(x), KEY)
        assert decoded.shape == x.shape
        assert torch.equal(decoded, x)  # false if any is NaN


def test_a_gradient_that_needs_one_is_encoded_without_its_graph(codec) -> None:
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


@pytest.mark.parametrize("case", CASES)
def test_the_stated_guarantee_holds(codec, case) -> None:
    x = CASES[case]
    guarantee = codec.guarantee(Spec.of(x))
    if guarantee == Guarantee():
        pytest.skip("states none")
    assert_guarantee(codec, x, num_keys=250)


def test_a_guarantee_covers_every_length(codec) -> None:
    for numel in (0, 1, 2, 1000):
        guarantee = codec.guarantee(Spec((numel,), torch.float32))
        for number in (guarantee.omega, guarantee.delta):
            assert number is None or (number >= 0 and math.isfinite(number))


def pair(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(9)
    return tuple(torch.randn(shape, generator=generator).to(dtype) for _ in range(2))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(0,), (1,), (300,), (3, 5)], ids=str)
def test_linear_payloads_add(linear_codec, shape, dtype) -> None:
    codec = linear_codec
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


def test_payloads_that_merge_do_so_in_any_order(codec) -> None:
    x, y = pair((100,), torch.float32)
    a, b = encoded(codec, x), encoded(codec, y, KEY.private(2))
    if codec.algebra is Algebra.OPAQUE:
        with pytest.raises(TypeError, match="cannot be merged"):
            merge(codec, a, b)
        return
    spec, key = Spec.of(x), KEY.shared()
    ab, ba = (codec.decode(merge(codec, *order), spec, key) for order in ((a, b), (b, a)))
    assert torch.equal(ab, ba)


def test_what_is_written_parses_to_the_same(compression) -> None:
    again = COMPRESSION.parse(repr(compression))
    assert again == compression
    assert hash(again) == hash(compression)
    assert repr(again) == repr(compression)


def test_every_pair_of_codecs_chains_or_is_refused_with_both_names(codec, codecs) -> None:
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


def test_a_layered_codec_feeds_back_what_it_lost_of_the_layers(codec) -> None:
    if not codec.traits.layered:
        pytest.skip("looks at no layers")
    tensors = (("a", 0, 240, (12, 20)), ("b", 240, 247, (7,)), ("c", 247, 397, (15, 10)))
    x, residual = KEY.child("x").normal(397), KEY.child("e").normal(397)
    spec = Spec((397,), torch.float32, tensors=tensors)
    payload, lost, _ = encode_feedback(codec, x, residual, codec.init(spec), KEY)
    heard = codec.decode(unpack(codec, payload.buffer.clone(), spec), spec, KEY)
    assert torch.allclose(lost, x + residual - heard, atol=1e-5)
