"""ATOMO: the probabilities of the paper, no bias, and matrices that stay whole."""

import pytest
import torch

import gradwire
from gradwire.architecture.allreduce.allreduce import AllReduce
from gradwire.compression import COMPRESSION
from gradwire.compression.lowrank.atomo import Atomo, _decompose, _probabilities
from gradwire.core.codec import Guarantee, unpack
from gradwire.core.errors import WireError
from gradwire.core.fusion import encode_feedback
from gradwire.core.key import Key
from gradwire.core.lifted import lift
from gradwire.core.payload import Payload
from gradwire.core.spec import Spec

TENSORS = (
    ("conv", 0, 216, (8, 3, 3, 3)),
    ("bias", 216, 224, (8,)),
    ("fc", 224, 824, (20, 30)),
    ("same", 824, 1424, (20, 30)),
)
SPEC = Spec((1424,), torch.float32, tensors=TENSORS)
X = Key(3).normal(1424)


def test_the_probabilities_by_hand() -> None:
    singular = torch.tensor(
        [[10.0, 1, 1, 1, 1], [1, 1, 1, 1, 1], [3, 0, 0, 0, 0], [6, 6, 2, 1, 1], [0, 0, 0, 0, 0]]
    )
    # 2 * 10 / 14 > 1, so the first is certain and 1 triple is left for 4 equal ones; and so on.
    expected = [
        [1, 0.25, 0.25, 0.25, 0.25],
        [0.4] * 5,
        [1, 0, 0, 0, 0],
        [0.75, 0.75, 0.25, 0.125, 0.125],
        [0] * 5,
    ]
    assert torch.allclose(_probabilities(singular.double(), 2), torch.tensor(expected).double())


@pytest.mark.parametrize("rank", [1, 2, 5])
def test_probabilities_spend_the_budget(rank) -> None:
    singular = Key(1).normal(300).double().abs().view(10, 30).sort(descending=True).values
    p = _probabilities(singular**3, rank)
    assert ((p > 0) & (p <= 1)).all()
    assert torch.allclose(p.sum(dim=1), torch.tensor(float(rank)).double())
    assert (p.diff(dim=1) <= 1e-12).all()


def decoded(codec: Atomo, x, spec: Spec, key: Key):
    payload, _ = codec.encode(x, codec.init(spec), key)
    return codec.decode(unpack(codec, payload.buffer, spec), spec, key), payload


def test_each_layer_is_unbiased_with_the_variance_of_the_theorem() -> None:
    codec, num_keys = Atomo(2), 400
    outs = torch.stack([decoded(codec, X, SPEC, Key(7, step=i))[0] for i in range(num_keys)])
    assert (outs[:, 216:224] == X[216:224]).all()  # vectors travel as they are
    for _, start, stop, shape in (TENSORS[0], TENSORS[2], TENSORS[3]):
        exact, own = X[start:stop], outs[:, start:stop]
        s = torch.linalg.svdvals(exact.view(shape[0], -1)).double()
        p = _probabilities(s[None], 2)[0]
        variance = float((s**2 * (1 / p - 1)).sum())
        errors = (own - exact).double().square().sum(dim=1)
        slack = 6 * float(errors.std()) / num_keys**0.5
        assert abs(float(errors.mean()) - variance) <= slack
        bias = float((own.mean(dim=0) - exact).double().square().sum())
        assert bias <= 3 * variance / num_keys
        assert variance <= (len(s) / 2 - 1) * float(exact.double().square().sum())
    assert codec.guarantee(SPEC) == Guarantee(omega=20 / 2 - 1)


def test_a_matrix_of_low_rank_is_exact() -> None:
    thin = Key(5).normal(100)
    x = torch.outer(thin[:20], thin[20:50]) + torch.outer(thin[50:70], thin[70:])
    out, payload = decoded(Atomo(2), x, Spec.of(x), Key(1))
    assert payload.parts["counts"].item() >= 2
    assert torch.allclose(out, x, rtol=0, atol=1e-4)


def test_two_vectors_travel_for_each_triple() -> None:
    sizes = []
    for step in range(50):
        _, payload = decoded(Atomo(1), X, SPEC, Key(2, step=step))
        counts = payload.parts["counts"].tolist()
        triples = counts[0] * (8 + 27) + (counts[1] + counts[2]) * (20 + 30)
        header = 8 + 3 * 3 + 3  # fixed part, table, padding
        assert payload.nbytes <= 4 * (3 + triples + 8) + header
        sizes.append(triples)
    # One triple of each matrix on average.
    assert sum(sizes) / 50 == pytest.approx(35 + 50 + 50, rel=0.4)


def test_a_vector_of_unknown_tensors_is_laid_out_as_a_square() -> None:
    x = X[:1000]
    out, payload = decoded(Atomo(4), x, Spec.of(x), Key(1))
    assert payload.parts["counts"].numel() == 1
    assert payload.parts["factors"].numel() == payload.parts["counts"].item() * (32 + 32)
    assert out.shape == x.shape
    assert Atomo(4).guarantee(Spec.of(x)) == Guarantee(omega=32 / 4 - 1)


def test_buckets_are_never_cut_into_shards(reduce) -> None:
    inputs = [[Key(3).private(rank).normal(1424)] for rank in range(3)]
    reducer = lift(Atomo(2))
    results, engine = reduce(reducer, inputs, SPEC, AllReduce("scatter"))
    expected, total = torch.zeros(1424), 0
    for rank, (x,) in enumerate(inputs):
        out, payload = decoded(Atomo(2), x, SPEC, Key(1).at(0).private(rank))
        assert torch.equal(results[rank][0].own(), out)
        expected += out
        total += payload.nbytes
    assert torch.equal(results[0][0].mean, expected / 3)
    assert engine.ledger.total_bytes == 2 * total


def test_it_trains_on_the_matrices_of_the_model() -> None:
    common = {"steps": 3, "batch_size": 8, "workers": 2, "model": "mlp((16,))"}
    run = gradwire.simulate(**common, compute="fixed(0.001)", compression="atomo(1)")
    assert torch.isfinite(run.params).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"counts": torch.tensor([1, -1, 1], dtype=torch.int32)}, "counts: expected 0 .. 20"),
        ({"counts": torch.tensor([9, 0, 0], dtype=torch.int32)}, "counts: expected 0 .. 8"),
        ({"counts": torch.tensor([2**31 - 1] * 3, dtype=torch.int32)}, "counts: expected"),
        ({"counts": torch.tensor([8, 20, 20], dtype=torch.int32)}, "factors: .* expected 2280 x"),
        ({"plain": torch.zeros(9)}, "plain"),
        ({"factors": torch.full((135,), torch.inf), "counts": torch.ones(3).int()}, "infinity"),
    ],
)
def test_crafted_bytes_are_refused(change, message) -> None:
    codec = Atomo(1)
    honest = codec.encode(X, codec.init(SPEC), Key(1))[0]
    payload = Payload.pack({**honest.parts, **change}, honest.context)
    with pytest.raises(WireError, match=message):
        codec.decode(payload, SPEC, Key(1))


def test_a_rank_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="rank must be at least 1"):
        COMPRESSION.parse("atomo(0)")


def test_the_sign_of_a_pair_is_that_of_its_largest_entry() -> None:
    matrices = Key(3).normal(4 * 20 * 12).view(4, 20, 12)
    u, s, vh = _decompose(matrices)
    largest = u.gather(-2, u.abs().argmax(dim=-2, keepdim=True))
    assert (largest > 0).all()
    assert torch.allclose((u * s[:, None].float()) @ vh, matrices, atol=1e-5)
    # -M has the same u and the opposite v, whatever the library made of either.
    turned = _decompose(-matrices)
    assert torch.allclose(turned[0], u, atol=1e-5)
    assert torch.allclose(turned[2], -vh, atol=1e-5)


@pytest.mark.parametrize("size", [1e30, 1e37, 2e38])
def test_large_elements_leave_no_infinite_residual(size) -> None:
    x = Key(3).normal(64 * 64).clamp(-1.5, 1.5).view(64, 64) * size
    codec, spec = Atomo(3), Spec.of(x)
    payload, lost, _ = encode_feedback(codec, x, torch.zeros_like(x), codec.init(spec), Key(1))
    assert torch.isfinite(codec.decode(payload, spec, Key(1))).all()
    assert torch.isfinite(lost).all()
