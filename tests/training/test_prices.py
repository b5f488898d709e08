"""What exchanges cost: measured with the compression of a plan, and used between measured sizes."""

import pytest

from gradwire.core.profile import Price, Profile
from gradwire.core.replica import Bucket
from gradwire.experiment.run.config import Config
from gradwire.experiment.run.setup import prepare, simulated_prices
from gradwire.runtime.virtual.host import HOST
from gradwire.training.prices import priced_numels

BANDWIDTH = 1.25e6  # bytes per second: 10 Mbit/s
LATENCY = 1e-3
WORKERS = 4
SETTINGS = {
    "data": "digits",
    "model": "mlp((512,))",  # 38,410 parameters
    "workers": WORKERS,
    "steps": 2,
    "bandwidth": "10Mbit",
    "latency": "1ms",
    "compute": "fixed(0.001)",
    "scheduling": "wfbp",
    "threads": 1,
}


def prices(**settings):
    experiment = prepare(Config(**{**SETTINGS, "coding": "free", **settings}))
    return simulated_prices(experiment.plan, experiment.network, experiment.charge)


@pytest.mark.parametrize(("compression", "nbytes"), [("identity", 4), ("fp16", 2), ("bf16", 2)])
def test_an_exchange_costs_the_bytes_of_its_payload(compression, nbytes):
    """An all-reduce sends 2 (n - 1) / n vectors from each worker, in two phases."""
    last = prices(compression=compression)[-1]
    sent = 2 * (WORKERS - 1) / WORKERS * nbytes * last.numel
    assert last.busy_s == pytest.approx(sent / BANDWIDTH, rel=0.02)
    assert 2 * LATENCY < last.delay_s < 3 * LATENCY  # with what workers begin at other times


def test_payloads_that_are_gathered_go_to_all_others():
    """A sign takes a bit. Below 16,384 elements per worker payloads are not scattered."""
    first = next(price for price in prices(compression="ef(sign)") if price.numel > 16_000)
    sent = (WORKERS - 1) * first.numel / 8
    assert first.busy_s == pytest.approx(sent / BANDWIDTH, rel=0.02)
    dense = next(price for price in prices() if price.numel == first.numel)
    assert first.busy_s < dense.busy_s / 15


def test_coding_counts():
    """On a fast network an exchange takes what encoding and decoding take, however short it is."""
    fast = {"bandwidth": "1000Gbit", "latency": "0s", "compression": "ef(topk(0.01))"}
    free, charged = prices(**fast), prices(**fast, coding="model")
    assert all(price.busy_s < 1e-6 for price in free)
    assert all(price.busy_s > 1e-4 for price in charged)


@pytest.mark.parametrize("architecture", ["ring", "hierarchical(2)", "parameter_server(2)"])
@pytest.mark.parametrize("compression", ["identity", "ef(topk(0.1))", "ef(powersgd(2))"])
def test_every_architecture_has_prices(architecture, compression):
    found = prices(architecture=architecture, compression=compression)
    assert [price.numel for price in found] == priced_numels(38_410)
    assert found[-1].busy_s > found[0].busy_s


def test_servers_that_hold_the_model_have_prices():
    found = prices(architecture="parameter_server", synchronization="ssp(2)")
    # All vectors pass one card, to the server and back.
    assert found[-1].busy_s == pytest.approx(WORKERS * 4 * found[-1].numel / BANDWIDTH, rel=0.02)


def test_sizes_go_from_small_ones_to_the_whole_model():
    assert priced_numels(100) == [16, 25, 50, 100]
    assert priced_numels(100, factor=4) == [16, 25, 100]
    assert priced_numels(5) == [5]
    assert priced_numels(10**9)[-1] == 1 << 18


def test_between_measured_sizes_costs_are_in_proportion():
    layers = (Bucket("a", 0, 1000),)
    costs = (Price(10, 1.0, 4.0), Price(20, 3.0, 2.0), Price(40, 5.0, 2.0))
    profile = Profile(layers, (1.0,), (2.0,), prices=costs)
    assert [profile.exchange_s(numel) for numel in (1, 10, 15, 20, 30)] == [1, 1, 2, 3, 4]
    assert [profile.delay_s(numel) for numel in (1, 15, 30, 400)] == [4, 3, 2, 2]
    assert profile.exchange_s(60) == pytest.approx(7.0)  # as from 20 to 40
    cheaper = Profile(layers, (1.0,), (2.0,), prices=(Price(10, 3.0, 0.0), Price(20, 1.0, 0.0)))
    assert cheaper.exchange_s(15) == 2.0  # another route
    assert cheaper.exchange_s(60) == 1.0  # but no cost becomes negative


def test_methods_that_begin_in_another_way_have_prices():
    """onebit_adam sends signs after its warm-up, which must have come before."""
    settings = {"compression": "onebit_adam(sign, warmup=2)", "optimizer": "sgd(0.001)", "steps": 8}
    for scheduling in ("mgwfbp", "priority"):
        experiment = prepare(Config(**{**SETTINGS, **settings, "scheduling": scheduling}))
        assert experiment.config.scheduling.startswith(f"{scheduling}(")
    last = prices(**settings)[-1]
    assert last.busy_s < prices(compression="identity")[-1].busy_s / 4


def test_nodes_that_share_cores_pay_for_messages():
    host = "cores(2, send=(0.002, 1e-09), receive=(0.002, 1e-09))"
    experiment = prepare(Config(**{**SETTINGS, "coding": "free"}))
    plan, network, charge = experiment.plan, experiment.network, experiment.charge
    shared = simulated_prices(plan, network, charge, HOST.parse(host))
    alone = simulated_prices(plan, network, charge)
    assert shared[0].busy_s > alone[0].busy_s + 0.005  # 6 messages of 2 ms, on two cores
    own = {**SETTINGS, "host": host, "bandwidth": "1Gbit", "scheduling": "mgwfbp"}
    assert prepare(Config(**own)).config.scheduling == "mgwfbp(())"


def test_the_time_of_a_gradient_is_the_usual_one_of_the_slowest_worker():
    def total_s(**settings):
        return prepare(Config(**{**SETTINGS, **settings})).plan.profile.total_s

    straggling = {"compute": "fixed(0.005)", "stragglers": "sometimes(0.2, slowdown=20.0)"}
    assert [total_s(**straggling, seed=seed) for seed in range(3)] == [pytest.approx(0.005)] * 3
    for speeds in ("0.5,1,1,1", "1,1,1,0.5"):
        assert total_s(compute="fixed(0.005)", speeds=speeds) == pytest.approx(0.01)
