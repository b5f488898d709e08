"""The probe, on networks that are known."""

import pytest

from gradwire.experiment.probe import measure_network
from gradwire.runtime.network import Network
from gradwire.runtime.virtual import VirtualEngine


def probe(network: Network):
    engine = VirtualEngine(network)
    results = engine.run([lambda node: measure_network(node, 1_000_000)] * network.size)
    assert all(result == results[0] for result in results)
    return results[0]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_it_finds_the_network_it_runs_on(size):
    network = Network.uniform(size, "100Mbit", "2ms")
    measured = probe(network)
    assert measured.latency_s == pytest.approx(network.latency_s, rel=0.01)
    assert measured.bandwidth == pytest.approx(network.bandwidth, rel=0.01)
    assert measured.alone == pytest.approx(network.bandwidth, rel=0.01)


def test_it_finds_the_slow_card():
    network = Network.parse(3, "100Mbit,100Mbit,10Mbit", "1ms")
    measured = probe(network)
    assert measured.alone == pytest.approx(network.bandwidth, rel=0.01)
    assert measured.bandwidth == pytest.approx(network.bandwidth, rel=0.01)
