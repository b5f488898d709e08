"""The costs of coding: a table that has everything, the same times everywhere, and its making."""

import importlib
import json
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

import gradwire
from gradwire.compression import COMPRESSION
from gradwire.core.codec import Codec
from gradwire.core.composite import Composite
from gradwire.core.errors import GradwireWarning
from gradwire.core.metering import Work
from gradwire.core.node import Call
from gradwire.core.notation import notation_name
from gradwire.experiment.costs import calibration, function_costs
from gradwire.experiment.costs.coding_costs import FILE, Charge, read_costs
from gradwire.experiment.run.config import Config
from gradwire.experiment.run.setup import prepare
from gradwire.experiment.simulate.simulation import simulate_prepared
from gradwire.runtime.virtual.coding_time import CodingTime, Cost, call_name, touched_nbytes

QUICK: dict[str, Any] = {
    "steps": 6,
    "batch_size": 8,
    "model": "mlp((16,))",
    "compute": "fixed(0.001)",
}
COSTS = read_costs("")


@pytest.mark.parametrize("name", COSTS.table.codecs)
def test_an_entry_is_of_a_codec_that_exists_and_takes_time(name) -> None:
    codec = COMPRESSION[name.partition("(")[0]]
    assert issubclass(codec, Codec)
    assert not issubclass(codec, Composite)
    for operation in ("encode", "decode"):
        assert COSTS.table.codecs[name][operation].seconds(1 << 20, 1 << 20) > 0


@pytest.mark.slow
def test_every_codec_has_an_entry_or_is_made_of_codecs() -> None:
    """Not in the quick run: what has no entry is charged the default, with a warning."""
    classes = [COMPRESSION[name] for name in COMPRESSION.builtin_names()]
    codecs = [c for c in classes if issubclass(c, Codec) and not issubclass(c, Composite)]
    measured = set(map(notation_name, codecs))
    assert measured <= set(COSTS.table.codecs), "measure them: gradwire codecs --costs"


class Named(CodingTime):
    """Charges nothing, and keeps the names of functions that make something."""

    meters = True

    def __init__(self) -> None:
        self.names: set[str] = set()

    def seconds(self, call: Call[Any], result: Any, work: Sequence[Work], taken_s: float) -> float:
        if touched_nbytes((call.function, call.args), result) is not None:
            self.names.add(call_name(call))
        return 0.0


@pytest.mark.slow
def test_every_function_that_runs_call_has_an_entry() -> None:
    seen = Named()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GradwireWarning)
        for config in function_costs.configs():
            experiment = prepare(replace(config, model="mlp((8,))"))
            simulate_prepared(replace(experiment, charge=Charge(seen, {})))
    assert {"compression.lowrank.powersgd._residual", "core.group.mean_in_order"} <= seen.names
    assert seen.names <= set(COSTS.table.functions)


def test_functions_with_an_entry_are_where_it_says() -> None:
    """One that was moved would be charged as one that is not in the table."""
    names = {name.partition("(")[0] for name in COSTS.table.functions}
    for name in sorted(name for name in names if not name.startswith("torch.")):
        *modules, function = f"gradwire.{name}".split(".")
        if modules[-1].lstrip("_")[:1].isupper():  # a method
            *modules, owner = modules
            found = getattr(getattr(importlib.import_module(".".join(modules)), owner), function)
        else:
            found = getattr(importlib.import_module(".".join(modules)), function)
        assert f"{found.__module__}.{found.__qualname__}" == f"gradwire.{name}"


def test_no_entry_is_off_by_much() -> None:
    codecs, functions = json.loads(FILE.read_text())["worst"]
    assert 1 <= codecs["factor"] < 5
    assert 1 <= functions["factor"] < 5


def test_virtual_times_are_those_of_no_machine(monkeypatch) -> None:
    settings = {**QUICK, "compression": "ef(topk(0.05) >> qsgd(bits=4))"}
    first = gradwire.simulate(**settings)
    ticks = iter(range(10**9))
    monkeypatch.setattr(CodingTime, "clock", staticmethod(lambda: 7.0 * next(ticks)))
    assert gradwire.simulate(**settings).virtual_time_s == first.virtual_time_s


def test_the_record_says_how_coding_was_charged(tmp_path) -> None:
    run = gradwire.simulate(**QUICK, out=tmp_path / "run")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert run.summary["coding"] == summary["coding"]
    assert summary["coding"] == {
        "charged": "model",
        "slowdown": 1.0,
        "hardware": COSTS.hardware,
        "threads": 1,
        "costs_digest": COSTS.digest,
    }
    free = gradwire.simulate(**QUICK, coding="free")
    assert free.summary["coding"] == {"charged": "free"}


@pytest.mark.slow
def test_what_coding_costs_is_linear_in_the_slowdown() -> None:
    free, once, thrice = (
        gradwire.simulate(**QUICK, **own).virtual_time_s
        for own in ({"coding": "free"}, {}, {"coding_slowdown": 3.0})
    )
    assert thrice - free == pytest.approx(3 * (once - free), rel=0.05)  # some overlaps
    assert once > free


def scaled(factor: float, path) -> str:
    written = json.loads(FILE.read_text())
    for name in ("others", "functions", "default"):
        written[name] = {k: [factor * c for c in v] for k, v in written[name].items()}
    written["codecs"] = {
        name: {k: [factor * c for c in v] for k, v in own.items()}
        for name, own in written["codecs"].items()
    }
    path.write_text(json.dumps(written))
    return str(path)


def test_another_table_takes_its_place(tmp_path) -> None:
    path = scaled(3.0, tmp_path / "slow.json")
    slow = gradwire.simulate(**QUICK, coding_costs=path)
    same = gradwire.simulate(**QUICK, coding_slowdown=3.0)
    assert slow.virtual_time_s == pytest.approx(same.virtual_time_s, rel=1e-9)
    assert slow.summary["coding"]["costs_digest"] != COSTS.digest


def test_a_run_does_not_go_on_with_another_table(tmp_path) -> None:
    path = tmp_path / "own.json"
    settings = {**QUICK, "coding_costs": scaled(1.0, path), "eval_every": 2}

    def stop(row, steps) -> None:
        if row["step"] == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        gradwire.simulate(**settings, out=tmp_path / "run", progress=stop)
    scaled(2.0, path)
    with pytest.raises(ValueError, match="another table of costs"):
        gradwire.resume(tmp_path / "run")
    scaled(1.0, path)
    whole = gradwire.simulate(**settings)
    assert gradwire.resume(tmp_path / "run").virtual_time_s == whole.virtual_time_s


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read"),
        ("{", "no table of coding costs"),
        ("[]", "no table of coding costs"),
        ('{"format": 99}', "format 99, expected 2"),
        ('{"format": 2, "codecs": {"sign": {"encode": [1, 2, -3]}}}', "not negative"),
        ('{"format": 2, "codecs": {"sign": {"encode": [1, 2, 3]}}}', "no decode"),
        ('{"format": 2, "codecs": {"sign": {"encode": [1, 2]}}}', "no table of coding costs"),
    ],
)
def test_a_bad_table_is_refused_with_the_file(tmp_path, content, message) -> None:
    path = tmp_path / "costs.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=message) as caught:
        gradwire.simulate(**QUICK, coding_costs=str(path))
    assert str(path) in str(caught.value)


def test_the_old_setting_is_refused_by_name(tmp_path) -> None:
    path = tmp_path / "config.toml"
    path.write_text("charge_coding = true\n")
    with pytest.raises(ValueError, match='charge_coding any more: write coding = "measured"'):
        Config.from_toml(path)
    with pytest.raises(ValueError, match="measured"):
        Config(coding="measurd")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="is for coding"):
        Config(coding="free", coding_costs="file.json")


# Calibration


def test_a_fit_finds_the_costs_and_none_is_negative() -> None:
    true = Cost(1e-4, 2e-9, 3e-8)
    samples = {(n, b): true.seconds(n, b) for n in (1000, 30_000, 10**6) for b in (100, 50_000)}
    assert calibration.fitted(samples) == pytest.approx(true, rel=1e-2)
    falling = calibration.fitted({(0, 1000): 2.0, (0, 2000): 1.0})
    assert min(falling) >= 0


def test_examples_that_do_not_fit_have_entries_of_their_own() -> None:
    def line(cost: Cost) -> dict[str, calibration.Samples]:
        return {"encode": {(n, n // 10): cost.seconds(n, n // 10) for n in (1000, 10**5, 10**6)}}

    quick, alike, slow = Cost(1e-4, 1e-9, 0.0), Cost(1.1e-4, 1.1e-9, 0.0), Cost(1e-4, 9e-9, 0.0)
    found = calibration.entries("x", {"x(1)": line(quick), "x(2)": line(slow), "x(3)": line(alike)})
    assert sorted(found) == ["x", "x(2)"]
    assert found["x"]["encode"].seconds(10**6, 10**5) == pytest.approx(1.1e-3, rel=0.1)
    assert found["x(2)"]["encode"].seconds(10**6, 10**5) == pytest.approx(9.1e-3, rel=0.01)


def test_a_fit_is_as_often_too_high_as_too_low() -> None:
    wide = {(0, 1000 * n): 1e-6 * n * factor for n in (1, 100) for factor in (0.1,)}
    wide |= {(0, 1001 * n): 1e-6 * n * 10 for n in (1, 100)}
    cost = calibration.fitted(wide)
    assert cost.seconds(0, 1000) == pytest.approx(1e-6, rel=0.1)  # the geometric mean


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(calibration, "_LENGTHS", (64, 1024))
    monkeypatch.setattr(calibration, "_ENOUGH_S", 0.01)
    monkeypatch.setattr(function_costs, "_WIDTHS", (2, 8))


def test_what_is_measured_can_be_read_and_charged(tmp_path, monkeypatch, quick) -> None:
    chosen = {name: calibration.examples()[name] for name in ("sign", "rans")}
    base = function_costs._BASE
    runs = [base, replace(base, compression="ef(powersgd(2))")]
    monkeypatch.setattr(calibration, "examples", lambda: chosen)
    monkeypatch.setattr(function_costs, "configs", lambda: runs)
    told: list[str] = []
    path = tmp_path / "costs.json"
    calibration.write_costs(path, (), lambda what, done, total: told.append(what))
    costs = read_costs(str(path))
    assert set(costs.table.codecs) >= {"sign", "rans"}
    assert "compression.lowrank.powersgd._residual" in costs.table.functions
    assert "training.optimizer.clipped_update(sgd)" in costs.table.functions
    assert told[:5] == [*chosen, *chosen, ""]
    run = gradwire.simulate(**QUICK, compression="ef(sign)", coding_costs=str(path))
    assert run.summary["coding"]["costs_digest"] == costs.digest


def test_one_codec_can_be_measured_into_a_table(tmp_path, quick) -> None:
    path = tmp_path / "costs.json"
    calibration.write_costs(path, ("topk(0.07)",), lambda *_: None)
    before, after = json.loads(FILE.read_text()), json.loads(path.read_text())
    assert before["codecs"].pop("topk") != after["codecs"].pop("topk")
    assert before["codecs"] == after["codecs"]
    assert before["functions"] == after["functions"]
    path.write_text("{}")
    with pytest.raises(ValueError, match="no table of coding costs"):
        calibration.write_costs(path, ("topk(0.07)",), lambda *_: None)
    for made_of_codecs in ("topk(0.07) >> sign", "ef(sign)"):
        with pytest.raises(ValueError, match="one by one"):
            calibration.write_costs(tmp_path / "other.json", (made_of_codecs,), lambda *_: None)
