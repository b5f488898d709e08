"""One of several codecs for each tensor: the least error for the bytes, and never more of them."""

import io
import itertools
import random

import pytest
import torch
from torch import Tensor

import gradwire
from gradwire.compression import COMPRESSION
from gradwire.compression._allocation import allocate_along_hulls, choose_allocation, lower_hull
from gradwire.compression.allocated import Allocated
from gradwire.core.codec import Codec, Guarantee, unpack
from gradwire.core.errors import NonFiniteError, NotationError, WireError
from gradwire.core.fusion import encode_feedback
from gradwire.core.key import Key
from gradwire.core.lifted import lift
from gradwire.core.payload import Payload
from gradwire.core.spec import Spec
from sampling import slow

TENSORS = (
    ("a.weight", 0, 2000, (40, 50)),
    ("a.bias", 2000, 2040, (40,)),
    ("b.weight", 2040, 5040, (30, 100)),
    ("b.bias", 5040, 5070, (30,)),
)
NUMEL = 5070
SPEC = Spec((NUMEL,), torch.float32, tensors=TENSORS)
CHOICES = ("topk(0.01)", "topk(0.1) >> fp16", "qsgd(bits=4)", "fp16")
KEY = Key(3).at(0).private(0)


def allocated(target: int, choices: tuple[str, ...] = CHOICES, every: int = 20) -> Allocated:
    return Allocated(target, tuple(COMPRESSION.parse(text) for text in choices), every)


def gradient(seed: int = 1, scales: tuple[float, ...] = (1.0, 1.0, 0.05, 1.0)) -> Tensor:
    x = Key(seed).normal(NUMEL)
    for (_, start, stop, _), scale in zip(TENSORS, scales):
        x[start:stop] *= scale
    return x


def sent(codec: Codec, x: Tensor, key: Key = KEY) -> tuple[Payload, Tensor, dict]:
    spec = Spec((NUMEL,), x.dtype, tensors=TENSORS)
    payload, state = codec.encode(x, codec.init(spec), key)
    return payload, codec.decode(unpack(codec, payload.buffer.clone(), spec), spec, key), state


def squared(x: Tensor) -> float:
    return float(x.double().square().sum())


def test_the_hull_by_hand() -> None:
    #  size   1   2   4   3  10  10
    #  error 10   6   3   5   0   4: of 3 the line from 2 to 4 is below, the last saves nothing
    assert lower_hull([1, 2, 4, 3, 10, 10], [10, 6, 3, 5, 0, 4]) == [0, 1, 2, 4]
    assert lower_hull([5, 5, 7], [3, 2, 2]) == [1]  # no better for more bytes
    assert lower_hull([1, 2, 3], [4, 3, 0]) == [0, 2]
    assert lower_hull([7], [1]) == [0]


def test_two_layers_by_hand() -> None:
    sizes, errors = [[10, 20, 40], [10, 30]], [[100, 40, 10], [50, 20]]
    # Per byte: 6 (a to 20), 1.5 (a to 40), 1.5 (b to 30).
    assert allocate_along_hulls(sizes, errors, 20) == [0, 0]
    assert allocate_along_hulls(sizes, errors, 30) == [1, 0]
    assert allocate_along_hulls(sizes, errors, 49) == [1, 0]
    assert allocate_along_hulls(sizes, errors, 50) == [2, 0]
    assert allocate_along_hulls(sizes, errors, 70) == [2, 1]
    # What is left goes to a change that fits: 15 bytes are too few for the second choice of a.
    assert choose_allocation([[10, 90], [10, 20]], [[900, 0], [50, 49]], 35) == [0, 1]


def problem(seed: int) -> tuple[list[list[int]], list[list[float]]]:
    draw = random.Random(seed)
    sizes = [[draw.randint(1, 40) for _ in range(4)] for _ in range(5)]
    errors = [[draw.random() * 100 / size for size in own] for own in sizes]
    return sizes, errors


def cost(table: list[list], plan: list[int]) -> float:
    return sum(own[choice] for own, choice in zip(table, plan))


@pytest.mark.parametrize("seed", [*range(4), *map(slow, range(4, 20))])
def test_it_is_what_brute_force_finds_up_to_one_step_of_a_hull(seed) -> None:
    sizes, errors = problem(seed)
    every = [
        (cost(sizes, plan), cost(errors, plan)) for plan in itertools.product(range(4), repeat=5)
    ]
    hulls = [lower_hull(*own) for own in zip(sizes, errors)]
    gap = max(
        errors[i][a] - errors[i][b]
        for i, own in enumerate(hulls)
        for a, b in itertools.pairwise(own)
    )
    least = sum(map(min, sizes))
    for budget in range(least, sum(map(max, sizes)) + 1, 3):
        plan = choose_allocation(sizes, errors, budget)
        assert cost(sizes, plan) <= budget
        best = min(error for size, error in every if size <= budget)
        assert best - 1e-9 <= cost(errors, plan) <= best + gap
        # Where the hulls end is the optimum for the bytes it takes.
        corner = allocate_along_hulls(sizes, errors, budget)
        best = min(error for size, error in every if size <= cost(sizes, corner))
        assert cost(errors, corner) == pytest.approx(best)
        assert cost(errors, plan) <= cost(errors, corner) + 1e-9


@pytest.mark.parametrize("seed", [*range(4), *map(slow, range(4, 20))])
def test_all_layers_have_the_same_slope(seed) -> None:
    """Water-filling: one price at which each layer's own choice is the best."""
    sizes, errors = problem(seed)
    for budget in (40, 60, 90):
        if budget < sum(map(min, sizes)):
            continue
        plan = allocate_along_hulls(sizes, errors, budget)
        low, high = 0.0, float("inf")  # what prices each layer allows for
        for own, lost, choice in zip(sizes, errors, plan):
            for other in range(4):
                more, saved = own[other] - own[choice], lost[choice] - lost[other]
                if more > 0:
                    low = max(low, saved / more)
                elif more < 0:
                    high = min(high, saved / more)
        assert low <= high * (1 + 1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64], ids=str)
def test_a_message_never_exceeds_the_budget_and_more_bytes_err_less(dtype) -> None:
    x = gradient().to(dtype)
    errors = []
    for target in (600, 900, 1500, 3000, 6000, 12_000):
        payload, decoded, _ = sent(allocated(target), x)
        assert payload.nbytes <= target
        errors.append(squared(x - decoded))
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] <= 1e-6 * squared(x)  # fp16 for all of it fits


@pytest.mark.parametrize("target", [400, 700, 1500, 2500])
def test_real_codecs_get_what_brute_force_gives_them(target) -> None:
    x = gradient()
    codec = allocated(target)
    payload, decoded, _ = sent(codec, x)
    keys = [KEY.child(name) for name, *_ in TENSORS]
    messages, errors = [], []
    for (_, start, stop, shape), key in zip(TENSORS, keys):
        piece = x[start:stop].reshape(shape)
        own = [c.encode(piece, c.init(Spec.of(piece)), key)[0] for c in codec.members]
        messages.append([each.parts for each in own])
        errors.append(
            [squared(piece - c.decode(p, Spec.of(piece), key)) for c, p in zip(codec.members, own)]
        )
    best = float("inf")
    for plan in itertools.product(range(4), repeat=4):
        chosen = [own[choice] for own, choice in zip(messages, plan)]
        if codec._payload(plan, chosen, Spec.of(x), x.device).nbytes <= target:
            best = min(best, cost(errors, plan))
    assert payload.nbytes <= target
    assert squared(x - decoded) >= best * (1 - 1e-6)
    assert squared(x - decoded) <= 1.25 * best  # four tensors: a step of a hull is a large one


def test_bytes_go_to_the_layers_that_need_them() -> None:
    few, _, state = sent(allocated(1600), gradient(scales=(1.0, 1.0, 0.01, 1.0)))
    assert state["plan"][0] == 2  # the large weights in four bits
    assert state["plan"][2] < 2
    _, _, state = sent(allocated(2000), gradient(scales=(0.01, 1.0, 1.0, 1.0)))
    assert state["plan"][0] < 2
    assert state["plan"][2] == 2
    # Two bits tell the choice of a tensor.
    assert few.parts["choice"].numel() == 1


def test_a_choice_is_kept_between_allocations() -> None:
    codec = allocated(1600, every=3)
    state = codec.init(SPEC)
    plans = []
    for step in range(7):
        scales = (1.0, 1.0, 0.01, 1.0) if step == 0 else (0.01, 1.0, 0.1, 1.0)
        payload, state = codec.encode(gradient(step, scales), state, KEY.at(step))
        assert payload.nbytes <= 1600
        plans.append(state["plan"])
    assert plans[0] == plans[1] == plans[2] != plans[3] == plans[4] == plans[5]
    # A step in between sends what a measured one with the same choices does.
    again, _ = codec.encode(gradient(3, (0.01, 1.0, 0.1, 1.0)), {**state, "plan": None}, KEY.at(4))
    kept, _ = codec.encode(gradient(3, (0.01, 1.0, 0.1, 1.0)), state, KEY.at(4))
    assert torch.equal(again.buffer, kept.buffer)


def test_it_is_allocated_anew_however_steps_are_numbered() -> None:
    """Local steps bring only every eighth step here: none of them is divisible by twenty."""
    run = gradwire.simulate(
        workers=2,
        steps=64,
        synchronization="localsgd(8)",
        compression="ef(allocated(4000, choices=(topk(0.01), sign), every=20))",
        compute="fixed(0.01)",
        threads=1,
    )
    state = run.replicas[0].exchange[0]["inner"]["codec"]
    assert state["planned"] == 55  # 7, 31 and 55


def test_what_has_become_too_large_is_allocated_anew() -> None:
    codec = allocated(900, ("topk(0.01)", "qsgd(bits=4, bucket=10000) >> rans"), every=1000)
    sparse = gradient() * (Key(9).uniform(NUMEL) < 0.02)
    first, state = codec.encode(sparse, codec.init(SPEC), KEY)
    assert state["plan"][2] == 1
    second, after = codec.encode(gradient(), state, KEY.at(1))
    assert max(first.nbytes, second.nbytes) <= 900
    assert after["plan"] != state["plan"]
    # The same with feedback, without a trace of the first attempt.
    again, lost, also = encode_feedback(codec, gradient(), torch.zeros(NUMEL), state, KEY.at(1))
    assert torch.equal(again.buffer, second.buffer)
    assert also["plan"] == after["plan"]
    assert torch.allclose(codec.decode(again, SPEC, KEY.at(1)) + lost, gradient(), atol=1e-6)


@pytest.mark.parametrize("step", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64], ids=str)
def test_feedback_sends_the_same_and_loses_nothing(dtype, step) -> None:
    codec, spec = allocated(2000), Spec((NUMEL,), dtype, tensors=TENSORS)
    x, e = gradient().to(dtype), gradient(2).to(dtype) / 4
    _, state = codec.encode(x, codec.init(spec), KEY)
    key = KEY.at(step)  # the first measures, the second does not
    payload, lost, after = encode_feedback(codec, x, e, state, key)
    plain, _ = codec.encode(x + e, state, key)
    assert torch.equal(payload.buffer, plain.buffer)
    heard = codec.decode(payload, spec, key)
    error = (heard.double() + lost.double() - (x + e).double()).abs()
    assert (error <= 4 * torch.finfo(dtype).eps * (heard.abs() + (x + e).abs()).double()).all()
    assert after["tensors"] == TENSORS


def test_workers_choose_for_themselves_and_agree(reduce) -> None:
    inputs = [
        [
            gradient(5 * rank + step, (1.0, 1.0, 0.1 * rank + 0.01, 1.0)).double()
            for step in range(4)
        ]
        for rank in range(3)
    ]
    compression = COMPRESSION.parse(
        "ef(allocated(1500, choices=(topk(0.01), topk(0.1) >> fp16, sign), every=2))"
    )
    results, engine = reduce(compression, inputs, SPEC)
    applied = 3 * sum(result.mean for result in results[0])
    held = sum(steps[-1].state["residual"] for steps in results)
    exact = sum(x for steps in inputs for x in steps)
    assert torch.allclose(applied + held, exact, rtol=0, atol=1e-9)
    assert engine.ledger.sent_by(0) <= 4 * 2 * 1500
    states = [steps[-1].state for steps in results]
    file = io.BytesIO()
    torch.save(states, file)
    file.seek(0)
    again = torch.load(file, weights_only=True)
    assert again[0]["inner"]["codec"]["plan"] == states[0]["inner"]["codec"]["plan"]
    more = [[steps[0]] for steps in inputs]
    a, _ = reduce(compression, more, SPEC, states=states, first_step=5)
    b, _ = reduce(compression, more, SPEC, states=again, first_step=5)
    assert torch.equal(a[0][0].mean, b[0][0].mean)


def test_too_small_a_budget_is_refused() -> None:
    with pytest.raises(ValueError, match=r"cheapest choices for 4 tensors .* bytes. Raise target"):
        sent(allocated(600, ("fp16", "sign >> rans", "identity")), 1e-3 * gradient())
    x = gradient()
    x[3000] = float("nan")
    with pytest.raises(NonFiniteError, match=r"b.weight: NaN or infinity"):
        sent(allocated(3000), x)


def test_damaged_choices_never_crash() -> None:
    codec = allocated(1600, CHOICES[:3])
    payload, decoded, _ = sent(codec, gradient())
    wrong = [{"choice": torch.full((1,), value, dtype=torch.uint8)} for value in range(0, 256, 5)]
    wrong += [{"choice": payload.parts["choice"].repeat(2)}, {"choice": torch.zeros(1)}]
    for name, part in payload.parts.items():
        wrong += [{name: part[:-1]}, {name: part.repeat(3)}, {name: torch.ones(3)}]
    refused = 0
    for parts in wrong:
        try:
            again = codec.decode(payload.replace(**parts), SPEC, KEY)
            assert again.shape == decoded.shape
        except WireError:
            refused += 1
    assert refused > 40


def test_it_states_no_guarantee_but_whether_errors_may_grow() -> None:
    assert allocated(500, ("topk(0.1)", "sign")).guarantee(SPEC) == Guarantee()
    assert allocated(500, ("topk(0.1)", "terngrad")).guarantee(SPEC) == Guarantee(grows=True)
    assert allocated(500, ("variance(1.0)", "sign")).traits.needs_feedback
    assert lift(allocated(500)).init(SPEC, 2)["tensors"] == TENSORS


def test_it_trains() -> None:
    run = gradwire.simulate(
        compression="ef(allocated(500, choices=(topk(0.01), topk(0.1) >> fp16, sign), every=2))",
        model="mlp((16,))",
        steps=4,
        workers=2,
        batch_size=8,
        compute="fixed(0.001)",
    )
    assert 4 * 2 * 250 <= run.summary["bytes_sent"] <= 4 * 2 * 500


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("allocated(500, choices=(sign,))", "takes 2 .. 16 choices"),
        ("allocated(500, choices=(sign, sign))", "is there twice"),
        ("allocated(500, choices=(sign, ef(sign)))", "is a way of averaging"),
        ("allocated(500, choices=(sign, signvote))", "merge on their way"),
        ("allocated(500, choices=(sign, rans))", "must follow a quantiser"),
        ("allocated(0, choices=(sign, fp16))", "target_bytes must be positive"),
        ("allocated(500, choices=(sign, fp16), every=0)", "every is a number of training steps"),
        ("allocated(500, choices=(sign, 3))", "choices must be"),
        ("allocated(500)", "needs choices"),
        ("allocated(500, choices=(sign, fp16)) >> fp16", "leaves nothing to encode"),
    ],
)
def test_nonsense_is_refused(text, message) -> None:
    with pytest.raises(NotationError, match=message):
        COMPRESSION.parse(text)
