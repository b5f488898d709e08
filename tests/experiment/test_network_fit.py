"""What the probe measures of the processor, and the network that it finds from it."""

from functools import partial

import pytest

from gradwire.experiment.run.config import Config
from gradwire.experiment.studies.network_fit import calibrate, settings_on_cores
from gradwire.experiment.studies.processor import (
    LONG,
    MANY,
    PAIR_REPEATS,
    PAIRS,
    SHORT,
    Messages,
    Processor,
    Works,
    average,
    layer_shares,
    measure_processor,
    pair_row,
    step_row,
)
from gradwire.runtime.network.network import Network
from gradwire.runtime.virtual.engine import VirtualEngine
from gradwire.runtime.virtual.host import HOST, Cores
from gradwire.runtime.virtual.sharing import SharedEngine

SIZE, GRADIENT_S = 4, 0.005
HOST_ = Cores(
    2.0,
    send=(1e-4, 2e-9),
    receive=(5e-5, 1e-9),
    transfer=(1e-4, 1e-9),
    wake=(2e-5, 1e-4),
)


def measured_on(network: Network) -> Processor:
    """What a perfect probe would find there."""

    async def gradient(node):
        await node.compute(None)

    def run(program) -> float:
        engine = SharedEngine(
            HOST_,
            network,
            evaluate=lambda requests: requests,
            seconds=lambda rank, request: GRADIENT_S,
        )
        return engine.run([program] * SIZE)[0]

    def messages(nbytes: int, wakes: float) -> Messages:
        costs = [
            fixed_s + wake_s * wakes + per_byte * ends * nbytes
            for (fixed_s, per_byte), wake_s, ends in (
                (HOST_.send, 0.0, 1),
                (HOST_.receive, HOST_.wake[0], 1),
                (HOST_.transfer, HOST_.wake[1], 2),
            )
        ]
        return Messages(*costs, run(partial(step_row, nbytes=nbytes, repeats=6, gradient=gradient)))

    pairs_s = [run(partial(pair_row, nbytes=nbytes, repeats=PAIR_REPEATS)) for nbytes in PAIRS]
    return Processor(
        2.0,
        2.0,
        GRADIENT_S,
        (0.003, 0.004, 0.006),
        1.5,
        messages(SHORT, 1.0),
        messages(SHORT, 0.0),
        messages(LONG, 1.0),
        tuple(pairs_s),
    )


@pytest.mark.parametrize(
    ("bandwidth", "latency_s", "burst"),
    [(12.5e6, 1e-3, 65_536), (12.5e6, 2e-3, 0), (125e6, 1e-3, 65_536)],
)
def test_it_finds_the_network_for_which_the_simulator_needs_as_long(bandwidth, latency_s, burst):
    network = Network((latency_s,) * SIZE, (bandwidth,) * SIZE, burst=burst)
    found = calibrate(measured_on(network), SIZE)
    assert found.host.send == pytest.approx(HOST_.send, rel=0.01)
    assert found.host.receive == pytest.approx(HOST_.receive, rel=0.01)
    assert found.host.transfer == pytest.approx(HOST_.transfer, rel=0.01)
    assert found.host.wake == pytest.approx(HOST_.wake, rel=0.01)
    assert found.latency_s == pytest.approx(latency_s, rel=0.05, abs=1e-5)
    assert found.bandwidth == pytest.approx(bandwidth, rel=0.03)
    assert found.burst == pytest.approx(burst, rel=0.05, abs=2000)


def test_settings_are_those_of_the_simulator():
    processor = measured_on(Network((1e-3,) * SIZE, (12.5e6,) * SIZE))
    found = calibrate(processor, SIZE)
    for overlaps, compute in ((False, "fixed(0.005)"), (True, "fixed(0.006)")):
        settings = settings_on_cores(processor, found, SIZE, overlaps)
        config = Config.from_dict(settings)
        assert config.compute == compute
        assert HOST.parse(config.host) == found.host
        assert config.layer_times.startswith("given((")


def test_times_of_layers_add_up():
    forward, backward = layer_shares((0.003, 0.004, 0.006))
    assert sum(forward) + backward[-1] == pytest.approx(0.003)
    assert backward[:2] == pytest.approx((0.002, 0.001))


def test_two_measurements_have_a_mean():
    one = measured_on(Network((1e-3,) * SIZE, (12.5e6,) * SIZE))
    assert average(one, one) == one


def test_the_program_measures_gradients_and_coding():
    """On the simulator, where processor time is taken to be virtual time: messages cost none."""
    engine = VirtualEngine(Network.uniform(3, "100Mbit", "1ms"))

    async def gradient(node):
        await node.sleep(0.01)

    async def layers(node, on_layer):
        for seconds in (0.004, 0.002, 0.006):
            await node.sleep(seconds)
            on_layer()

    async def coding(node):
        await node.sleep(0.002)

    def clocks():
        return engine.time_s, engine.time_s

    works = Works(gradient, layers, coding)
    program = partial(measure_processor, works=works, seconds=0.1, clocks=clocks)
    results = engine.run([program] * 3)
    assert results[0] == results[1] == results[2]
    found = results[0]
    assert found.cores == pytest.approx(3.0, rel=0.01)
    assert found.gradient_s == pytest.approx(0.01)
    assert found.layers_s == pytest.approx((0.004, 0.006, 0.012))
    assert found.slowdown == pytest.approx(1.0)
    assert found.short.send_s == found.short.transfer_s == 0.0
    # Of the clock: a gradient, and an exchange of all with all.
    assert found.short.step_s == pytest.approx(0.01 + 0.001, rel=0.01)
    assert found.many.step_s == pytest.approx(0.01 + 0.001, rel=0.05)
    assert found.pairs_s == pytest.approx([0.001 + nbytes / 12.5e6 for nbytes in PAIRS], rel=0.01)
    assert MANY > 1
