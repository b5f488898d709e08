"""Virtual seconds of overlapped steps against closed forms: two workers, two layers."""

import pytest

from scheduling.schedule_runs import train, train_in_sequence

# Two layers: 64 x 8 weights and 8 biases, 8 x 10 weights and 10 biases.
NBYTES = (4 * 520, 4 * 90)
LATENCY = 0.01
BANDWIDTH = 2080  # bytes per second
STEPS = 3
BASE = {
    "model": "mlp((8,))",
    "workers": 2,
    "steps": STEPS,
    "compute": "fixed(1.0)",
    "coding": "free",
    "bandwidth": f"{8 * BANDWIDTH}bit",
    "latency": "10ms",
}
LAYERS = "mgwfbp(groups=(2,))"  # one bucket for each layer


def exchange_s(layer: int) -> float:
    """Two workers send each other the whole of it."""
    return LATENCY + NBYTES[layer] / BANDWIDTH


FIRST, LAST = exchange_s(0), exchange_s(1)


def test_in_sequence_all_communication_is_exposed():
    run = train_in_sequence(scheduling=LAYERS, **BASE)
    assert run.virtual_time_s == pytest.approx(STEPS * (1.0 + FIRST + LAST))


def test_the_exchange_of_the_last_layer_hides_behind_the_backward_of_the_first():
    """Its gradient is there at 0.2 + 0.5, that of the first layer at 1."""
    times = "given((0.1, 0.1), backward=(0.3, 0.5))"
    assert 0.7 + LAST < 1.0
    run = train(scheduling=LAYERS, layer_times=times, **BASE)
    assert run.virtual_time_s == pytest.approx(STEPS * (1.0 + FIRST))


def test_what_does_not_fit_behind_the_backward_is_exposed():
    """The last layer's gradient is there 0.1 s before the other, which waits for the NIC."""
    times = "given((0.1, 0.1), backward=(0.1, 0.7))"
    sent_s = 0.9 + NBYTES[1] / BANDWIDTH
    assert sent_s > 1.0
    run = train(scheduling=LAYERS, layer_times=times, **BASE)
    step = sent_s + FIRST
    assert run.virtual_time_s == pytest.approx(STEPS * step)


def test_the_next_forward_starts_when_its_first_layer_is_there():
    """Both gradients come at 1. The first layer is exchanged first; the exchange of the last one
    hides behind the forward pass of the first."""
    times = "given((0.3, 0.2), backward=(0.0, 0.5))"
    assert LAST < 0.3
    run = train(scheduling="priority(2080, credit=2080)", layer_times=times, **BASE)
    # After the last step nothing is left to hide behind.
    assert run.virtual_time_s == pytest.approx(STEPS * (1.0 + FIRST) + LAST)


def test_a_layer_of_the_next_forward_waits_for_its_own_parameters():
    """As above, but the forward pass of the first layer is over before the others are there."""
    times = "given((0.05, 0.45), backward=(0.0, 0.5))"
    assert LAST > 0.05
    run = train(scheduling="priority(2080, credit=2080)", layer_times=times, **BASE)
    between = 1.0 + FIRST + LAST - 0.05
    assert run.virtual_time_s == pytest.approx((STEPS - 1) * between + 1.0 + FIRST + LAST)


@pytest.mark.parametrize("scheduling", ["wfbp", "fusion", "mgwfbp", "priority"])
def test_without_a_network_to_wait_for_a_step_takes_its_gradient(scheduling):
    run = train(scheduling=scheduling, **{**BASE, "bandwidth": "1000Gbit", "latency": "0s"})
    assert run.virtual_time_s == pytest.approx(STEPS * 1.0, rel=1e-6)


@pytest.mark.parametrize("scheduling", [LAYERS, "fusion(400, first=100)"])
@pytest.mark.parametrize("bandwidth", ["100kbit", "1Mbit"])
def test_overlap_never_takes_longer_than_the_same_buckets_in_sequence(scheduling, bandwidth):
    settings = {**BASE, "scheduling": scheduling, "bandwidth": bandwidth}
    assert train(**settings).virtual_time_s <= train_in_sequence(**settings).virtual_time_s


@pytest.mark.parametrize(
    ("compression", "bandwidth"),
    [("identity", "20Mbit"), ("fp16", "20Mbit"), ("ef(topk(0.01))", "1Gbit")],
)
def test_schedules_by_prices_are_not_slower_than_wfbp(compression, bandwidth):
    """A large layer and small ones; coding is charged, and costs something per bucket."""
    settings = {
        "model": "mlp((128, 16, 16, 16, 16))",
        "compute": "fixed(0.004)",
        "compression": compression,
        "bandwidth": bandwidth,
    }
    wfbp, merged, first_first = (
        train(scheduling=scheduling, **settings).virtual_time_s
        for scheduling in ("wfbp", "mgwfbp", "priority")
    )
    assert max(merged, first_first) < 1.03 * wfbp
    if compression.startswith("ef"):
        assert merged < 0.9 * wfbp
