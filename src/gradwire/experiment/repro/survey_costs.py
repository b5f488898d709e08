"""Table 9 of the survey: what methods cost in communication, there in big O, here in bytes.

Each pair of architecture and synchronization runs for a few rounds on the simulator, without
compression, quantised and sparse. What counts is what the busiest server and the busiest worker
send and receive in a step of each worker: bytes of packed payloads, read off the ledger.

The survey counts bits of T steps, n workers, N parameters, k of them sent, and leaves out
constants: so a step of O(32nNT) bits is 4nN bytes, and an all-reduce sends nearly twice a vector.
Pairs that it marks by a dash are run where they make sense; where they do not, the reason is shown.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from gradwire.core.errors import StoppedError
from gradwire.core.units import format_bytes
from gradwire.experiment.repro.published import published
from gradwire.experiment.repro.recipe import Means, Recipe, Row, chosen_names
from gradwire.experiment.repro.scale import Scale
from gradwire.experiment.repro.table import Table
from gradwire.experiment.run.config import Config
from gradwire.experiment.run.outcome import Run
from gradwire.experiment.simulate.simulation import simulate
from gradwire.experiment.studies.compare import check, failure

_WORKERS, _PERIOD = 8, 8
_BASE = Config(
    workers=_WORKERS,
    data="digits",
    model="mlp((64, 32))",
    batch_size=8,
    optimizer="sgd(0.05)",
    compute="fixed(0.01)",
    bandwidth="100Mbit",
    threads=1,
)
_STEPS: dict[Scale, int] = {"smoke": _PERIOD, "small": 4 * _PERIOD, "full": 16 * _PERIOD}
_ARCHITECTURES = {"PS": "parameter_server", "A.R.": "allreduce", "Gossip": "gossip(ring)"}
_SYNCHRONIZATIONS = {
    "BSP": "bsp",
    "SSP": "ssp(3)",
    "ASP": "asp",
    "L-SGD": f"localsgd({_PERIOD})",
}
# The first that is not refused: neighbours keep what is not sent by algorithms of their own.
_COMPRESSIONS = {
    "none": ("identity",),
    "quantised": ("qsgd(bits=4)",),
    "sparse": ("ef(topk(0.01))", "topk(0.01)"),
}


class Table9(Recipe):
    name = "table9"
    title = "Table 9 of the survey: what the busiest server and worker send and receive in a step"
    choices = (
        f"{_WORKERS} workers, one server, digits, mlp((64, 32)). ssp(3), localsgd({_PERIOD}), "
        "qsgd(bits=4), ef(topk(0.01)), gossip on a ring: D-PSGD without compression, CHOCO-SGD "
        "with it, AD-PSGD where it is asynchronous."
    )

    def measure(self, means: Means) -> list[Row]:
        base = replace(_BASE, steps=_STEPS[means.scale], eval_every=_STEPS[means.scale])
        lines = {f"{_name(line)}, {line['compression']}": line for line in published("table9")}
        return [
            {
                "line": _name(lines[name]),
                "column": lines[name]["compression"],
                **_measured(_configs(lines[name], base)),
            }
            for name in chosen_names(list(lines), means.only)
        ]

    def tables(self, rows: Sequence[Row]) -> list[Table]:
        found = {(row["line"], row["column"]): row for row in rows}
        lines, refusals = [], []
        for line in published("table9"):
            name = _name(line)
            row = found.get((name, line["compression"]))
            if row is None:
                continue
            lines.append([name, row.get("compression", line["compression"]), *_cells(line, row)])
            if "refusal" in row:
                refusals.append(f"{name}: {row['refusal']}")
        head = [
            *("method", "compression", "survey, server", "server sends", "server receives"),
            *("survey, worker", "worker sends", "worker receives"),
        ]
        notes = [f"Refused: {text}" for text in dict.fromkeys(refusals)]
        size = next((row["parameters"] for row in rows if "parameters" in row), None)
        if size is not None:
            notes.insert(0, f"The model has N = {size:,} parameters: {format_bytes(4 * size)}.")
        return [Table(self.title, head, lines, num_words=2, notes=notes)]


def _name(line: dict[str, str]) -> str:
    return f"{line['architecture']}, {line['synchronization']}"


def _configs(line: dict[str, str], base: Config) -> Iterator[Config]:
    """What the line means, the preferred one first."""
    architecture = _ARCHITECTURES[line["architecture"]]
    synchronization = _SYNCHRONIZATIONS[line["synchronization"]]
    for compression in _COMPRESSIONS[line["compression"]]:
        if architecture == "gossip(ring)" and synchronization == "asp":
            architecture = "gossip(ring, adpsgd)"
        elif architecture == "gossip(ring)" and compression != "identity":
            architecture = "gossip(ring, choco(0.3))"
        yield replace(
            base,
            architecture=architecture,
            synchronization=synchronization,
            compression=compression,
        )


def _measured(configs: Iterator[Config]) -> Row:
    """The figures of the first configuration that is not refused; or why the last one is."""
    refusal = ""
    for config in configs:
        try:
            check(config)
            return _figures(simulate(config))
        except (StoppedError, ValueError) as error:
            refusal = failure(error).partition(": ")[2]
    return {"refusal": refusal}


def _figures(run: Run) -> Row:
    """Bytes of a step, of the busiest server and the busiest worker."""
    ledger, config = run.ledger, run.config
    steps = run.summary["gradients"] / config.workers

    def busiest(ranks: Sequence[int]) -> dict[str, float] | None:
        if not ranks:
            return None
        rank = max(ranks, key=lambda r: ledger.sent_by(r) + ledger.received_by(r))
        return {
            "sent": ledger.sent_by(rank) / steps,
            "received": ledger.received_by(rank) / steps,
        }

    others = range(config.workers, ledger.num_nodes)
    return {
        "architecture": config.architecture,
        "synchronization": config.synchronization,
        "compression": config.compression,
        "parameters": run.summary["parameters"],
        "server": busiest(others),
        "worker": busiest(range(config.workers)),
    }


def _cells(line: dict[str, str], row: Row) -> list[str]:
    survey = {name: line[name] or "-" for name in ("server", "worker")}
    if "refusal" not in row and set(survey.values()) == {"-"}:
        survey = dict.fromkeys(survey, "not in the survey")
    cells = []
    for name, text in survey.items():
        traffic = row.get(name)
        cells.append(text if traffic or "refusal" in row else "-")
        if traffic is None:
            cells += ["refused" if "refusal" in row else "-"] * 2
        else:
            cells += [format_bytes(traffic["sent"]), format_bytes(traffic["received"])]
    return cells


RECIPES = (Table9(),)
