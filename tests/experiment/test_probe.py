"""The probe, on networks that are known."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from gradwire.experiment.run.config import Config
from gradwire.experiment.studies.prediction import Probed
from gradwire.experiment.studies.probe import (
    Machine,
    NetworkMeasurement,
    measure_machine,
    measure_network,
    settings_of,
)
from gradwire.runtime.network.network import Network
from gradwire.runtime.virtual.compute_time import COMPUTE_TIME
from gradwire.runtime.virtual.engine import VirtualEngine
from gradwire.runtime.virtual.host import HOST, Cores
from runtime.process.launching import launch
from sampling import slow


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


@pytest.mark.slow
def test_the_command_writes_what_the_simulator_reads(tmp_path):
    """Two real ranks; how good the prediction is on a busy machine nobody can promise."""
    file = tmp_path / "network.toml"
    command = [sys.executable, "-m", "gradwire", "probe", "--workers", "2", "--steps", "12"]
    command += ["--methods", "identity", "--file", str(file), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    config = Config.from_toml(file)
    assert config.workers == 2
    assert config.coding == "measured"
    processor = found["processor"]  # both ranks are on this machine
    assert config.coding_slowdown == pytest.approx(processor["slowdown"], abs=1e-3)
    assert found["settings"] == {name: getattr(config, name) for name in found["settings"]}
    host = HOST.parse(config.host)
    assert isinstance(host, Cores)
    assert host.count == pytest.approx(processor["cores"], rel=1e-3)
    assert COMPUTE_TIME.parse(config.compute).seconds == pytest.approx(
        processor["gradient_s"], rel=1e-3
    )
    (prediction,) = found["predictions"]
    assert prediction["compression"] == "identity"
    assert prediction["predicted_s"] >= 0.99 * processor["gradient_s"]
    assert prediction["measured_s"] > 0
    error = prediction["predicted_s"] / prediction["measured_s"] - 1
    assert prediction["error"] == pytest.approx(error)


@pytest.mark.slow
def test_it_says_what_compute_is_made_of(tmp_path):
    """And measures only, if there is no method to compare; steps do not matter then."""
    file = tmp_path / "network.toml"
    command = [sys.executable, "-m", "gradwire", "probe", "--workers", "2", "--steps", "1"]
    command += ["--methods", "--file", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    assert "predicted" not in done.stdout
    said, written = " ".join(done.stdout.split()), file.read_text()
    config = Config.from_toml(file)
    assert f"is a gradient, in seconds of a core: {config.compute}" in said
    assert f"All share {config.host}" in said
    assert "compute is a gradient, in seconds of a core." in written


def test_it_says_what_compute_is_made_of_on_several_machines():
    machine = Machine((0.01, 0.02), 0.1, 1e-3, 0.003, 1.2)
    network = NetworkMeasurement((1e-3,) * 2, (1e6,) * 2, (1e6,) * 2)
    settings = settings_of(network, machine)
    written = Probed(network, machine, settings, []).to_toml()
    assert "compute is a gradient (20 ms) and the overhead of a step (3 ms) together." in written
    assert COMPUTE_TIME.parse(settings["compute"]).mean == pytest.approx(0.023)


STEPS = 8  # of which two do not count


def slow_at_first(rank: int, folder: Path) -> Any:
    """On every rank: gradients and coding seem to take long, in the first steps very long."""
    from gradwire.experiment.processes.node.run import NodeRun
    from gradwire.experiment.studies.prediction import probe

    step_finished = NodeRun.step_finished

    def late(self: Any, rank: int, step: int, *others: Any) -> None:
        seconds = 1000.0 if step < STEPS // 4 else 100.0 * (rank + 1)
        self.engine.compute_s += seconds
        self.engine.call_s["late"] += 2 * seconds
        step_finished(self, rank, step, *others)

    found = []
    with patch.object(NodeRun, "step_finished", late):
        for settings in ({}, {"architecture": "gossip(ring, adpsgd)", "synchronization": "asp"}):
            config = Config(model="mlp((8,))", workers=2, threads=1, **settings)
            (prediction,) = probe(config, ["identity"], STEPS, lambda text: None).predictions
            found.append((prediction.compute_s, prediction.coding_s))
    return found


@pytest.mark.slow
def test_gradients_and_coding_are_of_the_steps_that_count(tmp_path):
    codes, results = launch(tmp_path, 2, f"experiment.test_probe:{slow_at_first.__name__}")
    assert codes == [0, 0]
    for result in results:  # mean of both ranks, whether workers pause or not
        assert result == [pytest.approx((150.0, 300.0), rel=0.05)] * 2


@pytest.mark.slow
@pytest.mark.parametrize("steps", [slow("1"), "3"])
def test_too_few_steps_are_refused_before_anything_starts(steps):
    command = [sys.executable, "-m", "gradwire", "probe", "--workers", "2", "--steps", steps]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: steps must be at least 4, got {steps}")


@pytest.mark.slow
def test_one_rank_has_no_network():
    done = subprocess.run(
        [sys.executable, "-m", "gradwire", "probe", "--workers", "1"],
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 2
    assert "no network with one worker" in done.stderr
