"""Runs and sweeps in a notebook."""

import base64
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch
from torch import nn

import gradwire
from gradwire.experiment.sweep.sweep import Results
from report import report_runs


def image_of(html: str) -> str:
    """The text of the image, which is a valid SVG."""
    (content,) = re.findall(r"src='data:image/svg\+xml;base64,([^']*)'", html)
    svg = base64.b64decode(content).decode()
    assert ElementTree.fromstring(svg).tag.endswith("svg")
    return svg


def test_a_run_shows_its_figures_and_curves():
    run = gradwire.simulate(**report_runs.SMALL | {"compression": "ef(topk(0.05))"})
    html = run._repr_html_()
    assert "ef(topk(0.05)) | bsp | allreduce | wfbp" in html
    assert f"{100 * run.accuracy:.1f}%" in html
    assert "at 100Mbit" in html
    assert "at 10Mbit" in html
    assert "<script" not in html
    svg = image_of(html)
    assert "test accuracy [%]" in svg
    assert "virtual time at 100Mbit [s]" in svg
    assert html == run._repr_html_()


def test_a_run_of_an_own_task_shows_its_metric():
    x = torch.arange(32.0).reshape(8, 4)
    data = ((x, x[:, :1]), (x, x[:, :1]))
    with torch.random.fork_rng():
        model = nn.Linear(4, 1)
    run = gradwire.simulate(
        model=model, data=data, steps=2, batch_size=2, workers=2, compute="fixed(0.1)"
    )
    assert "test loss" in run._repr_html_()


def test_a_run_without_rows_shows_its_figures():
    run = gradwire.simulate(**report_runs.SMALL)
    run.metrics.clear()
    assert "<table>" in run._repr_html_()
    assert "<img" not in run._repr_html_()


def test_a_sweep_shows_its_table_and_mean_curves(tmp_path):
    rows: list[dict[str, Any]] = []
    for compression in ("identity", "fp16"):
        for seed in (0, 1):
            folder = f"{compression}-{seed}"
            settings = {**report_runs.SMALL, "compression": compression, "seed": seed}
            run = gradwire.simulate(out=tmp_path / "runs" / folder, **settings)
            rows.append({"method": compression, "folder": folder, **vars(run.config)})
    rows.append({"method": "sign", "folder": "nowhere", "failure": "refused: x"})
    table = [{"method": "sign", "seeds": 0, "failed": 1, "failures": ["refused: x"]}]
    html = Results(tmp_path, rows, [], table)._repr_html_()
    assert "<td>sign</td><td>refused</td>" in html
    svg = image_of(html)
    assert "identity" in svg
    assert "fp16" in svg
    assert "sign" not in svg
    empty = Results(Path(tmp_path / "gone"), rows, [], table)._repr_html_()
    assert "<img" not in empty
