"""Rate and distortion: known figures, the command, and the committed results against the page."""

import importlib
import io
import json
import math
from pathlib import Path

import pytest
from rich.console import Console

from gradwire.cli import main
from gradwire.coding.polar.channel import binary_entropy
from gradwire.experiment.studies import rd

ROOT = Path(__file__).resolve().parents[2]
QUICK = ["--n", "64", "--rate", "0.5", "--blocks", "64", "--construction", "bhattacharyya"]


@pytest.fixture
def script(monkeypatch):
    """A program in experiments/, by name."""
    monkeypatch.syspath_prepend(ROOT / "experiments")
    return importlib.import_module


def committed():
    return json.loads((ROOT / "experiments" / "rd.json").read_text())["rows"]


def row(rows, n, rate):
    """Of the plain search: hard decisions, no list."""
    plain = rd.Search()
    (found,) = (r for r in rows if (r["n"], r["rate"], rd.Search.of(r)) == (n, rate, plain))
    return found


def test_bound_and_thesis_stand_next_to_what_is_measured() -> None:
    measured = rd.measure((256,), (0.3, 0.4), 64, constructions=("bhattacharyya",))
    known, unknown = measured["rows"]
    assert known["k"] == round(0.3 * 256)
    assert 1 - binary_entropy(known["bound"]) == pytest.approx(0.3)
    assert (known["thesis"], unknown["thesis"]) == (0.2409, None)
    assert known["bound"] < known["distortion"] < known["thesis"]
    assert 1e-4 < known["standard_error"] < 5e-3


def test_a_code_that_sends_all_bits_loses_none() -> None:
    (only,) = rd.measure((64,), (1.0,), 3)["rows"]
    assert (only["distortion"], only["standard_error"], only["k"]) == (0, 0, 64)


def test_the_seed_decides_the_bits_and_pieces_do_not_matter(monkeypatch) -> None:
    def distortion(seed: int) -> float:
        found = rd.measure((64,), (0.5,), 100, constructions=("bhattacharyya",), seed=seed)
        return found["rows"][0]["distortion"]

    first = distortion(0)
    assert distortion(0) == first != distortion(1)
    monkeypatch.setattr(rd, "_PIECE", 64 * 30)  # other bits, as many blocks
    assert distortion(0) == pytest.approx(first, abs=0.02)


def test_randomized_is_worse_and_a_list_better() -> None:
    ways = {"decisions": ("hard", "randomized"), "list_sizes": (1, 4)}
    measured = rd.measure((256,), (0.5,), 256, **ways, constructions=("bhattacharyya",))
    found = {rd.Search.of(r).label(): r["distortion"] for r in measured["rows"]}
    assert list(found) == ["hard", "randomized", "list of 4"]  # no list of randomized decisions
    assert found["list of 4"] < found["hard"] < found["randomized"]


def test_randomized_is_the_published_algorithm() -> None:
    measured = rd.measure((64,), (0.5,), 8, decisions=("hard", "randomized"))
    assert [r["f"] for r in measured["rows"]] == ["corrected", "exact"]


def test_tables_fit_eighty_columns() -> None:
    rows = [
        {
            "n": n,
            "k": n // 2,
            "rate": rate,
            **vars(way),
            "blocks": 2,
            "distortion": 0.123456,
            "standard_error": error,
            "bound": 0.1,
            "thesis": rd.thesis(n, rate),
        }
        for n, error in ((256, 0.00123), (32768, 0.0000412))
        for way in rd.searches(("hard", "randomized"), (1, 32), ("monte_carlo",))
        for rate in (0.1, 0.25, 0.3, 0.5, 0.7, 0.9)
    ]
    console = Console(width=80, file=io.StringIO())
    for table in rd.rd_tables({"rows": rows}):
        console.print(table)
    printed = console.file.getvalue()
    assert max(map(len, printed.splitlines())) <= 80
    assert "…" not in printed
    assert printed.count("0.1235(12)") == printed.count("0.12346(4)") == 18
    assert printed.count("0.1100") == 1  # the bound at R = 0.5
    assert printed.count("0.2409") == 1


def test_the_command_prints_json_or_a_table_and_draws(capsys, tmp_path) -> None:
    main(["rd", *QUICK, "--json", "--decision", "hard"])
    printed = capsys.readouterr()
    (only,) = json.loads(printed.out)["rows"]
    assert (only["n"], only["k"], only["blocks"]) == (64, 32, 64)
    assert "1/1 N = 64, R = 0.5, hard, bhattacharyya" in printed.err
    main(["rd", *QUICK, "--list-size", "1", "4", "--figure", str(tmp_path / "rd.png")])
    printed = capsys.readouterr()
    assert "list of 4" in printed.out
    assert rd.formatted(only) in printed.out
    assert (tmp_path / "rd.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--n", "100"], "power of two"),
        (["--rate", "1.5"], "rate must lie in (0, 1]"),
        (["--blocks", "1"], "blocks must lie in 2"),
        (["--decision", "randomized", "--list-size", "8"], "need decision hard"),
        (["--list-size", "0"], "list_size must"),
        (["--figure", "rd.txt"], ".png, .pdf or .svg"),
        (["--figure", "nowhere/rd.png"], "there is no folder nowhere"),
        (["--n", "64", "--rate", "0.5", "0.001"], "at N = 64 a rate of 0.001 sends no bit"),
        (["--seed", "-1"], "seed must lie in 0"),
        (["--n"], "n: give at least one"),
        (["--construction", "luck"], "monte_carlo"),
    ],
)
def test_mistakes_are_told(arguments, message, capsys) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["rd", *arguments])
    assert caught.value.code == 2
    told = capsys.readouterr().err
    assert message in told
    assert "1/" not in told.replace("1/n", "")  # nothing was measured


def test_committed_results_can_be_had_again() -> None:
    for n, rate, blocks in ((256, 0.5, 4096), (1024, 0.7, 1024)):
        kept = row(committed(), n, rate)
        (again,) = rd.measure((n,), (rate,), blocks, seed=1)["rows"]
        error = math.hypot(kept["standard_error"], again["standard_error"])
        assert abs(again["distortion"] - kept["distortion"]) < 4 * error


def test_committed_results_beat_the_thesis_and_no_bound() -> None:
    for kept in committed():
        assert kept["distortion"] > kept["bound"]
        if kept["thesis"] and kept["decision"] == "hard" and kept["construction"] == "monte_carlo":
            assert kept["distortion"] < kept["thesis"]


def test_the_page_shows_the_committed_results(script) -> None:
    figures = script("make_rd_figure")
    page = figures.PAGE.read_text()
    results = json.loads(figures.KEPT.read_text())
    tables = figures.tables(results)
    assert script("kept").with_tables(page, tables) == page, "run make rd"
    for n, rate in ((256, 0.1), (1024, 0.5), (32768, 0.9)):
        assert rd.formatted(row(results["rows"], n, rate)) in tables["rd lengths"]
