"""`gradwire repro`: what recipes measure, keep and show, small ones and those of the package."""

import importlib
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from gradwire.cli import main
from gradwire.experiment.repro import recipe as recipe_module
from gradwire.experiment.repro.kept import keep, kept_rows
from gradwire.experiment.repro.loopback import measure as measure_loopback
from gradwire.experiment.repro.published import percent, published
from gradwire.experiment.repro.recipe import Means, Recipe, Row, find_recipe, recipes
from gradwire.experiment.repro.scale import SCALES, Scale
from gradwire.experiment.repro.survey_allreduce import Table6
from gradwire.experiment.repro.survey_costs import Table9
from gradwire.experiment.repro.table import Table
from gradwire.experiment.repro.trained import Cell, Trained, accuracy_text, by_place
from gradwire.experiment.run.config import Config
from gradwire.experiment.run.registries import MODELS, OPTIMIZERS, SCHEDULES
from gradwire.experiment.sweep.plan import plan_runs

NAMES = sorted(recipes())
TRAINED = [name for name in NAMES if isinstance(find_recipe(name), Trained)]
FOLDER = Path(recipe_module.__file__).parent / "published"


class Small(Trained):
    """Two cells that train, and one that cannot."""

    name = "small"
    title = "A small table"
    choices = "Two steps."

    def __init__(self, *more: Cell) -> None:
        self.more = more

    def shared(self, scale: Scale) -> dict[str, Any]:
        quick = {"steps": 2, "batch_size": 8, "model": "mlp((8,))", "compute": "fixed(0.001)"}
        return {**quick, "what_if": ["10Gbit"]}

    def cells(self, scale: Scale) -> Iterable[Cell]:
        yield Cell("fp32", "digits", {}, 90.0)
        yield Cell("signs", "digits", {"compression": "ef(sign)"}, 80.5)
        yield from self.more

    def tables(self, rows: Sequence[Row]) -> list[Table]:
        lines = [[row["line"], accuracy_text(row)] for row in rows]
        return [Table(self.title, ("method", "accuracy"), lines, notes=["A note."])]


class Watching:
    def __init__(self) -> None:
        self.num_done, self.ended = 0, 0

    def begin(self, num_runs: int, num_done: int) -> None:
        self.num_done = num_done

    def step(self, run: Any, step: int, steps: int) -> None:
        pass

    def end(self, run: Any, row: Any) -> None:
        self.ended += 1


@pytest.fixture
def small(monkeypatch) -> Small:
    """The only recipe there is."""
    found = Small()
    monkeypatch.setattr(recipe_module, "recipes", lambda: {"small": found})
    return found


def without_times(rows: Sequence[Row]) -> list[Row]:
    """What must be the same each time."""
    return [{name: row[name] for name in row.keys() - {"wall_time_s"}} for row in rows]


# Recipes that train.


def test_there_is_a_row_for_each_cell_and_what_is_done_is_not_done_again(tmp_path):
    rows = Small().measure(Means(tmp_path, "smoke", jobs=1))
    assert [(row["line"], row["published"], row["seeds"]) for row in rows] == [
        ("fp32", 90.0, 1),
        ("signs", 80.5, 1),
    ]
    assert all(0 <= row["accuracy"] <= 100 for row in rows)
    assert rows[0]["bytes_sent"] > 10 * rows[1]["bytes_sent"]
    assert list(rows[0]["virtual_times_s"]) == ["1Gbit", "10Gbit"]
    watching = Watching()
    again = Small().measure(Means(tmp_path, "smoke", jobs=1, watcher=watching))
    assert (watching.num_done, watching.ended) == (2, 0)
    assert again == rows


def test_only_some_cells_and_more_seeds(tmp_path):
    means = Means(tmp_path, "smoke", jobs=1, only=("sig",), seeds=2)
    (row,) = Small().measure(means)
    assert (row["line"], row["seeds"]) == ("signs", 2)
    assert row["deviation"] is not None
    assert accuracy_text(row) == f"{row['accuracy']:.2f} ± {row['deviation']:.2f}"
    with pytest.raises(ValueError, match=r"no cell has that in its name.*fp32, digits; signs"):
        Small().measure(Means(tmp_path, "smoke", only=("topk",)))


def test_a_cell_without_result_says_why(tmp_path):
    bad = Cell("far", "digits", {"optimizer": "sgd(1e30)"})
    rows = Small(bad).measure(Means(tmp_path, "smoke", jobs=1))
    failed = by_place(rows)["far", "digits"]
    assert failed["seeds"] == 0
    assert failed["failures"][0].startswith("diverged: ")
    assert accuracy_text(failed) == "diverged"
    assert "accuracy" not in failed
    assert accuracy_text(None) == "-"


# Results that are kept.


def test_rows_replace_those_of_the_same_scale_and_place(tmp_path):
    path = tmp_path / "results" / "small.jsonl"
    first = {"line": "a", "column": "x", "accuracy": 12.3456789}
    other = {"line": "b", "column": "x", "accuracy": 1.0}
    keep(path, "smoke", [first, other], {"torch": "old"})
    keep(path, "small", [first], {"torch": "old"})
    keep(path, "smoke", [{**first, "accuracy": 50.0}], {"torch": "new"})
    found = [(r["scale"], r["line"], r["accuracy"], r["torch"]) for r in kept_rows(path)]
    assert found == [
        ("smoke", "a", 50.0, "new"),
        ("smoke", "b", 1.0, "old"),
        ("small", "a", 12.3457, "old"),
    ]
    assert [row["line"] for row in kept_rows(path, "small")] == ["a"]
    assert not list(kept_rows(tmp_path / "nothing.jsonl"))


def test_cells_without_result_do_not_replace_any(tmp_path):
    path = tmp_path / "small.jsonl"
    keep(path, "smoke", [{"line": "a", "column": "x", "accuracy": 1.0, "seeds": 1}], {})
    keep(path, "smoke", [{"line": "a", "column": "x", "seeds": 0, "failures": ["stopped"]}], {})
    (row,) = kept_rows(path)
    assert row["accuracy"] == 1.0


# The command.


def test_the_command_shows_keeps_and_continues(small, tmp_path, capsys):
    arguments = ["repro", "small", "--jobs", "1", "--out", str(tmp_path / "out")]
    main([*arguments, "--keep", str(tmp_path / "kept")])
    shown = capsys.readouterr().out
    for text in ("A small table", "signs", "A note.", "Two steps.", "Records: "):
        assert text in shown
    kept = list(kept_rows(tmp_path / "kept" / "small.jsonl", "smoke"))
    assert [row["line"] for row in kept] == ["fp32", "signs"]
    assert kept[0]["torch"] == torch.__version__
    assert kept[0]["processor"]
    main([*arguments, "--json"])
    rows = json.loads(capsys.readouterr().out)
    assert [row["line"] for row in rows] == ["fp32", "signs"]
    with pytest.raises(SystemExit) as caught:
        main([*arguments, "--no-resume"])
    assert caught.value.code == 2
    assert "is not empty" in capsys.readouterr().err


def test_without_a_name_recipes_are_listed(capsys):
    main(["repro"])
    listed = capsys.readouterr().out
    for name in NAMES:
        assert name in listed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["survey-table9"], "unknown recipe 'survey-table9'"),
        (["small", "--scale", "huge"], "huge"),
        (["small", "--only", "topk"], "no cell has that in its name"),
    ],
)
def test_what_the_command_refuses(small, tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        main(["repro", *arguments])
    assert caught.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())


# The recipes of the package.


def test_every_recipe_says_what_it_is():
    assert {"survey-table8", "thesis-mnist", "thesis-rd", "table5", "table6", "table9"} <= {*NAMES}
    assert {"localsgd-unsent", "foundation", "pays"} <= {*NAMES}
    for name in NAMES:
        found = find_recipe(name)
        assert found.name == name
        assert found.title
        assert found.choices
        assert isinstance(found, Recipe)


@pytest.mark.parametrize("name", NAMES)
def test_tables_of_nothing_are_empty(name):
    for table in find_recipe(name).tables([]):
        assert not table.lines


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", TRAINED)
@pytest.mark.usefixtures("own_codecs_are_forgotten")
def test_every_cell_is_a_run_whose_settings_can_be_read(name, scale):
    found = find_recipe(name)
    for module in found.imports:
        importlib.import_module(module)
    cells = list(found.cells(scale))
    assert len({(cell.line, cell.column) for cell in cells}) == len(cells) > 0
    for cell in cells:
        (run,) = plan_runs({**found.shared(scale), **cell.settings})
        MODELS.parse(run.config.model)
        OPTIMIZERS.parse(run.config.optimizer)
        SCHEDULES.parse(run.config.schedule)
        # Whoever says how a network trains says how long, too.
        assert run.config.steps or run.config.epochs != Config().epochs


def test_every_figure_of_the_survey_has_a_cell_at_full_scale():
    for number in (2, 3, 4, 7, 8):
        figures = [
            text
            for line in published(f"table{number}")
            for column, text in line.items()
            if " lr=" in column and text
        ]
        found = [cell.published for cell in find_recipe(f"survey-table{number}").cells("full")]
        assert [value for value in found if value is not None] == [*map(percent, figures)]


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.csv")), ids=lambda path: path.stem)
def test_published_figures_can_be_read(path):
    lines = published(path.stem)
    assert lines
    assert all(None not in line and None not in line.values() for line in lines)
    for line in lines:
        for column, text in line.items():
            if " lr=" in column:
                value = percent(text)
                assert value is None or 0 <= value < 100  # some runs diverged


def test_a_table_for_a_page_has_a_cell_for_each_column():
    table = Table("T", ("a", "b"), [["x|y", "1"]], notes=["Note."])
    lines = table.markdown().splitlines()
    assert lines == ["**T**", "", "| a | b |", "|---|---:|", "| x\\|y | 1 |", "", "Note."]


def test_costs_of_table_9(tmp_path):
    rows = Table9().measure(Means(tmp_path, "smoke", only=("PS, BSP", "A.R., SSP", "A.R., BSP")))
    found = by_place(rows)
    served = found["PS, BSP", "none"]
    model = 4 * served["parameters"]
    # A server of n workers receives and sends n models, a worker one each way.
    for traffic, models in ((served["server"], 8), (served["worker"], 1)):
        assert traffic["sent"] == pytest.approx(models * model, rel=0.01)
        assert traffic["received"] == pytest.approx(models * model, rel=0.01)
    # 2 (n - 1) / n models each way.
    assert found["A.R., BSP", "none"]["worker"]["sent"] == pytest.approx(1.75 * model, rel=0.01)
    assert found["A.R., BSP", "none"]["server"] is None
    assert served["server"]["received"] > 7 * found["PS, BSP", "quantised"]["server"]["received"]
    assert "A collective mean needs everyone" in found["A.R., SSP", "none"]["refusal"]
    (table,) = Table9().tables(rows)
    assert [line[0] for line in table.lines if "refused" in line] == ["A.R., SSP"] * 3
    assert any("Refused: A.R., SSP" in note for note in table.notes)


def test_all_reduce_algorithms_on_real_processes():
    found = measure_loopback(3, ["recursive_doubling", "ring"], [4_000, 40_000])
    assert list(found) == ["recursive_doubling", "ring"]
    assert all(0 < seconds < 60 for taken in found.values() for seconds in taken)
    assert [len(taken) for taken in found.values()] == [2, 2]
    with pytest.raises(ValueError, match="the ranks on this machine failed"):
        measure_loopback(2, ["star"], [4_000])


def test_simulated_and_measured_times_have_tables_of_their_own():
    both = {"algorithm": "ring", "workers": 4, "nbytes": 4_000, "simulated_s": 0.5}
    rows = [{**both, "formula_s": 0.25}, {**both, "measured_s": 0.001}]
    simulated, measured = Table6().tables(rows)
    assert simulated.lines == [["ring", "4", "4,000", "250 ms", "500 ms", "2.0000"]]
    assert measured.lines == [["ring", "4", "4,000", "1 ms", "500 ms"]]


def test_pays_compares_with_the_best_of_fp16(tmp_path):
    def row(method: str, schedule: str, network: str, step_s: float) -> Row:
        names = {"model": "mlp", "method": method, "schedule": schedule}
        return {**names, "line": f"{method} {schedule}", "column": network, "step_s": step_s}

    found = find_recipe("pays")
    rows = [
        row("fp16", "sequential", "1Gbit", 0.4),
        row("fp16", "wfbp", "1Gbit", 0.2),
        row("fp16", "wfbp", "100Mbit", 0.8),
        row("ef(sign)", "sequential", "1Gbit", 0.25),
        row("ef(sign)", "sequential", "100Mbit", 0.3),
        row("ef(sign)", "fusion(200, first=50)", "100Mbit", 0.1),
    ]
    (table,) = found.tables(rows)
    assert list(table.head) == ["model", "method", "100Mbit", "1Gbit"]
    assert table.lines == [
        ["mlp", "fp16", "800 ms (wfbp)", "200 ms (wfbp)"],
        ["mlp", "ef(sign)", "8x (fusion)", "0.8x (sequential)"],
    ]
    assert table.notes[1] == "More than 5% faster than fp16, of 1 pairs: 100Mbit 1, 1Gbit 0."
    (path,) = found.draw(rows, tmp_path)
    assert path.read_bytes().startswith(b"\x89PNG")


# On real data.


@pytest.mark.slow
@pytest.mark.usefixtures("own_codecs_are_forgotten")
@pytest.mark.parametrize("name", ["thesis-mnist", "survey-table8"])
def test_a_published_table_at_its_smallest_scale_twice(tmp_path, name):
    if not os.environ.get("GRADWIRE_DATA"):
        pytest.skip("needs MNIST and CIFAR-10 in $GRADWIRE_DATA")
    found = find_recipe(name)
    rows = [found.measure(Means(tmp_path / run, "smoke")) for run in ("first", "second")]
    places = [(cell.line, cell.column) for cell in found.cells("smoke")]
    assert [(row["line"], row["column"]) for row in rows[0]] == places
    assert all("accuracy" in row for row in rows[0])
    assert without_times(rows[0]) == without_times(rows[1])
    (table,) = found.tables(rows[0])
    assert len(table.lines) == len(places)
