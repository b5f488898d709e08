"""EF21: linear convergence with a contraction, where compression alone diverges."""

import math

import pytest
import torch
from torch import Tensor

from gradwire.architecture.allreduce.allreduce import AllReduce
from gradwire.compression import COMPRESSION
from gradwire.core.errors import GradwireWarning
from gradwire.core.key import Key
from gradwire.core.lifted import lift
from gradwire.core.node import Node
from gradwire.core.reducer import Reduced
from gradwire.core.spec import Spec
from gradwire.runtime.network.network import Network
from gradwire.runtime.virtual.engine import VirtualEngine
from gradwire.training.regroup import regroup_states

F64 = torch.float64

# Beznosikov et al. 2020: f_i(x) = <a_i, x>^2 + |x|^2 / 4.
DIRECTIONS = torch.tensor([[-3, 2, 2], [2, -3, 2], [2, 2, -3]], dtype=torch.float64)
HESSIANS = torch.stack([2 * torch.outer(a, a) + torch.eye(3) / 2 for a in DIRECTIONS])
# The eigenvalues of the mean Hessian, and the largest of any.
MU, SMOOTHNESS, LARGEST = 7 / 6, 103 / 6, 34.5


def loss(x: Tensor) -> float:
    return float(x @ HESSIANS.mean(0) @ x) / 2


def descend(text: str, rate: float, num_steps: int) -> tuple[list[Tensor], list[list[Reduced]]]:
    """The iterates of gradient descent from (1, 1, 1), and what each rank got in each step."""
    reducer, start = lift(COMPRESSION.parse(text)), torch.ones(3, dtype=torch.float64)

    async def program(node: Node) -> tuple[list[Tensor], list[Reduced]]:
        x, state, results = start, reducer.init(Spec.of(start), node.size), []
        path = [x]
        for step in range(num_steps):
            group, key = AllReduce().group(node, "x"), Key(2).at(step).private(node.rank)
            results.append(await reducer.mean(HESSIANS[node.rank] @ x, state, key, group))
            state, x = results[-1].state, x - rate * results[-1].mean
            path.append(x)
        return path, results

    done = VirtualEngine(Network.uniform(3)).run([program] * 3)
    return done[0][0], [results for _, results in done]


def test_the_constants_are_those_of_the_example() -> None:
    eigenvalues = torch.linalg.eigvalsh(HESSIANS.mean(0))
    assert float(eigenvalues[0]) == pytest.approx(MU)
    assert float(eigenvalues[-1]) == pytest.approx(SMOOTHNESS)
    assert float(torch.linalg.eigvalsh(HESSIANS).max()) == pytest.approx(LARGEST)


def test_top_1_alone_diverges_exponentially() -> None:
    rate = 0.01
    path, _ = descend("topk(0.33)", rate, 200)
    assert torch.allclose(path[200], path[0] * (1 + 11 * rate / 6) ** 200, rtol=1e-9)


def test_ef21_with_top_1_converges_as_fast_as_the_theorem_says() -> None:
    """Richtarik et al. 2021, Theorem 2: (1 - rate mu)^t, for top-1 in three dimensions."""
    theta = 1 - math.sqrt(2 / 3)
    beta = (2 / 3) / theta
    rate = 1 / (SMOOTHNESS + LARGEST * math.sqrt(2 * beta / theta))
    num_steps = 1500
    path, results = descend("ef21(topk(0.33))", rate, num_steps)

    def error(step: int) -> float:
        """The mean over workers of |g_i - grad_i|^2, at the gradients that g_i has heard."""
        own = torch.stack([steps[step].own() for steps in results])
        return float((own - HESSIANS @ path[step]).square().sum(1).mean())

    lyapunov = [loss(path[t]) + rate / theta * error(t) for t in range(num_steps)]
    for step in range(0, num_steps, 50):
        assert lyapunov[step] <= (1 - rate * MU) ** step * lyapunov[0] * (1 + 1e-9)
    assert loss(path[-1]) < 1e-4 * loss(path[0])


@pytest.mark.slow
def test_momentum_converges_too() -> None:
    path, _ = descend("ef21(topk(0.33), momentum=0.5)", 0.01, 1500)
    assert float(path[-1].norm()) < 1e-6


def test_what_all_hold_is_the_mean_of_what_each_is_known_by(reduce) -> None:
    reducer = COMPRESSION.parse("ef21(topk(0.1))")
    # More elements than the least that would be scattered.
    inputs = [
        [Key(3).at(step).private(rank).normal(60_000).double() for step in range(4)]
        for rank in range(3)
    ]
    for route in ("auto", "gather", "scatter"):
        results, _ = reduce(reducer, inputs, architecture=AllReduce(route))
        for step in range(4):
            own = torch.stack([results[rank][step].own() for rank in range(3)])
            assert torch.allclose(results[0][step].mean, own.mean(0), rtol=0, atol=1e-14)


@pytest.mark.parametrize("codec", ["topk(0.1)", "sign"])
def test_bidirectional_servers_hold_what_is_missing(reduce, codec) -> None:
    """g + what the servers still hold = the mean of all g_i: nothing drifts away."""
    inputs = [
        [Key(3).at(step).private(rank).normal(100).double() for step in range(10)]
        for rank in range(3)
    ]
    results, _ = reduce(COMPRESSION.parse(f"ef21({codec}, bidirectional=True)"), inputs)
    for step in range(10):
        now = [steps[step] for steps in results]
        own = torch.stack([result.own() for result in now]).mean(0)
        held = torch.cat([result.state["inner"]["scatter"]["owned"]["residual"] for result in now])
        assert torch.allclose(now[0].mean + held, own, rtol=0, atol=1e-13)
        assert held.abs().max() > 1e-3


@pytest.mark.slow
def test_bidirectional_follows_gradients_that_settle(reduce) -> None:
    inputs = [[Key(3).private(rank).normal(100).double()] * 150 for rank in range(3)]
    exact = torch.stack([own[0] for own in inputs]).mean(0)
    (steps, *_), _ = reduce(COMPRESSION.parse("ef21(topk(0.1), bidirectional=True)"), inputs)
    errors = [float((step.mean - exact).norm()) for step in steps]
    assert errors[0] > 1
    assert errors[-1] < 1e-12


def test_bidirectional_bytes_per_worker_do_not_grow_with_their_number(reduce) -> None:
    inputs = [[Key(1).private(rank).normal(16_000)] for rank in range(8)]
    _, both = reduce(COMPRESSION.parse("ef21(sign, bidirectional=True)"), inputs)
    _, one = reduce(COMPRESSION.parse("ef21(sign)"), inputs)
    assert both.ledger.total_bytes < 0.35 * one.ledger.total_bytes  # 2/8, and headers


@pytest.mark.few
@pytest.mark.parametrize("size", [2, 3, 4])
def test_bidirectional_does_not_drift_when_workers_come_or_go(reduce, size) -> None:
    """g + what the servers hold is the mean of all g_i again, so g reaches the new mean."""
    reducer, spec = COMPRESSION.parse("ef21(topk(0.1), bidirectional=True)"), Spec((100,), F64)
    inputs = [[Key(3).private(rank).normal(100).double()] * 5 for rank in range(3)]
    before, _ = reduce(reducer, inputs)
    held = torch.cat([steps[-1].state["inner"]["scatter"]["owned"]["residual"] for steps in before])
    assert held.abs().max() > 1e-3
    states = [[steps[-1].state] for steps in before]
    moved = [own[0] for own in regroup_states(reducer, states, [spec], [spec], size)]
    inputs = [[Key(3).private(rank).normal(100).double()] * 200 for rank in range(size)]
    after, _ = reduce(reducer, inputs, states=moved, first_step=5)
    exact = torch.stack([own[0] for own in inputs]).mean(0)
    assert float((after[0][-1].mean - exact).norm()) < 1e-12


def test_bidirectional_needs_a_contraction() -> None:
    reducer = COMPRESSION.parse("ef21(terngrad(0.0), bidirectional=True)")
    with pytest.raises(ValueError, match="no contraction on shards of 500"):
        reducer.init(Spec((1000,), torch.float32), 2)


def takes_part(rank: int, step: int, probability: float) -> bool:
    """The draw of the fixture's keys."""
    return float(Key(1).at(step).private(rank).child("takes part").uniform(1)) < probability


def walk(size: int, num_steps: int, numel: int) -> list[list[Tensor]]:
    return [
        [Key(3).at(step).private(rank).normal(numel).double() for step in range(num_steps)]
        for rank in range(size)
    ]


@pytest.mark.parametrize("codec", ["topk(0.1)", "sign", "randomk(0.2)", "topk(0.1) >> fp16"])
def test_with_everyone_taking_part_it_is_ef21(reduce, codec) -> None:
    """Also bit for bit if they happen to: a step in which all are drawn is one of EF21."""
    inputs = walk(2, 1, 60)
    step = next(t for t in range(99) if all(takes_part(rank, t, 0.5) for rank in range(2)))
    whole, a = reduce(COMPRESSION.parse(f"ef21({codec})"), inputs, first_step=step)
    one, b = reduce(COMPRESSION.parse(f"ef21({codec}, participation=1.0)"), inputs, first_step=step)
    half, _ = reduce(
        COMPRESSION.parse(f"ef21({codec}, participation=0.5)"), inputs, first_step=step
    )
    assert a.ledger.total_bytes == b.ledger.total_bytes
    for x, y, z in zip(whole, one, half):
        assert torch.equal(x[0].mean, y[0].mean)
        assert torch.equal(x[0].own(), y[0].own())
        assert torch.allclose(x[0].mean, z[0].mean, rtol=0, atol=1e-15)
        assert torch.equal(x[0].own(), z[0].own())


def test_the_absent_keep_their_estimate_and_count_as_zero(reduce) -> None:
    size, num_steps = 4, 12
    inputs = walk(size, num_steps, 40)
    results, _ = reduce(COMPRESSION.parse("ef21(topk(0.1), participation=0.5)"), inputs)
    known = [torch.zeros(40, dtype=torch.float64) for _ in range(size)]
    absences = 0
    for step in range(num_steps):
        for rank in range(size):
            own = results[rank][step].own()
            if takes_part(rank, step, 0.5):
                best = (inputs[rank][step] - known[rank]).abs().topk(4).indices
                known[rank] = known[rank].index_copy(0, best, inputs[rank][step][best])
            else:
                absences += 1
            assert torch.allclose(own, known[rank], rtol=0, atol=1e-14)
            assert torch.equal(own, results[rank][step].state["own"])
        mean = torch.stack(known).mean(0)
        assert torch.allclose(results[0][step].mean, mean, rtol=0, atol=1e-14)
    assert 0.25 < absences / (size * num_steps) < 0.75


@pytest.mark.slow
def test_partial_participation_converges_linearly() -> None:
    """Fatkhullin et al. 2021, EF21-PP: the rate is worse by the share of those that take part."""
    path, _ = descend("ef21(topk(0.33), participation=0.5)", 0.01, 1000)
    losses = [loss(x) for x in path]
    for step in range(250, 1001, 250):
        assert losses[step] < 0.3 * losses[step - 250]
    assert losses[-1] < 1e-5 * losses[0]


def test_partial_participation_sends_as_many_bytes_as_take_part(reduce) -> None:
    size, num_steps = 4, 40
    inputs = walk(size, num_steps, 2000)
    _, whole = reduce(COMPRESSION.parse("ef21(sign)"), inputs)
    _, part = reduce(COMPRESSION.parse("ef21(sign, participation=0.25)"), inputs)
    present = sum(takes_part(rank, t, 0.25) for rank in range(size) for t in range(num_steps))
    absent = size * num_steps - present
    payload = whole.ledger.total_bytes // (size * num_steps * (size - 1))
    assert part.ledger.total_bytes == (size - 1) * (present * payload + absent)  # a byte each
    assert part.ledger.total_bytes == pytest.approx(0.25 * whole.ledger.total_bytes, rel=0.25)


def test_a_worker_takes_part_with_all_its_buckets(reduce) -> None:
    """One draw for the whole model: the key of a bucket names it, the draw does not."""
    reducer, size = COMPRESSION.parse("ef21(sign, participation=0.5)"), 8

    async def program(node: Node) -> list[bool]:
        spoke = []
        for bucket in ("first", "second"):
            state = reducer.init(Spec((50,), torch.float64), size)
            key = Key(9).at(3).private(node.rank).child(bucket)
            group = AllReduce().group(node, bucket)
            x = torch.ones(50, dtype=torch.float64)
            spoke.append(bool((await reducer.mean(x, state, key, group)).own().any()))
        return spoke

    spoke = VirtualEngine(Network.uniform(size)).run([program] * size)
    assert all(first == second for first, second in spoke)
    assert 0 < sum(first for first, _ in spoke) < size


def test_momentum_follows_the_gradients_of_absences_too(reduce) -> None:
    inputs = walk(2, 10, 30)
    text = "ef21(topk(0.2), momentum=0.5{})"
    whole, _ = reduce(COMPRESSION.parse(text.format("")), inputs)
    part, _ = reduce(COMPRESSION.parse(text.format(", participation=0.5")), inputs)
    for a, b in zip(whole, part):
        assert torch.equal(a[-1].state["followed"], b[-1].state["followed"])


def test_with_momentum_of_its_own_the_optimizer_has_none() -> None:
    assert COMPRESSION.parse("ef21(sign)").momentum_lives == "before"
    assert COMPRESSION.parse("ef21(sign, momentum=0.9)").momentum_lives == "inside"


def test_a_trajectory_by_hand(reduce) -> None:
    """Top-1 of two elements, with momentum 1/2."""
    gradients = [[4.0, 3.0], [0.0, 5.0], [2.0, 0.0]]
    # v: (4, 3), (2, 4), (2, 2). Sent: (4, 0), (0, 4), (-2, 0).
    inputs = [[torch.tensor(g, dtype=torch.float64) for g in gradients]]
    (steps,), _ = reduce(COMPRESSION.parse("ef21(topk(0.5), momentum=0.5)"), inputs)
    assert [step.mean.tolist() for step in steps] == [[4, 0], [4, 4], [2, 4]]
    assert steps[-1].state["followed"].tolist() == [2, 2]


def test_estimates_of_half_floats_do_not_lose_small_steps(reduce) -> None:
    inputs = [[torch.full((8,), 1 + 1e-3 * t, dtype=torch.float16) for t in range(50)]]
    (steps,), _ = reduce(COMPRESSION.parse("ef21(identity)"), inputs)
    assert steps[-1].state["own"].dtype == torch.float32
    assert torch.equal(steps[-1].mean, inputs[0][-1])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ef21(ef(sign))", "one is enough"),
        ("ef21(ef21(sign))", "one is enough"),
        ('ef21(partition({"*": "ef(sign)"}))', "one is enough"),
        ("ef21(gtopk(0.1))", "drift away"),
        ("ef21(signvote)", "drift away"),
        ('ef21(partition({"*": "signvote"}))', "drift away"),
        ("ef21(adacomp(50))", "write ef"),
        ("ef21(randomk(0.1), bidirectional=True)", "Leave out bidirectional"),
        ("ef21(powersgd(2), bidirectional=True)", "Leave out bidirectional"),
        ("ef21(rans)", "must follow a quantiser"),
        ("ef21(sign, momentum=1.0)", "momentum lies in"),
        ("ef21(sign, momentum=-0.1)", "momentum lies in"),
        ("ef21(sign, participation=0.0)", "participation lies in"),
        ("ef21(sign, participation=1.5)", "participation lies in"),
        ("ef21(sign, bidirectional=True, participation=0.5)", "Leave out one of the two"),
        ("ef21(powersgd(2), participation=0.5)", "all workers take part.*Leave out participation"),
        ('ef21(partition({"*": "sign"}), participation=0.5)', "Leave out participation"),
        ("ef21(terngrad(share=True), participation=0.5)", "maximum over all workers"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_runs(text, message) -> None:
    with pytest.raises(ValueError, match=message):
        COMPRESSION.parse(text)


def test_feedback_around_it_is_refused(reduce) -> None:
    with pytest.raises(ValueError, match="feedback within feedback"):
        reduce(COMPRESSION.parse("ef(ef21(sign))"), [[torch.ones(4)]])


def test_tensors_may_be_treated_each_in_its_own_way(reduce) -> None:
    text = 'ef21(partition({"*": "topk(0.5)"}))'
    (steps,), _ = reduce(COMPRESSION.parse(text), [[torch.tensor([1.0, 2.0])] * 2])
    assert [step.mean.tolist() for step in steps] == [[0, 2], [1, 2]]


def test_a_codec_that_may_add_to_the_error_is_warned_about() -> None:
    with pytest.warns(GradwireWarning, match="omega = 15.3"):
        COMPRESSION.parse("ef21(terngrad(0.0))").init(Spec((1000,), torch.float32), 2)
