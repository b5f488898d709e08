"""Codecs at equal bits: the committed results, what the page says of them, and curves by hand."""

import importlib
import json
import re
from pathlib import Path

import pytest

from gradwire.compression import COMPRESSION
from gradwire.core.codec import Codec
from gradwire.experiment.studies.codecs import inputs

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def study(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "experiments")
    return importlib.import_module("rate_distortion")


@pytest.fixture
def rows(study):
    return json.loads(study.KEPT.read_text())["rows"]


def test_curves_leave_out_what_is_beaten_and_are_straight_in_log(study) -> None:
    own = [
        {"family": "a", "method": "1", "points": {"x": [1.0, 0.4], "y": [1.0, 0.5]}},
        {"family": "a", "method": "2", "points": {"x": [2.0, 0.5]}},
        {"family": "a", "method": "3", "points": {"x": [3.0, 0.1]}},
    ]
    curve = study.curves(own)["x"]["a"]
    assert curve == [(1.0, 0.4), (3.0, 0.1)]
    assert study.at(curve, 2.0) == pytest.approx(0.2)
    assert study.at(curve, 3.0) == pytest.approx(0.1)
    assert study.at(curve, 0.9) is study.at(curve, 3.1) is None


def test_no_codec_errs_less_than_the_better_of_polar_and_dq(study, rows) -> None:
    assert study.beaten_by(rows) == []
    for vector, own in study.curves(rows).items():
        for bits in study.AT:
            assert study.ranking(own, bits)[0][1] in study.OURS, f"{vector} at {bits}"


def test_no_gaussian_result_is_below_the_bound(rows) -> None:
    for row in rows:
        if "gaussian" in row["points"]:
            bits, error = row["points"]["gaussian"]
            assert error > 0.99 * 4**-bits, row["method"]


@pytest.mark.parametrize("method", ["dq(0.5)", "topk(0.05) >> fp16"])
def test_committed_results_can_be_had_again(study, rows, method) -> None:
    codec = COMPRESSION.parse(method)
    assert isinstance(codec, Codec)
    (kept,) = (row["points"] for row in rows if row["method"] == method)
    x = inputs(1)["mlp late"]
    assert study.point(codec, "mlp late", x) == pytest.approx(kept["mlp late"], rel=0.02), (
        f"{method} has changed: run python experiments/rate_distortion.py"
    )


def test_the_page_shows_the_committed_results(study, rows) -> None:
    page = study.PAGE.read_text()
    assert study.kept.with_tables(page, study.tables(rows)) == page, "run make rd"


def test_every_figure_in_the_text_stands_in_a_table(study) -> None:
    page = study.PAGE.read_text()
    tables = "\n".join(line for line in page.splitlines() if line.startswith("|"))
    text = re.sub(r"```.*?```", "", page, flags=re.DOTALL)
    prose = "\n".join(line for line in text.splitlines() if not line.startswith(("|", "    ")))
    figures = re.findall(r"\b0\.\d{3,}\b", prose)
    known = set(re.findall(r"\b0\.\d+", tables))
    assert figures
    assert set(figures) <= known
