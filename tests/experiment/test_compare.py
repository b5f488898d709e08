"""Comparisons: baselines always there, ratios of measured bytes, divergence is a result."""

from dataclasses import replace

import pytest

from gradwire.experiment.compare import combinations, compare, label, rows, with_baselines
from gradwire.experiment.config import Config
from gradwire.experiment.report import comparison_figure, comparison_table, format_bytes

BASE = Config(steps=4, batch_size=8, model="mlp((16,))", compute="fixed(0.001)", eval_every=2)


def test_baselines_come_first_and_only_once():
    configs = with_baselines([replace(BASE, compression=c) for c in ("fp16", "ef(sign)")])
    assert [c.compression for c in configs] == ["identity", "fp16", "ef(sign)"]


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


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1030, "1.03 kB"), (51_678, "51.7 kB"), (7.2e9, "7.2 GB")],
)
def test_bytes_are_written_with_three_digits(count, text):
    assert format_bytes(count) == text
