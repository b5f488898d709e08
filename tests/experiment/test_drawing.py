"""Figures: labels that do not overlap, lines that can be told apart, a title, three formats."""

from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from gradwire.cli import main
from gradwire.experiment.report import comparison as report
from gradwire.experiment.report.comparison import comparison_figure
from gradwire.experiment.report.drawing import line_style, log_axis, save, tick_values
from gradwire.experiment.run.config import Config
from gradwire.experiment.studies.compare import Outcome, compare
from sampling import slow

QUICK = Config(steps=3, batch_size=8, model="mlp((8,))", compute="fixed(0.1)", threads=1)


@pytest.fixture(scope="module")
def outcomes() -> list[Outcome]:
    return compare([replace(QUICK, compression="ef(sign)")])


@pytest.mark.parametrize(
    ("low", "high"),
    [(0.11, 0.27), (1.0, 1.0001), (9.0, 11.0), (0.5, 6.0), (1e-6, 1e-2), (3e4, 5e7), (1, 1e12)],
)
def test_labels_of_a_logarithmic_axis_do_not_overlap(low, high):
    figure = Figure(figsize=(11, 4.8), layout="constrained")
    axes = figure.subplots(1, 2)[0]
    axes.plot([low, high], [0, 1])
    log_axis(axes, "s")
    FigureCanvasAgg(figure).draw()
    boxes = [label.get_window_extent() for label in axes.xaxis.get_ticklabels(which="both")]
    seen = sorted((box for box in boxes if box.width > 1), key=lambda box: box.x0)
    texts = [label.get_text() for label in axes.get_xticklabels()]
    assert len(seen) >= 2, texts
    assert all(left.x1 < right.x0 for left, right in pairwise(seen)), texts


def test_there_are_two_to_five_labels_at_any_range():
    for start, decades in product((1e-9, 2.7e-3, 99.0, 4e6), (0.01, 0.1, 0.5, 1, 2, 3, 5, 9)):
        values = tick_values(start, start * 10**decades)
        assert 2 <= len(values) <= 5, (start, decades, values)


def test_lines_differ_in_more_than_colour():
    styles = [line_style(number) for number in range(24)]
    without_colour = [(style["linestyle"], style["marker"]) for style in styles[:8]]
    assert len(set(without_colour)) == 8
    assert len({(style["color"], style["linestyle"]) for style in styles}) == 24
    assert all(first["linestyle"] != second["linestyle"] for first, second in pairwise(styles[:8]))


@pytest.mark.parametrize(
    ("suffix", "start"), [(".png", b"\x89PNG"), slow(".pdf", b"%PDF"), slow(".svg", b"<?xml")]
)
def test_a_comparison_is_drawn_in_every_format(suffix, start, outcomes, tmp_path):
    paths = [tmp_path / f"{name}{suffix}" for name in "ab"]
    for path in paths:
        comparison_figure(outcomes, path)
    first, second = (path.read_bytes() for path in paths)
    assert first.startswith(start)
    assert first == second  # no date, no random names


def test_other_formats_are_refused(outcomes, tmp_path):
    with pytest.raises(ValueError, match=r"\.png, \.pdf or \.svg"):
        comparison_figure(outcomes, tmp_path / "a.bmp")


def test_the_title_says_what_was_trained_and_with_how_many_seeds(outcomes, tmp_path, monkeypatch):
    drawn: list[Figure] = []

    def keep(figure: Figure, path: Path) -> None:
        drawn.append(figure)
        save(figure, path)

    monkeypatch.setattr(report, "save", keep)
    comparison_figure(outcomes, tmp_path / "a.png")
    title = "4 workers, mlp((8,)) on digits, 3 steps of batch 8, 1 seed"
    assert drawn[0].get_suptitle() == title


def test_the_command_takes_a_format_and_the_table_tells_the_seeds(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = ["--steps", "2", "--model", "mlp((8,))", "--compute", "fixed(0.1)", "--threads", "1"]
    main(["compare", *flags, "--figure-format", "svg", "--out", "c"])
    printed = " ".join(capsys.readouterr().out.split())
    assert "2 steps of batch 32, 1 seed. Virtual time: 100 ms" in printed
    assert "Figure: c/comparison.svg" in printed
    assert (tmp_path / "c" / "comparison.svg").read_text().startswith("<?xml")
