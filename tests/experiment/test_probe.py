"""The probe, on networks that are known."""

import json
import subprocess
import sys

import pytest

from gradwire.experiment.config import Config
from gradwire.experiment.probe import measure_machine, measure_network, settings_of
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


def test_it_tells_gradients_latency_and_overhead_apart():
    """On a network that is known, with gradients that take ranks a different time."""
    seconds = {0: 0.010, 1: 0.020}
    engine = VirtualEngine(Network.uniform(2, "100Mbit", "2ms"))

    async def gradient(node):
        await node.sleep(seconds[node.rank])

    async def coding(node):
        await node.sleep(0.001)

    async def program(node):
        return await measure_machine(node, gradient, coding, 5)

    machine, other = engine.run([program] * 2)
    assert machine == other
    assert machine.compute_s == pytest.approx((0.010, 0.020))
    assert machine.sigma == pytest.approx(0.0, abs=1e-9)
    assert machine.latency_s == pytest.approx(0.002, rel=0.05)
    assert machine.overhead_s == pytest.approx(0.0, abs=1e-4)
    assert machine.slowdown == 1.0
    settings = settings_of(probe(Network.uniform(2, "25Gbit", "2ms")), machine)
    assert settings["bandwidth"] == "25.00Gbit"
    assert settings["latency"] == "2000.0us" or settings["latency"].startswith("200")
    assert settings["speeds"] == "2,1"
    Config.from_dict(settings)


def test_the_command_writes_what_the_simulator_reads(tmp_path):
    """Two real ranks; how good the prediction is on a busy machine nobody can promise."""
    file = tmp_path / "network.toml"
    command = [sys.executable, "-m", "gradwire", "probe", "--workers", "2", "--steps", "12"]
    command += ["--methods", "identity", "--file", str(file), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    config = Config.from_toml(file)
    assert config.workers == 2
    assert config.charge_coding
    assert config.coding_slowdown == pytest.approx(found["machine"]["slowdown"], abs=1e-3)
    network = Network.parse(2, config.bandwidth, config.latency)
    assert network.bandwidth == pytest.approx(found["network"]["bandwidth"], rel=1e-3)
    latency_s = max(found["network"]["latency_s"][0], found["machine"]["latency_s"])
    assert network.latency_s[0] == pytest.approx(latency_s, abs=1e-7)
    (prediction,) = found["predictions"]
    assert prediction["compression"] == "identity"
    assert prediction["predicted_s"] >= max(found["network"]["latency_s"])
    assert prediction["measured_s"] > 0


def test_one_rank_has_no_network():
    done = subprocess.run(
        [sys.executable, "-m", "gradwire", "probe", "--workers", "1"],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 2
    assert "no network with one worker" in done.stderr
