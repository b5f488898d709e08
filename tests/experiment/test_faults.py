"""Workers that crash, come back and come late, and lost messages, in whole runs on digits."""

import json

import pytest
import torch

from gradwire.core.errors import StoppedError
from gradwire.experiment.run.config import Config
from gradwire.experiment.run.setup import prepare
from gradwire.experiment.simulate.losses import lost_with
from gradwire.experiment.simulate.simulation import Run, resume, simulate
from gradwire.training.pushes import PushAssembly
from gradwire.training.task import Task

COMMON = {
    "workers": 4,
    "steps": 24,
    "batch_size": 16,
    "optimizer": "sgd(0.1)",
    "compute": "lognormal(0.01)",
    "eval_every": 6,
    "heartbeat": "30ms",
    "evaluation": "sequential",
    "threads": 1,
}
CRASH = "crash(2, at=0.1)"
BACK = "crash(2, at=0.1, rejoin=0.16)"
SURVIVE = [
    ("ssp(2)", "parameter_server"),
    ("asp", "parameter_server(2)"),
    ("r2sp", "parameter_server"),
    ("bsp(backup=1)", "parameter_server"),
    ("bsp(timeout=0.05)", "parameter_server"),
    ("bsp", "gossip(ring)"),
    ("localsgd(3)", "gossip(complete)"),
    ("bsp", "gossip(ring, choco(0.3))"),
    ("asp", "gossip(ring, adpsgd)"),
]
STOP = [
    ("bsp", "allreduce"),
    ("bsp", "ring"),
    ("bsp", "parameter_server"),
    ("bsp", 'parameter_server(2, optimizer="server")'),
    ("localsgd(4)", "allreduce"),
]


def run(synchronization: str, architecture: str, *faults: str, **settings) -> Run:
    return simulate(
        synchronization=synchronization,
        architecture=architecture,
        faults=faults,
        **COMMON | settings,
    )


def gradients(result: Run) -> list[int]:
    return [replica.num_gradients for replica in result.replicas]


@pytest.mark.parametrize(("synchronization", "architecture"), STOP)
def test_who_needs_all_workers_stops_with_a_report(synchronization, architecture) -> None:
    with pytest.raises(StoppedError) as stopped:
        run(synchronization, architecture, CRASH)
    text = str(stopped.value)
    assert "rank 2 crashed at 0.1 s, which was noticed at 0.13 s" in text
    assert f"on {architecture} stopped in step" in text
    assert "of 24" in text
    assert "bsp(backup=1)" in text
    assert "Worker 2 crashed at 0.1 s and owed nothing" in text


@pytest.mark.few(3)
@pytest.mark.parametrize(("synchronization", "architecture"), SURVIVE)
def test_others_go_on_without_it(synchronization, architecture) -> None:
    result = run(synchronization, architecture, CRASH)
    taken = gradients(result)
    assert taken[2] < 15
    assert sum(taken[rank] >= 20 for rank in (0, 1, 3)) >= 2
    assert [lost["rank"] for lost in result.summary["lost"]] == [2]
    assert result.accuracy > 0.2
    assert result.summary["gradients"] == sum(taken)


@pytest.mark.few(2)
@pytest.mark.parametrize(("synchronization", "architecture"), SURVIVE)
def test_a_worker_that_comes_back_has_the_model_and_trains(synchronization, architecture) -> None:
    without = run(synchronization, architecture, CRASH)
    result = run(synchronization, architecture, BACK)
    assert result.replicas[2].num_gradients > 0
    before = gradients(without)[2]
    assert result.summary["gradients"] == sum(gradients(result)) + before
    others = torch.stack([result.replicas[rank].params for rank in (0, 1, 3)]).mean(dim=0)
    initial = prepare(Config(**COMMON)).plan.task.initial_params()
    # It is near the others, not near where all began.
    mine = result.replicas[2].params
    assert torch.dist(mine, others) < 0.5 * torch.dist(initial, others)


@pytest.mark.parametrize(("synchronization", "architecture"), SURVIVE[:3] + SURVIVE[5:6])
def test_a_worker_may_come_late(synchronization, architecture) -> None:
    result = run(synchronization, architecture, "arrive(1, at=0.1)")
    assert 0 < result.replicas[1].num_gradients < 24
    assert result.replicas[0].num_gradients == 24
    assert result.summary["lost"] == []


def test_what_feedback_owed_is_reported_as_lost() -> None:
    settings = {**COMMON, "synchronization": "asp", "architecture": "parameter_server"}
    result = simulate(compression="ef(topk(0.01))", faults=(CRASH,), **settings)
    plan = prepare(Config(compression="ef(topk(0.01))", **settings)).plan
    (lost,) = result.summary["lost"]
    assert lost["time_s"] == 0.1
    residual = result.replicas[2].exchange[0]["residual"].double()
    assert lost["residual_norm"] == pytest.approx(float(residual.norm()))
    assert lost["residual_norm"] > 0.01
    assert lost["residual_sum"] == pytest.approx(float(residual.sum()))
    assert lost_with(plan, result.replicas[2]).items() <= lost.items()


def test_lost_messages_cost_bytes_and_time_and_nothing_else() -> None:
    well = run("bsp", "allreduce")
    ill = run("bsp", "allreduce", "loss(0.05, timeout=0.02)")
    assert torch.equal(well.params, ill.params)
    assert 1.02 < ill.bytes_sent / well.bytes_sent < 1.1
    assert ill.virtual_time_s > well.virtual_time_s


def test_an_asynchronous_run_that_was_interrupted_ends_in_the_same_bits(tmp_path) -> None:
    settings = {**COMMON, "synchronization": "asp", "architecture": "parameter_server"}
    whole = simulate(out=tmp_path / "whole", **settings)

    def interrupt(row, steps) -> None:
        if row["step"] == 12:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        simulate(out=tmp_path / "cut", progress=interrupt, **settings)
    resumed = resume(tmp_path / "cut")
    assert torch.equal(whole.params, resumed.params)
    rows = [(tmp_path / name / "metrics.jsonl").read_text() for name in ("whole", "cut")]
    assert rows[0] == rows[1]
    assert len(rows[0].splitlines()) == 4
    staleness = json.loads((tmp_path / "cut" / "summary.json").read_text())["noted"]["staleness"]
    assert 0 < staleness["mean"] <= staleness["max"]


@pytest.mark.few
@pytest.mark.parametrize("synchronization", ["bsp", "localsgd(3)", "fedavg(0.5)"])
def test_a_run_on_servers_resumes_to_the_same_bits(tmp_path, synchronization) -> None:
    settings = {
        **COMMON,
        "synchronization": synchronization,
        "architecture": 'parameter_server(2, answers="compressed")',
        "compression": "ef(topk(0.1))",
    }
    whole = simulate(**settings)

    def interrupt(row, steps) -> None:
        if row["step"] == 12:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        simulate(out=tmp_path / "cut", progress=interrupt, **settings)
    resumed = resume(tmp_path / "cut")
    assert torch.equal(whole.params, resumed.params)
    assert whole.ledger.link_bytes == resumed.ledger.link_bytes
    assert whole.virtual_time_s == resumed.virtual_time_s


@pytest.mark.few
@pytest.mark.parametrize("compression", ["identity", "ef(topk(0.05))", "signvote"])
def test_a_run_on_servers_tells_its_time_on_other_networks(compression) -> None:
    run = simulate(
        architecture="parameter_server(2)",
        compression=compression,
        what_if=("100Mbit",),
        **COMMON,
    )
    slow = simulate(
        architecture="parameter_server(2)",
        compression=compression,
        bandwidth="100Mbit",
        **COMMON,
    )
    assert run.summary["virtual_times_s"]["100Mbit"] == pytest.approx(slow.virtual_time_s)


def test_what_depends_on_the_network_cannot_be_told_for_others() -> None:
    with pytest.raises(ValueError, match="run it once for each bandwidth"):
        run("asp", "parameter_server", what_if=("100Mbit",))


def test_what_choco_had_not_told_is_reported_as_lost() -> None:
    settings = {**COMMON, "architecture": "gossip(ring, choco(0.3))"}
    result = simulate(compression="topk(0.01)", faults=(CRASH,), **settings)
    (lost,) = result.summary["lost"]
    replica = result.replicas[2]
    untold = (replica.params - replica.memory["estimate"]).double()
    assert lost["residual_norm"] == pytest.approx(float(untold.norm()))
    assert lost["residual_norm"] > 0.01


def test_all_workers_may_crash() -> None:
    crashes = [f"crash({rank}, at=0.1)" for rank in range(4)]
    with pytest.raises(StoppedError, match=r"all workers crashed.*No worker is left"):
        run("asp", "parameter_server", *crashes)


def test_a_run_that_stops_says_so_in_its_record(tmp_path) -> None:
    with pytest.raises(StoppedError):
        simulate(compression="ef(topk(0.01))", faults=(CRASH,), out=tmp_path / "run", **COMMON)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert "Worker 2 crashed at 0.1 s with what it had still to send, of norm" in summary["stopped"]
    assert summary["lost"][0]["residual_norm"] > 0


def test_what_fedavg_ends_with_is_measured_after_its_last_round() -> None:
    well = run("fedavg(0.5)", "parameter_server")
    watched = run("fedavg(0.5)", "parameter_server", "crash(0, at=500)")
    assert torch.equal(well.params, watched.params)
    assert well.accuracy == watched.accuracy
    steps = [row["step"] for row in watched.metrics]
    assert steps == sorted(steps)
    assert steps[-1] == 24


def test_time_on_other_networks_knows_of_lost_messages() -> None:
    result = run("bsp", "allreduce", "loss(0.05)", what_if=("1Gbit", "100Mbit"))
    times = result.summary["virtual_times_s"]
    assert times["1Gbit"] == pytest.approx(result.virtual_time_s)
    assert times["100Mbit"] > times["1Gbit"]


@pytest.mark.parametrize("fault", ["arrive(1, at=0.1)", BACK])
def test_who_needs_all_refuses_comings_before_the_run(tmp_path, fault) -> None:
    with pytest.raises(ValueError, match="needs all workers from beginning to end"):
        simulate(faults=(fault,), out=tmp_path / "run", **COMMON)
    assert not (tmp_path / "run").exists()


def test_staleness_is_measured_among_neighbours_too() -> None:
    staleness = run("asp", "gossip(ring, adpsgd)").summary["noted"]["staleness"]
    assert 0 < staleness["mean"] <= staleness["max"]


def test_uploads_are_counted() -> None:
    uploads = run("lag(0.5)", "parameter_server").summary["noted"]["uploads"]
    assert 0 < uploads["mean"] <= uploads["max"] <= 24


@pytest.mark.parametrize("at", [0.115, 0.135])  # before the answer to a push, and after it
def test_what_is_lost_is_what_was_computed_and_never_heard(monkeypatch, at) -> None:
    computed, heard = [], []
    gradients, add = Task.gradients, PushAssembly.add

    def evaluating(task, requests):
        results = gradients(task, requests)
        computed.extend(r.gradient for q, r in zip(requests, results) if q.key.rank == 2)
        return results

    async def adding(pushes, node, rank, header, data):
        push = await add(pushes, node, rank, header, data)
        if push is not None and rank == 2:
            heard.append(push.x)
        return push

    monkeypatch.setattr(Task, "gradients", evaluating)
    monkeypatch.setattr(PushAssembly, "add", adding)
    result = run(
        "asp",
        "parameter_server",
        f"crash(2, at={at})",
        compression="ef(topk(0.01))",
        compute="fixed(0.01)",
        latency="10ms",
    )
    taken = computed[: len(heard)]  # another may have been begun when it crashed
    owed = sum(g.double() for g in taken) - sum(x.double() for x in heard)
    (lost,) = result.summary["lost"]
    assert lost["residual_norm"] == pytest.approx(float(owed.norm()), rel=1e-4)
