"""DiLoCo: two outer steps by hand, local SGD as a special case, and the streaming form."""

from dataclasses import replace

import pytest
import torch

from gradwire.core.spec import Spec
from gradwire.synchronization import SYNCHRONIZATION
from gradwire.synchronization.diloco import DiLoCo
from gradwire.testing.quadratics import Quadratics

EXACT = {"rtol": 1e-12, "atol": 1e-12}
LAYERS = {"layers": (3, 1, 2, 2), "scheduling": 'sequential("layer")'}


def test_two_rounds_by_hand(train):
    """f_1 = x^2/2 and f_2 = (x - 2)^2 from 4, rate 1/2: inner steps halve, or jump to 2."""
    trained = train(
        "diloco(2, outer_lr=0.5, outer_momentum=0.5)",
        workers=2,
        steps=4,
        lr=0.5,
        layers=(1,),
        curvatures=(1.0, 2.0),
        minima=torch.tensor([[0.0], [2.0]]),
        start=torch.tensor([4.0]),
    )
    # 1 and 2 are reached, D = 4 - 1.5 = 2.5 = v, y = 4 - (2.5 + 1.25)/2 = 2.125.
    assert trained.after[0, 1].params.item() == trained.after[1, 1].params.item() == 2.125
    # 0.53125 and 2: D = 0.859375, v = 2.109375, y = 2.125 - (0.859375 + 1.0546875)/2.
    assert [params.item() for params in trained.params] == [1.16796875] * 2
    assert trained.replicas[0].memory["velocity"].item() == 2.109375


@pytest.mark.parametrize("compression", ["identity", "ef(topk(0.25))"])
@pytest.mark.parametrize("scheduling", ["sequential", 'sequential("layer")'])
def test_plain_averaging_is_localsgd(train, compression, scheduling):
    settings = {"compression": compression, "scheduling": scheduling, "momentum": 0.9}
    trained = train("diloco(3, outer_lr=1.0, outer_momentum=0.0)", **settings)
    wanted = train("localsgd(3)", **settings)
    for params, others in zip(trained.params, wanted.params):
        assert torch.equal(params, others)
    assert torch.equal(trained.agreed, wanted.agreed)
    assert trained.sent_bytes == wanted.sent_bytes
    assert trained.time_s == wanted.time_s


def test_fragments_end_their_rounds_at_different_times(train):
    method = DiLoCo(6, fragments=3)
    ends = [[s for s in range(18) if method.ends_round(p, s)] for p in range(3)]
    assert ends == [[5, 11, 17], [1, 7, 13], [3, 9, 15]]
    trained = train("diloco(6, fragments=3)", steps=18, **LAYERS)
    anchors = [trained.initial] + [trained.after[0, s].memory["anchor"] for s in range(18)]
    parts = [[0, 1, 2, 6, 7], [3], [4, 5]]  # layers 0 and 3, 1, 2
    for fragment, part in enumerate(parts):
        changed = [s for s in range(17) if not torch.equal(anchors[s + 1][part], anchors[s][part])]
        assert changed == [s for s in ends[fragment] if s < 17]
    # Each is exchanged as often as it ends its rounds, all of them at the end.
    sent, once = (t.engine.ledger.tensor_bytes for t in (trained, train("bsp", steps=1, **LAYERS)))
    assert [sent[f"layer {i}"] / once[f"layer {i}"] for i in range(4)] == [3, 4, 4, 3]


def test_each_fragment_is_local_sgd(train):
    """Coordinates of these quadratics do not see each other, so each fragment is on its own."""
    plain = "outer_lr=1.0, outer_momentum=0.0"
    trained = train(
        f"diloco(4, fragments=2, {plain})",
        steps=9,
        layers=(4, 4),
        scheduling='sequential("layer")',
    )
    for part, rounds in ((slice(0, 4), (4, 4, 1)), (slice(4, 8), (2, 4, 3))):
        x = trained.initial[part]
        for length in rounds:
            own = [x] * 4
            for rank in range(4):
                for _ in range(length):
                    own[rank] = own[rank] - 0.1 * trained.curvatures[rank] * (
                        own[rank] - trained.minima[rank][part]
                    )
            x = sum(own) / 4
        for params in trained.params:
            torch.testing.assert_close(params[part], x, **EXACT)


@pytest.mark.parametrize("mixing", [0.0, 0.25])
def test_a_delayed_exchange_by_hand(train, mixing):
    """One round of 3 steps, taken in 2 steps later: mixed with what was walked meanwhile."""
    text = f"diloco(3, outer_lr=0.5, outer_momentum=0.5, delay=2, mixing={mixing})"
    trained = train(text, steps=7)

    def walked(rank, x, length):
        for _ in range(length):
            x = x - 0.1 * trained.gradient(rank, x)
        return x

    y = trained.initial
    sent = [walked(rank, y, 3) for rank in range(4)]
    outer = y - sum(sent) / 4
    y = y - 0.5 * (outer + 0.5 * outer)
    own = [mixing * walked(rank, sent[rank], 2) + (1 - mixing) * y for rank in range(4)]
    for rank in range(4):
        torch.testing.assert_close(trained.after[rank, 3].params, walked(rank, sent[rank], 1))
        torch.testing.assert_close(trained.after[rank, 4].params, own[rank], **EXACT)
        torch.testing.assert_close(trained.after[rank, 4].memory["anchor"], y, **EXACT)
    # The second exchange sets off after step 5 and ends with the run: the last step is dropped.
    sent, velocity = [walked(rank, own[rank], 1) for rank in range(4)], outer
    outer = y - sum(sent) / 4
    velocity = 0.5 * velocity + outer
    y = y - 0.5 * (outer + 0.5 * velocity)
    for params in trained.params:
        torch.testing.assert_close(params, y, **EXACT)


def test_delay_hides_communication(train):
    """A round of 4 steps of 10 ms; an exchange that takes about 20 ms."""
    slow = {"steps": 16, "latency": "10ms", "compute": "fixed(0.01)"}
    waits, overlaps = train("diloco(4)", **slow), train("diloco(4, delay=3)", **slow)
    alone = train("diloco(4)", **slow | {"latency": "0s"})
    exchange = (waits.time_s - alone.time_s) / 4
    assert exchange == pytest.approx(0.02, rel=1e-3)
    # All but the last exchange are hidden; that one set off in the step before the last at most.
    assert overlaps.time_s == pytest.approx(alone.time_s + exchange, rel=1e-3)
    assert overlaps.sent_bytes == waits.sent_bytes


def test_streaming_with_feedback_loses_nothing(train):
    """Exchanges of several fragments under way at once: bytes, feedback and agreement hold."""
    trained = train(
        "diloco(4, outer_lr=1.0, outer_momentum=0.0, fragments=4, delay=3, mixing=0.5)",
        compression="ef(topk(0.5))",
        steps=200,
        latency="25ms",
        nonfinite="skip",
        minima=torch.arange(8.0).expand(4, 8),
        **LAYERS,
    )
    for replica in trained.replicas:
        assert torch.equal(replica.params, trained.agreed)
    torch.testing.assert_close(trained.agreed, trained.optimum, rtol=1e-6, atol=1e-6)


def test_sparse_loco(train):
    """Bytes are those of the payloads, which everyone sends to all others once in a round."""
    trained = train(
        "diloco(5, outer_lr=1.0, outer_momentum=0.0)",
        compression="ef(topk(0.5) >> eden(2, unbiased=False))",
        steps=15,
        layers=(64,),
    )
    codec, vector = trained.plan.reducer.inner, trained.initial
    payload, _ = codec.encode(vector, codec.init(Spec.of(vector)), trained.plan.key.private(0))
    assert trained.engine.ledger.total_messages == 3 * 4 * 3
    assert trained.sent_bytes == 3 * 4 * 3 * payload.nbytes  # as long for every vector
    assert trained.sent_bytes < train("localsgd(5)", steps=15, layers=(64,)).sent_bytes / 2


def test_a_bad_round_leads_back(train):
    trained = train("diloco(2)", steps=2, lr=1e200, curvatures=[1e200] * 4, nonfinite="skip")
    assert torch.equal(trained.agreed, trained.initial)
    assert all(replica.num_dropped >= 1 for replica in trained.replicas)


def test_pauses_where_nothing_is_under_way(train):
    whole, parts = train("diloco(3)"), train("diloco(3)", pause_at=range(1, 10))
    assert torch.equal(whole.agreed, parts.agreed)
    assert SYNCHRONIZATION.parse("diloco(3)").pauses
    assert not SYNCHRONIZATION.parse("diloco(3, delay=1)").pauses


def test_numbers_that_change(train):
    """A period that gets shorter than the delay under way still agrees in the end."""
    trained = train("diloco(ramp(6, 2, steps=6), outer_lr=ramp(0.5, 1.0, steps=9), delay=1)")
    assert all(torch.equal(params, trained.agreed) for params in trained.params)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("diloco(0)", "at least 1"),
        ("diloco(4, delay=4)", "period - 1 = 3"),
        ("diloco(4, mixing=2.0)", "mixing"),
        ("diloco(4, outer_lr=0.0)", "above 0"),
        ("diloco(4, outer_momentum=1.0)", "below 1"),
        ("diloco(4, fragments=0)", "fragments"),
        ("diloco(4, fragments=2)", "scheduling='sequential"),
        ("sparseloco(4)", "Did you mean diloco"),
    ],
)
def test_refuses(train, text, message):
    with pytest.raises(ValueError, match=message):
        train(text)


def test_mixing_keeps_nothing_of_a_walk_that_led_nowhere(train, monkeypatch):
    """A walk that overflows is dropped by all, and the next round is an ordinary one."""
    gradient = Quadratics._gradient

    def overflowing(task, request):
        result = gradient(task, request)
        if (request.key.rank, request.key.step) == (1, 4):
            result = replace(result, gradient=torch.full_like(result.gradient, 1.7e308))
        return result

    monkeypatch.setattr(Quadratics, "_gradient", overflowing)
    trained = train(
        "diloco(3, mixing=0.5)", steps=12, nonfinite="skip", lr=2.0, curvatures=[0.1] * 4
    )
    assert [replica.num_dropped for replica in trained.replicas] == [1, 2, 1, 1]
    assert torch.isfinite(trained.agreed).all()
