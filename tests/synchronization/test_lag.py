"""Lazy aggregation: its rule by hand, its theorem on who speaks how often, and its bytes."""

import pytest
import torch

from gradwire.compression import COMPRESSION
from gradwire.core.errors import GradwireWarning
from gradwire.synchronization import SYNCHRONIZATION

EXACT = {"rtol": 1e-12, "atol": 1e-12}


def num_uploads(trained) -> list[int]:
    return [int(replica.memory["num_uploads"]) for replica in trained.replicas]


@pytest.mark.parametrize("settings", [{}, {"momentum": 0.9}, {"noise": 1.0}])
def test_threshold_zero_is_bsp(train, settings):
    trained, bsp = train("lag(0.0)", **settings), train("bsp", **settings)
    for params in trained.params:
        torch.testing.assert_close(params, bsp.agreed, **EXACT)
    assert num_uploads(trained) == [10] * 4


@pytest.mark.parametrize("scheduling", ["sequential", 'sequential("layer")'])
@pytest.mark.parametrize(("threshold", "window"), [(0.1, 10), (0.45, 2)])
def test_the_rule_by_hand(train, threshold, window, scheduling):
    """The paper's own form: a rate for the sum, alpha = lr / n, and models kept, not moves."""
    n, steps, lr = 4, 25, 0.1
    text = f"lag({threshold}, window={window})"
    trained = train(text, workers=n, steps=steps, lr=lr, scheduling=scheduling)
    alpha, models, counts = lr / n, [trained.initial], [0] * n
    last = [None] * n
    for step in range(steps):
        moves = [
            (models[-d] - models[-d - 1]).square().sum()
            for d in range(1, window + 1)
            if d < len(models)
        ]
        bound = threshold * sum(moves) / (alpha * n) ** 2
        for rank in range(n):
            new = trained.gradient(rank, models[-1])
            if last[rank] is None or (new - last[rank]).square().sum() > bound:
                last[rank] = new
                counts[rank] += 1
        models.append(models[-1] - alpha * sum(last))
        for rank in range(n):
            torch.testing.assert_close(trained.after[rank, step].params, models[-1], **EXACT)
    assert num_uploads(trained) == counts
    assert max(counts) < steps


def test_smooth_workers_speak_rarely(train):
    """Chen et al. 2018, Lemma 4: at most every (d+1)-th step if L_i^2 <= xi / (d alpha^2 n^2)."""
    steps, lr, xi = 66, 0.1, 0.1
    smooth, rough = (xi / 10) ** 0.5 / lr, xi**0.5 / lr  # d = 10 and d = 1
    curvatures = (smooth * 0.999, smooth * 0.5, rough * 0.999, rough * 0.9)
    trained = train(f"lag({xi})", steps=steps, lr=lr, curvatures=curvatures)
    counts = num_uploads(trained)
    assert all(1 <= count <= 1 + steps // 11 for count in counts[:2])
    assert all(count <= 1 + steps // 2 for count in counts[2:])
    torch.testing.assert_close(trained.agreed, trained.optimum, rtol=1e-4, atol=1e-4)


def test_momentum_makes_nobody_lazier(train):
    """Moves are those of plain SGD: with longer ones all would be silent for too long."""
    trained = train("lag(0.01)", momentum=0.9, steps=300, lr=0.05)
    torch.testing.assert_close(trained.agreed, trained.optimum, rtol=1e-4, atol=1e-4)
    assert 4 <= sum(num_uploads(trained)) < 4 * 300


def test_silence_costs_one_byte(train):
    always, lazy = train("lag(0.0)", steps=20), train("lag(0.1)", steps=20)
    payload = always.sent_bytes // (20 * 4 * 3)
    assert payload >= 8 * 8
    spoken = sum(num_uploads(lazy))
    assert spoken < 20 * 4
    assert lazy.sent_bytes == 3 * (spoken * payload + (20 * 4 - spoken))


@pytest.mark.parametrize("servers", [1, 2])
def test_with_servers(train, servers):
    trained, wanted = train("lag(0.1)", f"parameter_server({servers})"), train("lag(0.1)")
    torch.testing.assert_close(trained.agreed, wanted.agreed, **EXACT)
    assert num_uploads(trained) == num_uploads(wanted)


def test_codecs_may_lose_something(train):
    """Changes are relative to what was heard: the optimum of different workers is reached."""
    trained = train("lag(0.1)", compression="topk(0.25)", steps=400, lr=0.05)
    torch.testing.assert_close(trained.agreed, trained.optimum, rtol=1e-6, atol=1e-6)
    heard = sum(replica.memory["sent"] for replica in trained.replicas) / 4
    torch.testing.assert_close(trained.replicas[0].memory["aggregate"], heard, **EXACT)
    assert sum(num_uploads(trained)) < 4 * 400


def test_pauses_between_any_two_steps(train):
    whole, parts = train("lag(0.1)"), train("lag(0.1)", pause_at=range(1, 10))
    assert torch.equal(whole.agreed, parts.agreed)
    assert num_uploads(whole) == num_uploads(parts)


def test_who_has_a_bad_gradient_is_silent(train):
    trained = train("lag(0.0)", steps=3, bad=[(1, 1)], nonfinite="skip")
    assert num_uploads(trained) == [3, 2, 3, 3]
    assert [replica.num_dropped for replica in trained.replicas] == [0, 1, 0, 0]
    before, last = trained.after[1, 0].params, trained.gradient(1, trained.initial)
    others = sum(trained.gradient(rank, before) for rank in (0, 2, 3))
    wanted = before - 0.1 * (others + last) / 4
    torch.testing.assert_close(trained.after[0, 1].params, wanted, **EXACT)
    with pytest.raises(ValueError, match="nan in the gradient of layer 0 on rank 1 in step 1"):
        train("lag(0.0)", steps=3, bad=[(1, 1)])


@pytest.mark.parametrize(
    ("text", "compression", "message"),
    [
        ("lag(-1.0)", "identity", "not negative"),
        ("lag(0.1, window=0)", "identity", "from 1 on"),
        ("lag(0.1)", "ef(topk(0.25))", "a feedback of its own"),
    ],
)
def test_refuses(train, text, compression, message):
    with pytest.raises(ValueError, match=message):
        train(text, compression=compression)


def test_warns_of_codecs_whose_error_grows(train):
    with pytest.warns(GradwireWarning, match="grow without bound"):
        train("lag(0.1)", compression="randomk(0.1, unbiased=True)", steps=1)


def test_threepc_is_a_compression(train):
    with pytest.raises(ValueError, match="Did you mean lag") as error:
        SYNCHRONIZATION.parse("threepc")
    written = str(error.value).split('compression="')[1].split('"')[0]
    train("bsp", compression=repr(COMPRESSION.parse(written)))
