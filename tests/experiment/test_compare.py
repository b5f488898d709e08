"""Comparisons: baselines always there, ratios of measured bytes, divergence is a result."""

from dataclasses import replace

import pytest

import gradwire
from gradwire.core.units import format_bytes
from gradwire.experiment.report.comparison import (
    comparison_figure,
    comparison_table,
    notes,
)
from gradwire.experiment.run.config import Config
from gradwire.experiment.studies.compare import (
    combinations,
    compare,
    folder_name,
    label,
    rows,
    with_baselines,
)
from sampling import slow

BASE = Config(steps=4, batch_size=8, model="mlp((16,))", compute="fixed(0.001)", eval_every=2)


def test_baselines_come_first_and_only_once():
    labels = with_baselines([replace(BASE, compression=c) for c in ("fp16", "ef(sign)")])
    assert list(labels.values()) == ["identity", "fp16", "ef(sign)"]


@pytest.mark.few
@pytest.mark.parametrize(
    ("synchronization", "architecture"),
    [
        ("asp", "gossip(ring, algorithm=adpsgd)"),  # no bsp
        ("bsp", "gossip(ring, algorithm=gradient_tracking)"),  # no fp16
        ("bsp", "gossip(exponential, algorithm=sgp)"),
    ],
)
def test_baselines_are_on_allreduce_where_the_architecture_refuses_them(
    synchronization, architecture
):
    method = replace(BASE, synchronization=synchronization, architecture=architecture)
    outcomes = compare([method])
    assert [outcome.label for outcome in outcomes] == [
        "identity, bsp, allreduce",
        "fp16, bsp, allreduce",
        label(method),
    ]
    fp32, fp16, own = (outcome.run for outcome in outcomes)
    assert {fp32.config.architecture, fp16.config.architecture} == {"allreduce"}
    row = rows(outcomes)[-1]
    assert row["ratio_fp32"] == fp32.bytes_sent / own.bytes_sent
    assert row["ratio_fp16"] == fp16.bytes_sent / own.bytes_sent


def test_ratios_are_to_the_baselines_and_to_no_other_uncompressed_method():
    methods = [replace(BASE, architecture=name) for name in ("parameter_server", "allreduce")]
    first, _, other = compared = rows(compare(methods))
    assert [row["method"] for row in compared] == [
        "parameter_server",
        "fp16, parameter_server",
        "identity",
    ]
    assert first["ratio_fp32"] == 1
    assert other["ratio_fp32"] > 1


def test_what_makes_no_sense_is_a_row_with_its_reason(tmp_path):
    methods = combinations(
        BASE,
        synchronization=("bsp", "asp", "ssp(2)"),
        architecture=("parameter_server", "allreduce"),
    )
    outcomes = compare(methods, tmp_path)
    table = rows(outcomes)
    assert [row["method"] for row in table if "failure" in row] == ["asp", "ssp(2)"]
    assert len([row for row in table if "failure" not in row]) == 5
    assert "refused" in list(comparison_table(table).columns[1].cells)
    assert any("asp refused: asp needs an architecture" in note for note in notes(table))


@pytest.mark.slow
def test_a_run_that_stops_is_a_row_with_its_reason():
    methods = combinations(
        replace(BASE, steps=8, compute="fixed(0.1)", faults=("crash(1, at=0.15)",)),
        synchronization=("bsp", "asp"),
        architecture=("parameter_server",),
    )
    fp32, fp16, asp = rows(compare(methods))
    assert fp32["failure"].startswith("stopped: bsp on parameter_server stopped in step")
    assert fp16["failure"].startswith("stopped: ")
    assert asp["ratio_fp32"] is None  # there is nothing to compare it with


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"compression": "bogus"}, "bogus"),
        ({"data": "nope"}, "nope"),
        ({"bandwidth": "abc"}, "bandwidth 'abc' is not understood"),
        ({"what_if": ("abc",)}, "bandwidth 'abc' is not understood"),
        ({"synchronization": "asp"}, "asp needs an architecture"),  # all of them
    ],
)
def test_what_concerns_everything_is_an_error_before_the_first_run(changes, message, monkeypatch):
    monkeypatch.setattr(
        "gradwire.experiment.studies.compare.simulate_given", lambda *_, **__: pytest.fail("ran")
    )
    with pytest.raises(ValueError, match=message):
        compare([replace(BASE, **changes)])


def test_folders_that_hold_something_are_left_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "gradwire.experiment.studies.compare.simulate_given", lambda *_, **__: pytest.fail("ran")
    )
    (tmp_path / "fp16").mkdir()
    (tmp_path / "fp16" / "config.toml").touch()
    with pytest.raises(ValueError, match="fp16 already holds a run"):
        compare([BASE], tmp_path)


def test_combinations_are_the_product_of_the_choices():
    configs = combinations(BASE, compression=("identity", "fp16"), synchronization=("bsp", "x"))
    assert [label(c) for c in configs] == ["identity", "x", "fp16", "fp16, x"]


def test_ratios_are_those_of_the_bytes_sent():
    methods = [
        replace(BASE, compression="ef( sign )"),
        replace(BASE, synchronization="localsgd(2)"),
    ]
    outcomes = compare(methods)
    table = {row["method"]: row for row in rows(outcomes)}
    assert list(table) == ["identity", "fp16", "ef(sign)", "localsgd(2)"]
    runs = {o.label: o.run for o in outcomes}
    for name, row in table.items():
        assert row["bytes_per_worker_step"] == runs[name].bytes_sent / (4 * 4)
        assert row["ratio_fp32"] == runs["identity"].bytes_sent / runs[name].bytes_sent
        assert row["ratio_fp16"] == runs["fp16"].bytes_sent / runs[name].bytes_sent
    assert table["fp16"]["ratio_fp32"] == 2
    assert table["localsgd(2)"]["ratio_fp32"] == 2


def test_a_measured_gradient_time_serves_all_methods():
    outcomes = compare([replace(BASE, compute="measured")])
    times = {outcome.run.config.compute for outcome in outcomes}
    assert len(times) == 1
    assert times.pop().startswith("fixed(")


def test_a_method_that_diverges_is_a_row_of_the_table(tmp_path):
    outcomes = compare([replace(BASE, steps=100, optimizer="sgd(1e30)")])
    table = rows(outcomes)
    assert all("diverged" in row["failure"] for row in table)
    comparison_table(table)
    comparison_figure(outcomes, tmp_path / "empty.png")
    assert (tmp_path / "empty.png").stat().st_size > 0


def test_what_ifs_are_columns(tmp_path):
    outcomes = compare([replace(BASE, what_if=("100Mbit",))])
    table = rows(outcomes)
    assert list(table[0]["virtual_times_s"]) == ["1Gbit", "100Mbit"]
    headers = [column.header for column in comparison_table(table).columns]
    assert headers[-1] == "time at\n100Mbit"
    comparison_figure(outcomes, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("synchronization", "architecture"),
    [("asp", "parameter_server"), slow("bsp", 'parameter_server(optimizer="server")')],
)
def test_what_depends_on_the_network_runs_once_for_each(synchronization, architecture, tmp_path):
    method = replace(BASE, synchronization=synchronization, architecture=architecture)
    outcomes = compare([replace(method, what_if=("1Gbit", "10Mbit"))], tmp_path)
    number = [outcome.label for outcome in outcomes].index(label(method))
    row, run = rows(outcomes)[number], outcomes[number].run
    here, there = (gradwire.simulate(method, bandwidth=b) for b in ("1Gbit", "10Mbit"))
    assert row["virtual_times_s"] == {"1Gbit": here.virtual_time_s, "10Mbit": there.virtual_time_s}
    assert row["test_accuracy"] == here.accuracy
    assert run.bytes_sent == here.bytes_sent
    assert (tmp_path / folder_name(label(method)) / "summary.json").exists()


@pytest.mark.slow
def test_a_network_on_which_a_method_stops_has_no_time():
    method = replace(
        BASE,
        synchronization="bsp(backup=1)",
        architecture="parameter_server",
        steps=3,
        faults=("crash(1, at=1.0)", "crash(2, at=1.0)"),  # before the end of the slow one only
    )
    table = rows(compare([replace(method, what_if=("100kbit",))]))
    assert table[-1]["virtual_times_s"]["100kbit"] is None
    assert any("at 100kbit stopped: " in note for note in notes(table))
    assert list(comparison_table(table).columns[-1].cells)[-1] == "-"


def test_the_table_says_what_is_counted_for_headers():
    methods = [replace(BASE, architecture=name, steps=1) for name in ("parameter_server", "ring")]
    said = [note for note in notes(rows(compare(methods))) if "32 bytes counted" in note]
    assert said
    assert all("parameter_server" in note for note in said)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1030, "1.03 kB"), (51_678, "51.7 kB"), (7.2e9, "7.2 GB")],
)
def test_bytes_are_written_with_three_digits(count, text):
    assert format_bytes(count) == text
