"""Wen et al. 2017: s sign(g) b with b ~ Bernoulli(|g| / s), after clipping at c sigma."""

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from gradwire.architecture.allreduce.allreduce import AllReduce
from gradwire.architecture.allreduce.ring import Ring
from gradwire.compression import COMPRESSION
from gradwire.compression.feedback.ef import EF
from gradwire.compression.quantization.terngrad import TernGrad
from gradwire.core.codec import Codec, Kind, Parts, State, Traits
from gradwire.core.errors import NonFiniteError, WireError
from gradwire.core.key import Key
from gradwire.core.lifted import lift
from gradwire.core.node import Node
from gradwire.core.reducer import Reduced
from gradwire.core.spec import Spec
from gradwire.runtime.network.network import Network
from gradwire.runtime.virtual.engine import VirtualEngine

KEY = Key(0)


def decoded(codec: TernGrad, x: Tensor, key: Key = KEY) -> Tensor:
    payload, _ = codec.encode(x, None, key)
    return codec.decode(payload, Spec.of(x), key)


def test_a_case_by_hand() -> None:
    x = torch.tensor([4.0, -4.0, 1.0, 0.0])
    found = torch.stack([decoded(TernGrad(0.0), x, Key(1).at(step)) for step in range(1000)])
    assert (found[:, 0] == 4).all()
    assert (found[:, 1] == -4).all()
    assert (found[:, 3] == 0).all()
    assert set(found[:, 2].tolist()) == {0.0, 4.0}
    # A quarter of 1000 draws, give or take six standard deviations.
    assert abs(int((found[:, 2] == 4).sum()) - 250) < 6 * math.sqrt(1000 * 3 / 16)


def test_the_bytes_of_a_case_by_hand() -> None:
    payload, _ = TernGrad(0.0).encode(torch.tensor([2.0, -2.0, 0.0, 2.0, 0.0, -2.0]), None, KEY)
    assert payload.parts["scale"].tolist() == [2.0]
    # Trits 2, 0, 1, 2, 1 and 0: base 3, the first one lowest.
    assert payload.parts["values"].tolist() == [2 + 0 * 3 + 1 * 9 + 2 * 27 + 1 * 81, 0]


@pytest.mark.few
@pytest.mark.parametrize("bucket", [16, 100])
def test_the_variance_is_exactly_that_of_the_paper(bucket) -> None:
    x = Key(3).normal(100).double()
    codec, num_steps = TernGrad(0.0, bucket=bucket), 1500
    errors = torch.stack(
        [(decoded(codec, x, Key(5).at(s)) - x).square().sum() for s in range(num_steps)]
    )
    expected = sum(float((b.abs().max() * b.abs() - b.square()).sum()) for b in x.split(bucket))
    standard_error = float(errors.std()) / math.sqrt(num_steps)
    assert abs(float(errors.mean()) - expected) < 6 * standard_error
    assert expected <= codec.guarantee(Spec.of(x)).omega * float(x.square().sum())


@pytest.mark.parametrize("numel", [1, 4, 100])
def test_the_guarantee_is_tight(numel) -> None:
    x = torch.full((numel,), 1 / (1 + math.sqrt(numel)), dtype=torch.float64)
    x[0] = 1.0
    variance = float((x - x.square()).sum() / x.square().sum())
    assert TernGrad(0.0).guarantee(Spec.of(x)).omega == pytest.approx(variance)


def test_clipping_is_at_the_stated_number_of_standard_deviations() -> None:
    x = Key(7).normal(100_000)
    scale = TernGrad().encode(x, None, KEY)[0].parts["scale"]
    assert float(scale) == pytest.approx(2.5, rel=0.02)
    assert float(TernGrad(100.0).encode(x, None, KEY)[0].parts["scale"]) == float(x.abs().max())
    # Elements within are unbiased, elements beyond are sent as what they were clipped to.
    found = decoded(TernGrad(), x)
    assert torch.equal(found[x > 2.6], torch.full_like(found[x > 2.6], float(scale)))


def test_clipping_makes_the_error_of_a_gaussian_smaller() -> None:
    x = Key(7).normal(10_000)
    errors = [float((decoded(TernGrad(clip), x) - x).square().mean()) for clip in (2.5, 0.0)]
    assert errors[0] < 0.6 * errors[1]


def test_a_tensor_of_equal_elements_is_not_clipped_away() -> None:
    for x in (torch.full((100,), -3.0), torch.tensor([0.7])):
        assert torch.equal(decoded(TernGrad(), x), x)


@pytest.mark.parametrize("numel", [0, 1, 9, 1000, 100_001])
def test_the_wire_carries_at_most_1_6_bits_an_element(numel) -> None:
    payload, _ = TernGrad().encode(Key(1).normal(numel), None, KEY)
    assert payload.nbytes <= math.ceil(1.6 * numel / 8) + 24


def averaged(codec: Codec, tensors: list[Tensor], architecture) -> list[Reduced]:
    reducer = lift(codec)

    async def program(node: Node) -> Reduced:
        own = tensors[node.rank]
        state = reducer.init(Spec.of(own), len(tensors))
        group = architecture.group(node, "x")
        return await reducer.mean(own, state, KEY.private(node.rank), group)

    return VirtualEngine(Network.uniform(len(tensors))).run([program] * len(tensors))


@pytest.mark.parametrize("architecture", [AllReduce("gather"), AllReduce("scatter"), Ring()])
@pytest.mark.parametrize("clip", [0.0, 2.5])
def test_shared_every_worker_sends_multiples_of_the_largest_scale(architecture, clip) -> None:
    tensors = [Key(9).private(rank).normal(200) * (rank + 1) for rank in range(3)]
    codec = TernGrad(clip, share=True)
    shared = codec.traits.statistic
    largest = max(float(shared.of(x)) for x in tensors)
    for reduced in averaged(codec, tensors, architecture):
        own = reduced.own()
        assert set(own.abs().unique().tolist()) == {0.0, largest}
        if architecture != AllReduce("scatter"):  # there the mean is ternary again
            steps = reduced.mean / (largest / 3)
            assert torch.allclose(steps, steps.round(), atol=1e-5)


def test_under_feedback_the_scale_is_that_of_what_is_sent() -> None:
    codec, x = TernGrad(0.0, share=True), torch.ones(40)

    async def program(node: Node) -> Reduced:
        state = EF(codec).init(Spec.of(x), 2)
        state["residual"] = torch.full((40,), 3.0)
        return await EF(codec).mean(x, state, KEY.private(node.rank), Ring().group(node, "x"))

    for reduced in VirtualEngine(Network.uniform(2)).run([program] * 2):
        assert reduced.mean.tolist() == [4.0] * 40  # every element is the largest: nothing is lost
        assert reduced.state["residual"].tolist() == [0.0] * 40


def test_nan_is_refused_before_anything_is_shared() -> None:
    with pytest.raises(NonFiniteError, match="terngrad"):
        averaged(TernGrad(share=True), [torch.tensor([1.0, float("nan")])] * 2, Ring())


def test_an_agreed_scale_does_not_travel() -> None:
    codec = TernGrad(0.0, share=True).traits.statistic.agree(torch.tensor([2.0]))
    assert codec == TernGrad(0.0, share=True, scale=2.0)
    payload, _ = codec.encode(torch.ones(50), None, KEY)
    assert list(payload.parts) == ["values"]
    assert codec.traits.statistic is None
    assert COMPRESSION.parse(repr(codec)) == codec


def test_sharing_stays_unbiased() -> None:
    x, num_steps = Key(4).normal(50).double(), 1000
    codec = TernGrad(0.0, scale=5.0)
    mean = sum(decoded(codec, x, Key(6).at(s)) for s in range(num_steps)) / num_steps
    assert ((mean - x).abs() <= 6 * (5.0 * x.abs() / num_steps).sqrt()).all()


def test_an_agreed_scale_below_an_element_clips_it_and_zero_sends_nothing() -> None:
    x = torch.tensor([3.0, -3.0, 0.0])
    assert decoded(TernGrad(0.0, scale=1.0), x).tolist() == [1.0, -1.0, 0.0]
    assert decoded(TernGrad(0.0, scale=0.0), x).tolist() == [0.0, 0.0, 0.0]


@dataclass(frozen=True, repr=False)
class Reversed(Codec):
    """A coder of symbols that only turns them around."""

    traits = Traits(takes=Kind.SYMBOLS)
    leaves = Kind.SYMBOLS

    def split(self, x: Tensor, state: State, key: Key) -> tuple[Parts, State]:
        return {"values": x.flip(0)}, state

    def join(self, parts: Parts, spec: Spec, key: Key) -> Tensor:
        return parts["values"].flip(0)


def test_the_first_stage_of_a_chain_shares_its_scale() -> None:
    tensors = [Key(9).private(rank).normal(200) * (rank + 1) for rank in range(3)]
    plain, coded = TernGrad(share=True), TernGrad(share=True) >> Reversed()
    expected = averaged(plain, tensors, Ring())
    for reduced, other in zip(averaged(coded, tensors, Ring()), expected):
        assert reduced.own().unique().tolist() == other.own().unique().tolist()


def test_large_elements_neither_overflow_nor_turn_into_nan() -> None:
    for x in (torch.full((99,), 3e38), torch.full((99,), 6e4, dtype=torch.float16)):
        assert torch.equal(decoded(TernGrad(), x), x)
    for scale in (1e300, 1e-300):  # known scales that float32 does not have
        assert torch.isfinite(decoded(TernGrad(0.0, scale=scale), torch.ones(9))).all()


def test_a_byte_beyond_five_trits_is_refused() -> None:
    payload, _ = TernGrad().encode(torch.ones(5), None, KEY)
    crafted = payload.replace(values=torch.tensor([243], dtype=torch.uint8))
    with pytest.raises(WireError, match="243"):
        TernGrad().decode(crafted, Spec((5,), torch.float32), KEY)


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), -1.0])
def test_a_scale_that_is_none_is_refused(scale) -> None:
    payload, _ = TernGrad().encode(torch.ones(9), None, KEY)
    crafted = payload.replace(scale=torch.tensor([scale]))
    with pytest.raises(WireError, match="scale"):
        TernGrad().decode(crafted, Spec((9,), torch.float32), KEY)


@pytest.mark.parametrize(
    "make",
    [
        lambda: TernGrad(0.5),
        lambda: TernGrad(-1.0),
        lambda: TernGrad(float("inf")),
        lambda: TernGrad(bucket=0),
        lambda: TernGrad(bucket=8, share=True),
        lambda: TernGrad(bucket=8, scale=1.0),
        lambda: TernGrad(scale=-1.0),
        lambda: TernGrad(scale=float("nan")),
    ],
)
def test_parameters_out_of_range_are_refused(make) -> None:
    with pytest.raises(ValueError, match="terngrad"):
        make()
