"""Simulated training: equal to plain PyTorch, repeatable, resumable, honest about bytes."""

import json

import pytest
import torch
from torch.nn.functional import cross_entropy

import gradwire
from gradwire import data
from gradwire.core.errors import GradwireWarning, NonFiniteError
from gradwire.core.key import Key
from gradwire.data.partition import Iid
from gradwire.data.sampler import Sampler
from gradwire.experiment.run.record import write_config
from gradwire.experiment.run.registries import MODELS
from gradwire.models.base import build_seeded
from sampling import cover, slow

QUICK = {"steps": 6, "batch_size": 8, "model": "mlp((16,))", "compute": "fixed(0.001)"}
METHODS = [
    {"compression": "identity"},
    {"compression": "fp16"},
    {"compression": "ef(sign)"},
    {"compression": "qsgd(bits=4)"},
    {"compression": "ef(topk(0.05) >> qsgd(bits=4))"},
    {"compression": "ef(randomk(0.05))"},
    {"synchronization": "localsgd(3)"},
    {"synchronization": "localsgd(2)", "compression": "ef(topk(0.1))"},
    {"architecture": "ring"},
    {"architecture": 'allreduce("scatter")', "compression": "ef(sign)"},
    {"scheduling": 'sequential("layer")', "compression": "ef(topk(0.1))"},
]
COVERED = cover((method, *method) for method in METHODS)  # in the quick run one of each setting


def state_bits(run: gradwire.Run) -> list[bytes]:
    return [replica.params.numpy().tobytes() for replica in run.replicas]


def test_one_worker_is_plain_pytorch():
    run = gradwire.simulate(
        workers=1,
        steps=50,
        batch_size=32,
        model="mlp",
        compute="fixed(0)",
        optimizer="sgd(0.1, momentum=0.9, weight_decay=0.001)",
        schedule="cosine(warmup=5)",
    )
    dataset = data.load("digits")
    model = MODELS.parse("mlp")
    module = build_seeded(model, dataset.input_shape, dataset.num_classes, 0)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, weight_decay=0.001)
    sampler = Sampler(dataset, Iid(), 1, 32, Key(0).child("data"))
    for step in range(50):
        indices = sampler.indices(0, step)
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * gradwire.experiment.run.registries.SCHEDULES.parse(
                "cosine(warmup=5)"
            ).factor(step, 50)
        optimizer.zero_grad()
        cross_entropy(module(dataset.inputs(indices)), dataset.targets(indices)).backward()
        optimizer.step()
    expected = torch.cat([p.detach().reshape(-1) for p in module.parameters()])
    torch.testing.assert_close(run.params, expected, rtol=0, atol=1e-6)


@pytest.mark.few
@pytest.mark.parametrize("architecture", ["allreduce", "ring"])
@pytest.mark.parametrize("workers", [2, 3, 5])
def test_n_workers_are_one_worker_with_the_whole_batch(workers, architecture):
    common = {**QUICK, "steps": 10, "optimizer": "sgd(0.1, momentum=0.9)"}
    many = gradwire.simulate(**common, workers=workers, architecture=architecture)
    one = gradwire.simulate(**{**common, "batch_size": 8 * workers}, workers=1)
    torch.testing.assert_close(many.params, one.params, rtol=0, atol=1e-6)


def test_localsgd_with_period_one_and_plain_sgd_is_bsp():
    bsp = gradwire.simulate(**QUICK)
    local = gradwire.simulate(**QUICK, synchronization="localsgd(1)")
    torch.testing.assert_close(local.params, bsp.params, rtol=0, atol=1e-6)


@pytest.mark.few
@pytest.mark.parametrize("steps", [7, 10, 16])
def test_localsgd_ends_in_an_agreement_that_was_paid_for(steps):
    run = gradwire.simulate(**{**QUICK, "steps": steps}, synchronization="localsgd(8)")
    assert all(torch.equal(replica.params, run.params) for replica in run.replicas)
    exchanges = -(-steps // 8)
    assert run.bytes_sent == exchanges * 2 * 3 * 4 * run.params.numel()


def test_between_agreements_localsgd_is_judged_by_the_last_one():
    first = gradwire.simulate(**{**QUICK, "steps": 8}, synchronization="localsgd(8)")
    later = gradwire.simulate(**{**QUICK, "steps": 16}, synchronization="localsgd(8)", eval_every=4)
    tested = {row["step"]: row["test_loss"] for row in later.metrics}
    assert tested[8] == tested[12] == first.metrics[-1]["test_loss"] != tested[16]


UNBIASED = [
    slow('qsgd(1, norm="l2")'),
    slow('qsgd(7, norm="l2")'),
    "randomk(0.3, unbiased=True) >> qsgd(7)",
]


@pytest.mark.slow
@pytest.mark.parametrize("compression", UNBIASED)
def test_unbiased_codecs_train_on_both_roads(compression):
    common = {
        "steps": 60,
        "model": "mlp((64,))",
        "compute": "fixed(0)",
        "compression": compression,
    }
    for route in ("gather", "scatter"):
        run = gradwire.simulate(**common, architecture=f'allreduce("{route}")')
        assert run.accuracy > 0.6, route


def test_feedback_over_a_codec_that_does_not_contract_is_warned_about():
    with pytest.warns(gradwire.core.errors.GradwireWarning, match="omega"):
        gradwire.simulate(**QUICK, compression='ef(qsgd(1, norm="l2"))')


def test_localsgd_sends_an_eighth_of_what_bsp_sends():
    common = {**QUICK, "steps": 16}
    bsp = gradwire.simulate(**common)
    local = gradwire.simulate(**common, synchronization="localsgd(8)")
    assert bsp.bytes_sent == 8 * local.bytes_sent


@pytest.mark.few
@pytest.mark.parametrize("method", COVERED, ids=lambda m: " ".join(m.values()))
def test_the_same_config_gives_the_same_bits(method):
    first, second = (gradwire.simulate(**QUICK, **method) for _ in range(2))
    assert state_bits(first) == state_bits(second)
    assert first.metrics == second.metrics
    assert first.bytes_sent == second.bytes_sent > 0


@pytest.mark.few(2)
@pytest.mark.parametrize("method", COVERED, ids=lambda m: " ".join(m.values()))
def test_an_interrupted_run_ends_in_the_same_bits(method, tmp_path):
    settings = {
        **QUICK,
        **method,
        "steps": 7,
        "eval_every": 2,
        "optimizer": "sgd(0.1, momentum=0.9)",
        "what_if": ("10Gbit",),
        "compute": "lognormal(0.001)",
    }
    whole = gradwire.simulate(**settings, out=tmp_path / "whole")

    def interrupt(row, steps):
        if row["step"] == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        gradwire.simulate(**settings, out=tmp_path / "cut", progress=interrupt)
    assert not (tmp_path / "cut" / "summary.json").exists()
    resumed = gradwire.resume(tmp_path / "cut")
    assert state_bits(resumed) == state_bits(whole)
    assert resumed.metrics == whole.metrics
    assert resumed.ledger.snapshot() == whole.ledger.snapshot()
    metrics = [(tmp_path / name / "metrics.jsonl").read_text() for name in ("whole", "cut")]
    assert metrics[0] == metrics[1]


@pytest.mark.parametrize("synchronization", ["bsp", slow("asp")])
def test_a_finished_run_is_left_as_it_is(tmp_path, synchronization):
    method = {"architecture": "parameter_server", "synchronization": synchronization}
    whole = gradwire.simulate(**{**QUICK, **method}, out=tmp_path)
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_bytes(metrics.read_bytes() + b"more")  # a change of the user's
    before = {
        path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in tmp_path.iterdir()
    }
    said: list[str] = []
    again = gradwire.resume(tmp_path, say=said.append)
    after = {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in tmp_path.iterdir()}
    assert after == before
    assert said[0] == f"{tmp_path} holds a run that had finished: its files stay as they are"
    assert said[-1] == f"{metrics} was changed or damaged since the run ended"
    assert torch.equal(again.params, whole.params)
    assert again.metrics == whole.metrics
    assert again.accuracy == whole.accuracy
    with pytest.warns(GradwireWarning, match="had finished"):
        gradwire.resume(tmp_path)


@pytest.mark.few
@pytest.mark.parametrize("content", [b"", b"garbage", None])
def test_a_damaged_checkpoint_is_named(tmp_path, content):
    gradwire.simulate(**QUICK, out=tmp_path)
    path = tmp_path / "checkpoint.pt"
    path.write_bytes(path.read_bytes()[:1000] if content is None else content)
    with pytest.raises(ValueError, match=r"checkpoint\.pt is damaged"):
        gradwire.resume(tmp_path)


def test_a_run_does_not_go_on_with_other_settings(tmp_path):
    gradwire.simulate(**QUICK, out=tmp_path)
    config = tmp_path / "config.toml"
    config.write_text(config.read_text().replace("workers = 4", "workers = 3"))
    with pytest.raises(ValueError, match=r"config\.toml was changed or damaged.*start a new run"):
        gradwire.resume(tmp_path)
    # The same settings with a checksum that fits, as from another run.
    with pytest.warns(GradwireWarning, match="checksum does not fit"):
        changed = gradwire.Config.from_toml(config)
    write_config(config, changed)
    with pytest.raises(ValueError, match="not the configuration this run was started with"):
        gradwire.resume(tmp_path)


def test_a_row_of_metrics_cut_off_by_a_crash_is_dropped(tmp_path):
    settings = {**QUICK, "eval_every": 2}
    whole = gradwire.simulate(**settings, out=tmp_path)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "tes')
    (tmp_path / "summary.json").unlink()
    assert gradwire.resume(tmp_path).metrics == whole.metrics


def test_records_hold_config_metrics_and_summary(tmp_path):
    run = gradwire.simulate(**QUICK, out=tmp_path, eval_every=3)
    assert gradwire.Config.from_toml(tmp_path / "config.toml") == run.config
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rows == run.metrics
    assert [row["step"] for row in rows] == [3, 6]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["bytes_sent"] == run.bytes_sent == run.metrics[-1]["bytes_sent"]
    assert summary["virtual_time_s"] == run.virtual_time_s
    assert sum(map(sum, summary["bytes_by_link"])) == sum(summary["bytes_by_tensor"].values())


def test_a_folder_that_holds_a_run_is_not_overwritten(tmp_path):
    gradwire.simulate(**QUICK, out=tmp_path)
    with pytest.raises(ValueError, match="already holds a run"):
        gradwire.simulate(**QUICK, out=tmp_path)


def test_bytes_are_those_of_the_vectors_exchanged():
    run = gradwire.simulate(**QUICK, workers=4)
    d = run.params.numel()
    # Every step each rank sends 3/4 of the vector to its owners, then its quarter to three.
    assert run.bytes_sent == 6 * 2 * 3 * 4 * d


@pytest.mark.few
@pytest.mark.parametrize("method", COVERED, ids=lambda m: " ".join(m.values()))
def test_what_if_equals_a_run_on_that_network(method):
    there = gradwire.simulate(**QUICK, **method, bandwidth="100Mbit")
    here = gradwire.simulate(**QUICK, **method, bandwidth="10Gbit", what_if=("100Mbit",))
    assert here.summary["virtual_times_s"]["100Mbit"] == there.virtual_time_s
    assert there.virtual_time_s > here.virtual_time_s


def test_layerwise_exchange_names_each_tensor_in_the_ledger():
    run = gradwire.simulate(**QUICK, scheduling='sequential("layer")', compression="fp16")
    names = [name for name, *_ in run_layout(run)]
    assert list(run.ledger.tensor_bytes) == names
    sizes = {name: stop - start for name, start, stop, _ in run_layout(run)}
    assert run.ledger.tensor_bytes == {n: 6 * 2 * 3 * 2 * size for n, size in sizes.items()}


def run_layout(run: gradwire.Run):
    dataset = data.load("digits")
    module = build_seeded(MODELS.parse(run.config.model), dataset.input_shape, 10, 0)
    return gradwire.training.flat.FlatLayout.of(module).tensors


@pytest.mark.slow
def test_compression_costs_little_accuracy_and_saves_bytes():
    settings = {"steps": 200, "batch_size": 16, "optimizer": "sgd(0.2)", "compute": "fixed(0)"}
    dense = gradwire.simulate(**settings)
    assert dense.accuracy > 0.95
    sparse = gradwire.simulate(**settings, compression="ef(topk(0.05))")
    assert sparse.accuracy > dense.accuracy - 0.03
    assert dense.bytes_sent > 8 * sparse.bytes_sent


def test_a_gradient_that_is_not_finite_names_tensor_rank_and_step():
    with pytest.raises(NonFiniteError, match=r"of \S*weight on rank \d in step \d+") as caught:
        gradwire.simulate(**{**QUICK, "steps": 200}, optimizer="sgd(1e30)")
    assert "rank" in caught.value.__notes__[0]


def test_skipping_drops_the_step_on_every_worker():
    settings = {**QUICK, "steps": 20, "optimizer": "sgd(1e30)", "nonfinite": "skip"}
    run = gradwire.simulate(**settings)
    assert all(torch.equal(r.params, run.replicas[0].params) for r in run.replicas)
    assert torch.isfinite(run.params).all()
    assert run.summary["dropped_steps"] > 0
    assert {replica.num_dropped for replica in run.replicas} == {run.summary["dropped_steps"]}


def test_slow_workers_hold_up_everyone():
    quick = gradwire.simulate(**QUICK)
    slow = gradwire.simulate(**QUICK, speeds="1,1,1,0.5")
    always = gradwire.simulate(**QUICK, stragglers="always((3,), slowdown=2.0)")
    # Six gradients take a millisecond longer each; what waits for them overlaps a little.
    extra = slow.virtual_time_s - quick.virtual_time_s
    assert 0.9 * 0.006 < extra <= 0.006
    assert always.virtual_time_s == pytest.approx(slow.virtual_time_s)
    assert state_bits(slow) == state_bits(quick)


@pytest.mark.few
@pytest.mark.parametrize("compression", ["identity", "ef(sign)", "powersgd(2)"])
def test_coding_is_charged_unless_it_is_free(compression):
    runs = {
        coding: gradwire.simulate(**QUICK, compression=compression, coding=coding)
        for coding in ("free", "measured", "model")
    }
    default = gradwire.simulate(**QUICK, compression=compression)
    assert default.virtual_time_s == runs["model"].virtual_time_s
    assert runs["model"].virtual_time_s > runs["free"].virtual_time_s
    assert runs["measured"].virtual_time_s > runs["free"].virtual_time_s
    assert all(state_bits(run) == state_bits(default) for run in runs.values())
    assert len({run.bytes_sent for run in runs.values()}) == 1


def test_threads_do_not_change_draws():
    one = gradwire.simulate(**QUICK, compression="qsgd(bits=2)", threads=1)
    two = gradwire.simulate(**QUICK, compression="qsgd(bits=2)", threads=2)
    torch.testing.assert_close(one.params, two.params, rtol=0, atol=1e-6)
    assert one.bytes_sent == two.bytes_sent


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"compression": "topkk(0.1)"}, "Did you mean topk"),
        ({"data": "digitz"}, "digits"),
        ({"model": "mpl"}, "mlp"),
        ({"workers": 0}, "workers must be at least 1"),
        ({"bandwidth": "fast"}, "10Gbit"),
        ({"bandwidth": "1Gbit,2Gbit"}, "2 values for 4 nodes"),
        ({"latency": "soon"}, "50us"),
        ({"speeds": "1,2,x,4"}, "speeds"),
        ({"speeds": "0"}, "above 0"),
        ({"epochs": -1.0}, "epochs must be above 0"),
        ({"colour": 3}, "unknown setting 'colour'"),
        ({"workers": "four"}, "workers must be a whole number"),
        ({"batch_size": 10_000}, "smaller batch"),
        ({"optimizer": "sgd"}, "sgd needs lr"),
        ({"device": "toaster"}, "device 'toaster' cannot be used"),
        ({"nonfinite": "ignore"}, "unknown nonfinite 'ignore'"),
        ({"what_if": (1,)}, "what_if must be strings"),
        ({"clip_norm": float("inf")}, "clip_norm must be a finite number"),
        ({"threads": 10**6}, "threads must be at most"),
        ({"stragglers": "always((9,))"}, "ranks are 0 .. 3"),
        ({"compression": "ef(ef(sign))"}, "one is enough"),
    ],
)
def test_bad_settings_say_what_to_do(settings, message):
    with pytest.raises(ValueError, match=message):
        gradwire.simulate(**settings)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("synchronization", "architecture"),
    [
        ("bsp", "parameter_server(2)"),
        ("localsgd(4)", "gossip(ring)"),
        ("localsgd(4)", "gossip(ring, gradient_tracking)"),
        ("bsp", "gossip(ring, choco(0.3))"),
        ("asp", "parameter_server"),
        ("asp", "gossip(ring, adpsgd)"),
        ("fedavg(0.5)", "parameter_server"),
        ("diloco(4, fragments=2, delay=1)", "allreduce"),
    ],
)
def test_looking_changes_nothing(synchronization, architecture) -> None:
    """How often the model is evaluated is of no consequence for model, bytes or time."""
    often, once = (
        gradwire.simulate(
            workers=4,
            steps=10,
            batch_size=16,
            synchronization=synchronization,
            architecture=architecture,
            scheduling='sequential("layer")',
            compute="lognormal(0.01)",
            evaluation="sequential",
            eval_every=every,
            threads=1,
        )
        for every in (1, 10)
    )
    assert torch.equal(often.params, once.params)
    assert often.ledger.link_bytes == once.ledger.link_bytes
    assert often.virtual_time_s == once.virtual_time_s
