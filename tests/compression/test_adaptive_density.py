"""Top-k for a number of bytes: never more, hardly less, and spent where it counts."""

import math

import pytest
import torch
from torch import Tensor

import gradwire
from gradwire.compression import COMPRESSION
from gradwire.compression.sparsification._layer_positions import layers_in, write_positions
from gradwire.compression.sparsification._water_filling import (
    Histogram,
    edges,
    group_starts,
    least_magnitudes,
    num_worth_keeping,
)
from gradwire.compression.sparsification.adaptive_density import AdaptiveDensity
from gradwire.compression.sparsification.topk import TopK
from gradwire.core.codec import Codec, Guarantee, unpack
from gradwire.core.errors import NonFiniteError, NotationError, WireError
from gradwire.core.fusion import encode_feedback
from gradwire.core.key import Key
from gradwire.core.lifted import lift
from gradwire.core.payload import Payload
from gradwire.core.spec import Spec
from gradwire.experiment.studies.gradients import saved_facts, saved_gradients

KEY = Key(3).at(1).private(0)


def placed(shapes: dict[str, tuple[int, ...]]) -> tuple:
    tensors, start = [], 0
    for name, shape in shapes.items():
        tensors.append((name, start, start + math.prod(shape), tuple(shape)))
        start = tensors[-1][2]
    return tuple(tensors)


TENSORS = placed({"a.weight": (40, 50), "a.bias": (40,), "b.weight": (30, 100), "b.bias": (30,)})
NUMEL = TENSORS[-1][2]
SPEC = Spec((NUMEL,), torch.float32, tensors=TENSORS)


def gradient(seed: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    """Two layers, the second of a tenth of the magnitude and heavier tails."""
    x = Key(seed).normal(NUMEL).double()
    x[2000:] = 0.1 * x[2000:] * x[2000:].abs()
    return x.to(dtype)


def sent(codec: Codec, x: Tensor, spec: Spec = SPEC) -> tuple[Payload, Tensor]:
    spec = Spec(spec.shape, x.dtype, tensors=spec.tensors)
    payload, _ = codec.encode(x, codec.init(spec), KEY)
    return payload, codec.decode(unpack(codec, payload.buffer.clone(), spec), spec, KEY)


def error(x: Tensor, decoded: Tensor) -> float:
    return float((x - decoded).double().square().sum() / x.double().square().sum())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("target", [100, 500, 2000, 6000])
def test_a_payload_takes_the_budget_and_no_more(target, dtype) -> None:
    for seed in range(4):
        payload, decoded = sent(AdaptiveDensity(target), gradient(seed, dtype))
        assert payload.nbytes <= target
        assert payload.nbytes >= 0.95 * target - 12  # an element more takes up to 12 bytes
        kept = decoded != 0
        assert torch.equal(decoded[kept], gradient(seed, dtype)[kept])


@pytest.mark.parametrize("name", list(saved_gradients()))
def test_gradients_from_training_fill_the_budget_in_every_step(name) -> None:
    x, told = saved_gradients()[name], saved_facts()[name]["layers"]
    tensors = placed(dict(told.items() if isinstance(told, dict) else told))
    spec = Spec((x.numel(),), x.dtype, tensors=tensors)
    for share in (0.005, 0.05):
        target = int(share * 4 * x.numel())
        codec = AdaptiveDensity(target)
        state = codec.init(spec)
        for step in range(3):
            y = x * (1 + 0.3 * Key(step).normal(x.numel()))
            payload, state = codec.encode(y, state, KEY.at(step))
            assert 0.95 * target - 8 <= payload.nbytes <= target
        # No worse than the best global top-k of as many bytes, which nobody knows beforehand.
        density = payload.parts["values"].numel() / x.numel()
        best = min(
            error(y, TopK(d).decode(own, Spec.of(y), KEY))
            for d in (density * f for f in (0.99, 1.0, 1.01))
            if (own := TopK(d).encode(y, None, KEY)[0]).nbytes <= target or d < density
        )
        assert error(y, codec.decode(payload, spec, KEY)) <= 1.02 * best


def test_long_layers_are_sampled_and_still_fill_the_budget() -> None:
    tensors = placed({"a": (500, 600), "b": (200, 200), "c": (100,)})
    spec = Spec((tensors[-1][2],), torch.float32, tensors=tensors)
    x = Key(8).normal(spec.numel)
    x[300_000:] *= 3
    x[17] = 1000.0  # not in a sample, most likely
    for target in (200, 3000, 50_000, 2_000_000):
        payload, decoded = sent(AdaptiveDensity(target), x, spec)
        assert payload.nbytes <= target
        assert decoded[17] == 1000
        if target < 2_000_000:
            assert payload.nbytes >= 0.95 * target - 8
        else:
            assert torch.equal(decoded, x)


def bits_of(kept: int, size: int, value_bits: int) -> float:
    p = kept / size
    return value_bits + math.log2((1 - p) / p)


def test_all_layers_have_the_same_slope() -> None:
    """Water-filling: what the last element saves per bit, x^2 / bits, is one lambda for all."""
    tensors = placed({"a": (20_000,), "b": (20_000,), "c": (20_000,)})
    spec = Spec((60_000,), torch.float32, tensors=tensors)
    x = Key(4).normal(60_000)
    x *= torch.tensor([1.0, 0.5, 0.2]).repeat_interleave(20_000)
    codec = AdaptiveDensity(6000, value_bits=4)  # positions cost more than values
    _, decoded = sent(codec, x, spec)
    slopes, levels = [], []
    for _, start, stop, _ in tensors:
        own = decoded[start:stop]
        kept = int(own.count_nonzero())
        if kept < 20:
            continue
        least = float(own[own != 0].abs().min())
        slopes.append(least**2 / bits_of(kept, stop - start, 4))
        levels.append(least)
    assert len(slopes) >= 2
    assert max(slopes) / min(slopes) < 1.12  # a bin of the histogram is 9% of a square
    # A global threshold would be one level; here the denser layer has a lower one.
    assert levels == sorted(levels)
    assert levels[-1] > 1.15 * levels[0]


def test_it_finds_what_brute_force_finds() -> None:
    x, target = gradient(), 400
    layers = layers_in(TENSORS)
    assert layers == ((0, 2000), (2000, NUMEL))  # biases belong to what follows, or to the last
    order = [x[a:b].abs().argsort(descending=True) + a for a, b in layers]

    def size(kept: tuple[int, int]) -> int:
        positions = torch.cat([own[:k].sort().values for own, k in zip(order, kept)])
        firsts = group_starts(kept, [b - a for a, b in layers], [1, 1])
        part, _ = write_positions(positions, kept, layers, firsts)
        return Payload.pack({"indices": part, "values": x[positions]}).nbytes

    best, most = math.inf, 100
    squares = x.double().square()
    for first in range(most + 1):
        second = most
        while second and size((first, second)) > target:
            second -= 1
        if size((first, second)) <= target:
            kept = torch.cat([order[0][:first], order[1][:second]])
            best = min(best, float((squares.sum() - squares[kept].sum()) / squares.sum()))
    payload, decoded = sent(AdaptiveDensity(target), x)
    assert payload.nbytes <= target
    assert best <= error(x, decoded) + 1e-6
    assert error(x, decoded) <= 1.005 * best


def test_of_two_layers_by_hand() -> None:
    # Elements 8, 4, 2, 1 in a layer of eight, 16 of them 1/2 in the other. Values of 10 bits.
    values = torch.tensor([8.0, 4.0, 2.0, 1.0] + [0.5] * 16)
    histogram = Histogram.of(values, [4, 16], [8, 16])
    assert histogram.largest == 8
    assert histogram.counts[0].nonzero().reshape(-1).tolist() == [0, 16, 32, 48]  # 16 an octave
    assert histogram.counts[1].nonzero().reshape(-1).tolist() == [64]
    assert num_worth_keeping(histogram, 10, 0, [1, 1]).tolist() == [0, 0]
    assert num_worth_keeping(histogram, 10, 10_000, [1, 1]).tolist() == [4, 16]
    # One of eight: 10 bits and 8 h(1/8) = 4.35 bits, three per cent more: 14.5.
    assert num_worth_keeping(histogram, 10, 15, [1, 1]).tolist() == [1, 0]
    # Two: 20 + 1.03 * 6.49 = 26.7 bits; three are 37.9, of which a share does not count.
    assert num_worth_keeping(histogram, 10, 27, [1, 1]).tolist() == [2, 0]
    # All of the second layer need no positions: 160 bits, and 4 are saved by them.
    assert num_worth_keeping(histogram, 10, 48 + 161, [1, 1]).tolist() == [4, 16]
    assert least_magnitudes(histogram, [2, 0]) == [
        float(edges()[17]) * 8,
        8.0,
    ]
    assert 2 < float(edges()[17]) * 8 < 4


def test_layers_of_one_density_are_coded_together() -> None:
    sizes = [10_000] * 4
    assert group_starts([100, 100, 105, 95], sizes, [1] * 4) == [0]
    assert group_starts([100, 5000, 5000, 95], sizes, [1] * 4) == [0, 1, 3]
    assert group_starts([0, 0, 0, 5], sizes, [1] * 4) == [0]
    assert group_starts([3], [10], [1]) == [0]
    one, _ = sent(AdaptiveDensity(2000), Key(1).normal(NUMEL))
    kept = one.parts["values"].numel()
    alone, _ = TopK(kept / NUMEL).encode(Key(1).normal(NUMEL), None, KEY)
    assert one.nbytes <= alone.nbytes + 8  # a mask and a count


def test_what_has_little_to_say_sends_all_of_it() -> None:
    x = torch.zeros(NUMEL)
    x[[3, 700, 2500]] = torch.tensor([1e-30, -2.0, 5.0])
    payload, decoded = sent(AdaptiveDensity(4000), x)
    assert torch.equal(decoded, x)
    assert payload.nbytes < 50
    payload, decoded = sent(AdaptiveDensity(4 * NUMEL + 100), gradient())
    assert torch.equal(decoded, gradient())
    empty, _ = sent(AdaptiveDensity(4000), torch.zeros(NUMEL))
    assert empty.nbytes == 12


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_the_budget_counts_values_as_others_will_encode_them(bits) -> None:
    target = 1500
    follower = {16: "fp16", 8: "fp8", 4: "qsgd(bits=4, bucket=100000)"}[bits]
    codec = COMPRESSION.parse(f"adaptive_density({target}, value_bits={bits}) >> {follower}")
    payload, decoded = sent(codec, gradient())
    scale = sum(part.nbytes + 4 for name, part in payload.parts.items() if "scale" in name)
    assert 0.95 * target <= payload.nbytes <= target + scale
    _, other = sent(AdaptiveDensity(target), gradient())
    assert decoded.count_nonzero() > 1.2 * other.count_nonzero()
    if bits == 16:
        assert payload.nbytes <= target
        assert error(gradient(), decoded) < error(gradient(), other)


def test_the_message_follows_the_gradient(reduce) -> None:
    """Shares are found anew in each step: a layer that wakes up is heard."""
    codec = AdaptiveDensity(300)
    state = codec.init(SPEC)
    shares = []
    for scale in (1.0, 100.0):
        x = gradient()
        x[2000:] *= scale
        payload, state = codec.encode(x, state, KEY)
        decoded = codec.decode(payload, SPEC, KEY)
        shares.append(int(decoded[2000:].count_nonzero()) / int(decoded.count_nonzero()))
    assert shares[0] < 0.2
    assert shares[1] > 0.95


def test_feedback_around_it_loses_nothing(reduce) -> None:
    inputs = [[gradient(5 * rank + step, torch.float64) for step in range(5)] for rank in range(3)]
    compression = COMPRESSION.parse("ef(adaptive_density(400))")
    results, engine = reduce(compression, inputs, SPEC)
    applied = 3 * sum(result.mean for result in results[0])
    held = sum(steps[-1].state["residual"] for steps in results)
    exact = sum(x for steps in inputs for x in steps)
    assert torch.allclose(applied + held, exact, rtol=0, atol=1e-12)
    # Everyone gathers the others' messages: two copies of each leave a node, in five steps.
    assert engine.ledger.sent_by(0) <= 5 * 2 * 400


def test_fused_feedback_is_the_sum_encoded() -> None:
    x, e = gradient(), gradient(2) / 3
    codec = AdaptiveDensity(600)
    payload, lost, state = encode_feedback(codec, x, e, codec.init(SPEC), KEY)
    plain, other = codec.encode(x + e, codec.init(SPEC), KEY)
    assert torch.equal(payload.buffer, plain.buffer)
    assert state == other
    assert torch.equal(codec.decode(payload, SPEC, KEY) + lost, x + e)


@pytest.mark.parametrize("position", [0, 2100, NUMEL - 1])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_refused(position, value) -> None:
    for dtype in (torch.float32, torch.float16, torch.float64):
        x = gradient(dtype=dtype)
        x[position] = value
        codec = AdaptiveDensity(300)
        with pytest.raises(NonFiniteError, match=r"\[5070\]"):
            sent(codec, x)
        if dtype == torch.float16 and math.isinf(value):
            continue  # sums of 16 bits saturate, whatever encodes them
        with pytest.raises(NonFiniteError):
            encode_feedback(codec, x, torch.zeros_like(x), codec.init(SPEC), KEY)


def test_crafted_positions_never_crash() -> None:
    tensors = placed({str(i): (700,) for i in range(12)})
    spec = Spec((8400,), torch.float32, tensors=tensors)
    x = Key(2).normal(8400) * torch.tensor([1.0, 9.0] * 6).repeat_interleave(700)
    codec = AdaptiveDensity(900)
    payload, decoded = sent(codec, x, spec)
    part = payload.parts["indices"]
    assert torch.equal(decoded[decoded != 0], x[decoded != 0])
    wrong = [part[:0], part[:1], part[:2], part[:9], part[:-1], part.repeat(2), part[1:]]
    for position in range(40):
        for value in (0, 1, 0x7F, 0x80, 0xFF):
            damaged = part.clone()
            damaged[position] = value
            wrong.append(damaged)
    for damaged in wrong:
        try:
            again = codec.decode(payload.replace(indices=damaged), spec, KEY)
        except WireError:
            continue
        assert torch.equal(damaged, part) or again.shape == x.shape
    with pytest.raises(WireError):
        codec.decode(payload.replace(indices=part[:0]), spec, KEY)


def test_it_states_no_guarantee_and_keeps_a_plain_state() -> None:
    codec = AdaptiveDensity(300)
    assert codec.guarantee(SPEC) == Guarantee()
    _, state = codec.encode(gradient(), codec.init(SPEC), KEY)
    assert set(state) == {"tensors", "ratio", "factors"}
    assert len(state["factors"]) == 2
    assert 0.5 < state["ratio"] < 2
    assert lift(codec).init(SPEC, 2)["tensors"] == TENSORS


def test_it_trains() -> None:
    run = gradwire.simulate(
        compression="ef(adaptive_density(400))",
        model="mlp((16,))",
        steps=4,
        workers=2,
        batch_size=8,
        compute="fixed(0.001)",
    )
    assert run.summary["bytes_sent"] <= 4 * 2 * 400
    assert run.summary["bytes_sent"] >= 0.95 * 4 * 2 * 400


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("adaptive_density(10)", "at least 32"),
        ("adaptive_density(0.01)", "target_bytes must be int"),
        ("adaptive_density(100, value_bits=0)", "value_bits must lie in"),
        ("adaptive_density", "needs target_bytes"),
    ],
)
def test_nonsense_is_refused(text, message) -> None:
    with pytest.raises(NotationError, match=message):
        COMPRESSION.parse(text)


def test_too_few_bytes_for_so_many_layers_are_refused() -> None:
    tensors = placed({str(i): (600,) for i in range(100)})
    with pytest.raises(ValueError, match=r"100 layers in a bucket take 232 bytes.*sequential"):
        AdaptiveDensity(100).init(Spec((60_000,), torch.float32, tensors=tensors))
