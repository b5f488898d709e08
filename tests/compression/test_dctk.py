"""Top-k of a cosine transform: the transform, what is kept of it, and what it weighs."""

import math

import pytest
import torch

from gradwire.compression import COMPRESSION
from gradwire.compression.sparsification.dctk import _chunk_length, _ChunkGrid, _dct_basis
from gradwire.core.codec import LOSSLESS, unpack
from gradwire.core.errors import WireError
from gradwire.core.fusion import decode_mean, encode_feedback
from gradwire.core.key import Key
from gradwire.core.payload import Payload
from gradwire.core.spec import Spec

CPU = torch.device("cpu")
# A layer of each kind: matrix, bias, convolution, a prime dimension.
TENSORS = (
    ("fc", 0, 4096, (64, 64)),
    ("bias", 4096, 4160, (64,)),
    ("conv", 4160, 4448, (8, 4, 3, 3)),
    ("prime", 4448, 4851, (13, 31)),
)
SPEC = Spec((4851,), torch.float32, tensors=TENSORS)
X = Key(2).normal(4851)


def decoded(text: str, x=X, spec=SPEC):
    codec = COMPRESSION.parse(text)
    payload, _ = codec.encode(x, codec.init(spec), Key(1))
    return codec.decode(unpack(codec, payload.buffer.clone(), spec), spec, Key(1)), payload


@pytest.mark.parametrize("n", [1, 2, 3, 8, 31, 64])
def test_the_basis_is_orthonormal_and_that_of_the_definition(n) -> None:
    basis = _dct_basis(n, torch.float64, CPU)
    eye = torch.eye(n, dtype=torch.float64)
    assert torch.allclose(basis @ basis.mT, eye, atol=1e-14)
    for i in range(n):
        for j in range(n):
            scale = math.sqrt((1 if i == 0 else 2) / n)
            expected = scale * math.cos(math.pi * (2 * j + 1) * i / (2 * n))
            assert float(basis[i, j]) == pytest.approx(expected, abs=1e-14)


@pytest.mark.parametrize(
    "cut", [_ChunkGrid(3, 10, 7, 5, 4), _ChunkGrid(2, 1, 9, 1, 3), _ChunkGrid(1, 8, 8, 8, 8)]
)
def test_the_transform_keeps_the_norm_and_has_an_inverse(cut) -> None:
    """Parseval, for every chunk of every matrix together; what is filled up holds nothing."""
    x = Key(3).normal(cut.num * cut.n * cut.m).double().view(cut.num, cut.n, cut.m)
    coefficients = cut.transformed(x, torch.tensor(1.0, dtype=torch.float64))
    assert coefficients.shape == (cut.num_chunks, cut.h * cut.w)
    assert float(coefficients.norm()) == pytest.approx(float(x.norm()), rel=1e-14)
    assert torch.allclose(cut.restored(coefficients.reshape(-1)), x, atol=1e-14)


def test_two_dimensions_are_the_outer_product_of_one() -> None:
    u, v = _dct_basis(8, torch.float32, CPU)[3], _dct_basis(4, torch.float32, CPU)[2]
    x = -5 * torch.outer(u, v)
    codec = COMPRESSION.parse("dctk(8, 1)")
    parts, _ = codec.split(x.reshape(-1), codec.init(Spec.of(x)), Key(1))
    assert torch.allclose(parts["values"], torch.tensor([-5.0]))
    assert torch.allclose(decoded("dctk(8, 1)", x, Spec.of(x))[0], x, atol=1e-6)


def test_chunks_by_hand() -> None:
    """Pairs (a, b) have the coefficients (a + b) / sqrt(2) and (a - b) / sqrt(2)."""
    x = torch.tensor([3.0, 1.0, 1.0, -2.0, 0.0, 0.0, 5.0])
    heard, payload = decoded("dctk(2, 1)", x, Spec.of(x))
    expected = [2.0, 2.0, 1.5, -1.5, 0.0, 0.0, 2.5]  # the 5 stands beside a zero
    assert torch.allclose(heard, torch.tensor(expected), atol=1e-6)
    assert torch.allclose(
        payload.parts["values"].abs(), torch.tensor([4.0, 3.0, 0.0, 5.0]) / 2**0.5
    )


@pytest.mark.parametrize(
    ("n", "chunk", "side"),
    [
        (64, 64, 64),
        (128, 64, 64),
        (96, 64, 48),
        (65, 64, 33),
        (127, 64, 64),
        (10, 64, 10),
        (1, 64, 1),
        (0, 64, 0),
        (7, 1, 1),
    ],
)
def test_a_dimension_is_cut_into_few_equal_chunks(n, chunk, side) -> None:
    assert _chunk_length(n, chunk) == side


@pytest.mark.parametrize("text", ["dctk(8, 3)", "dctk(64, 8)", "dctk(16, 40)"])
def test_exactly_the_largest_coefficients_are_kept(text) -> None:
    codec, heard = COMPRESSION.parse(text), decoded(text)[0]
    for _, start, stop, shape in TENSORS:
        n, m = (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (1, shape[0])
        cut = _ChunkGrid(1, n, m, _chunk_length(n, codec.chunk), _chunk_length(m, codec.chunk))
        if cut.numel <= codec.k:
            assert torch.equal(heard[start:stop], X[start:stop])
            continue
        coefficients = cut.transformed(X[start:stop].view(1, n, m), torch.tensor(1.0))
        least = coefficients.abs().topk(codec.k).values[:, -1:]
        coefficients[coefficients.abs() < least] = 0
        expected = cut.restored(coefficients.reshape(-1)).reshape(-1)
        assert torch.allclose(heard[start:stop], expected, atol=1e-5)


def test_the_guarantee_is_that_of_the_largest_chunk() -> None:
    assert COMPRESSION.parse("dctk(64, 8)").guarantee(SPEC).delta == 8 / 4096
    assert COMPRESSION.parse("dctk(8, 4)").guarantee(SPEC).delta == 4 / 64
    assert COMPRESSION.parse("dctk(8, 64)").guarantee(SPEC) == LOSSLESS
    assert COMPRESSION.parse("dctk(64, 8)").guarantee(Spec((640,), torch.float32)).delta == 1 / 8


def test_smooth_layers_need_few_coefficients() -> None:
    """Where neighbours move together, the transform beats the elements themselves."""
    t = torch.linspace(0, 1, 64)
    x = torch.outer(torch.exp(-t), torch.cos(3 * t)) + 0.01 * Key(1).normal(4096).view(64, 64)
    ours = decoded("dctk(64, 8)", x, Spec.of(x))[0]
    other = decoded("topk(0.1)", x, Spec.of(x))[0]
    assert (ours - x).norm() < 0.1 * x.norm()
    assert (other - x).norm() > 0.7 * x.norm()


@pytest.mark.parametrize(
    ("text", "shape", "bits"),
    [
        ("dctk(64, 8)", (512, 512), 8 * (32 + 10.6) / 4096),  # 12 bits at fixed width
        ("dctk(64, 32)", (512, 512), 32 * (32 + 8.6) / 4096),
        ("dctk(64, 8)", (65536,), 8 * (32 + 4.5) / 64),  # 6 bits at fixed width
        ("dctk(64, 8) >> fp16", (512, 512), 8 * (16 + 10.6) / 4096),
        ("dctk(64, 8) >> sign", (512, 512), 8 * (1 + 10.6) / 4096),
        ("dctk(8, 64)", (512, 512), 32),  # all of it, without positions
    ],
)
def test_bits_per_element(text, shape, bits) -> None:
    x = Key(4).normal(math.prod(shape)).view(shape)
    payload = decoded(text, x, Spec.of(x))[1]
    measured = 8 * (payload.nbytes - 40) / x.numel()  # without the header and sign's scale
    assert bits * 0.95 < measured <= bits


def test_the_mean_of_decoded_messages_is_that_of_their_coefficients() -> None:
    codec = COMPRESSION.parse("dctk(16, 8)")
    state = codec.init(SPEC)
    inputs = [Key(9).private(rank).normal(4851) for rank in range(3)]
    payloads = [codec.encode(x, state, Key(1))[0] for x in inputs]
    mean = decode_mean(codec, payloads, SPEC, [Key(1)] * 3)
    expected = sum(codec.decode(payload, SPEC, Key(1)) for payload in payloads) / 3
    assert torch.allclose(mean, expected, atol=1e-6)
    alone = decode_mean(codec, payloads[:1], SPEC, [Key(1)])
    assert torch.equal(alone, codec.decode(payloads[0], SPEC, Key(1)))


def test_two_workers_hear_the_mean(reduce) -> None:
    inputs = [[Key(9).private(rank).normal(4851)] for rank in range(2)]
    results, engine = reduce(COMPRESSION.parse("ef(dctk(64, 8))"), inputs, SPEC)
    expected = sum(steps[0].own() for steps in results) / 2
    for (own,), steps in zip(inputs, results):
        assert torch.allclose(steps[0].mean, expected, atol=1e-6)
        assert torch.allclose(steps[0].own() + steps[0].state["residual"], own, atol=1e-6)
    assert engine.ledger.total_bytes < 2 * 4 * 4851 / 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_elements_at_the_end_of_the_range_stay_finite(dtype) -> None:
    x = torch.full((64, 64), torch.finfo(dtype).max, dtype=dtype)
    x[::3] *= -1
    codec, spec = COMPRESSION.parse("dctk(16, 5)"), Spec.of(x)
    payload, lost, _ = encode_feedback(codec, x, torch.zeros_like(x), codec.init(spec), Key(1))
    assert torch.isfinite(payload.parts["values"]).all()
    assert torch.isfinite(codec.decode(payload, spec, Key(1))).all()
    assert torch.isfinite(decode_mean(codec, [payload] * 3, spec, [Key(1)] * 3)).all()
    assert torch.isfinite(lost).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"values": torch.zeros(9)}, "values: 9 x"),
        ({"indices": torch.zeros(3, dtype=torch.int64)}, "indices: 3 x torch.int64"),
        ({"indices": torch.zeros(0, dtype=torch.uint8)}, "mode byte"),
        ({"indices": torch.full((600,), 255, dtype=torch.uint8)}, "index part"),
    ],
)
def test_crafted_bytes_are_refused(change, message) -> None:
    codec, (_, honest) = COMPRESSION.parse("dctk(64, 8)"), decoded("dctk(64, 8)")
    payload = Payload.pack({**honest.parts, **change}, honest.context)
    with pytest.raises(WireError, match=message):
        codec.decode(payload, SPEC, Key(1))
    with pytest.raises(WireError, match=message):
        decode_mean(codec, [honest, payload], SPEC, [Key(1)] * 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dctk(0, 1)", "chunk must be at least 1"),
        ("dctk(8, 0)", r"1 \.\. 64 for chunks of 8 x 8, got 0"),
        ("dctk(8, 65)", "got 65"),
        ("dctk(8)", "k"),
    ],
)
def test_what_makes_no_sense_is_refused(text, message) -> None:
    with pytest.raises(ValueError, match=message):
        COMPRESSION.parse(text)
