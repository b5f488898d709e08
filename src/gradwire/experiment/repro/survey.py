"""The survey's accuracy tables (Tang et al. 2020, arXiv 2003.06307v2, tables 2, 3, 4, 7 and 8).

ResNet-20 on CIFAR-10, and the character LSTM of McMahan et al. 2017 on Shakespeare. The source
gives learning rates, numbers of workers and compression ratios. What it leaves open is chosen in
`CHOICES`, once for all rows.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gradwire.experiment.repro.published import percent, published
from gradwire.experiment.repro.recipe import Row
from gradwire.experiment.repro.scale import Scale
from gradwire.experiment.repro.table import Table
from gradwire.experiment.repro.trained import Cell, Trained, accuracy_text, by_place

CHOICES = """\
The survey names neither epochs, batch size, momentum, schedule, graph nor the fraction of
FedAvg. Here: CIFAR-10 with crops and mirror images, batches of 32 per worker, momentum 0.9,
weight decay 1e-4, and the learning rate divided by ten after a half and three quarters of the
epochs; Shakespeare by speaking role, one or more roles per worker, batches of 10, plain SGD at
a constant rate, the next character after each window of 80. Gossip on a ring, CHOCO-SGD with a
consensus step of 0.3, FedAvg with half of the clients and one epoch of each. Quantisation is
QSGD with 16 and 2 bits; "topk" keeps a tenth, a hundredth or a thousandth of all elements of
the model, DCD-PSGD and FedAvg a quarter. ASP runs on one server, with gradients that take 10 ms
on average, exponentially distributed."""

RESNET, RNN = "resnet20", "rnn"
PARTS = ("gradwire.experiment.repro._cifar10_part",)  # data that only recipes have
_OF_SEEDS = 4  # the table of means over seeds, all with 32 workers
_TIMES = {"compute": "fixed(0.01)", "what_if": ["100Mbit", "1Gbit", "10Gbit"]}
# Of local SGD with a lossy compression: see survey_unsent.py, which measures both.
_UNSENT = "reset"

_METHODS: dict[tuple[str, str], dict[str, str]] = {
    ("BSP", "None"): {},
    ("BSP quant", "2"): {"compression": "qsgd(bits=16)"},
    ("BSP quant", "16"): {"compression": "qsgd(bits=2)"},
    ("BSP Topk", "10"): {"compression": "topk(0.1)"},
    ("BSP Topk", "100"): {"compression": "topk(0.01)"},
    ("BSP Topk", "1000"): {"compression": "topk(0.001)"},
    ("BSP eftopk", "10"): {"compression": "ef(topk(0.1))"},
    ("BSP eftopk", "100"): {"compression": "ef(topk(0.01))"},
    ("BSP eftopk", "1000"): {"compression": "ef(topk(0.001))"},
    ("FedAvg", "None"): {"synchronization": "fedavg(0.5)"},
    ("FedAvg topk", "4"): {"synchronization": "fedavg(0.5)", "compression": "topk(0.25)"},
    ("DPSGD", "None"): {"architecture": "gossip(ring)"},
    ("DCD-PSGD", "4"): {"architecture": "gossip(ring, dcd)", "compression": "topk(0.25)"},
    ("CHOCO-SGD", "100"): {
        "architecture": "gossip(ring, choco(0.3))",
        "compression": "topk(0.01)",
    },
    ("ASP", "None"): {
        "synchronization": "asp",
        "architecture": "parameter_server",
        "compute": "exponential(0.01)",
    },
}
for _tau in (2, 4, 8, 16):
    _METHODS[f"Local SGD tau={_tau}", "None"] = {"synchronization": f"localsgd({_tau})"}
    _METHODS[f"Local SGD tau={_tau} topk", "100"] = {
        "synchronization": f'localsgd({_tau}, unsent="{_UNSENT}")',
        "compression": "topk(0.01)",
    }

# What the other tables call the methods of Table 8.
_OTHER_NAMES = {
    "BSP-SGD": ("BSP", "None"),
    "BSP-SGD (PS)": ("BSP", "None"),
    "BSP-EFTopK": ("BSP eftopk", "100"),
    "ASP-SGD": ("ASP", "None"),
    "DP-SGD (Gossip)": ("DPSGD", "None"),
    "FedAvg": ("FedAvg", "None"),
}


@dataclass(frozen=True)
class _Size:
    """How much of a table a scale measures."""

    tasks: Sequence[str]
    rates: Sequence[str]  # learning rates; none: all
    workers: Sequence[str]  # none: all
    settings: Mapping[str, Mapping[str, Any]]  # of each task


_TASKS: dict[str, dict[str, Any]] = {
    RESNET: {"data": "cifar10", "model": "resnet20", "batch_size": 32},
    RNN: {
        "data": "shakespeare_roles",
        "model": 'char_lstm(predicts="last")',
        "partition": "by_role",
        "batch_size": 10,
    },
}
_SIZES: dict[Scale, _Size] = {
    "smoke": _Size(
        (RESNET,),
        ("0.1",),
        ("4",),
        {RESNET: {"data": "cifar10_part", "batch_size": 8, "steps": 4}},
    ),
    "small": _Size(
        (RESNET, RNN), ("0.1", "1.0"), ("4",), {RESNET: {"epochs": 8.0}, RNN: {"epochs": 2.0}}
    ),
    "full": _Size((RESNET, RNN), (), (), {RESNET: {"epochs": 60.0}, RNN: {"epochs": 60.0}}),
}


class SurveyTable(Trained):
    """A table with lines of algorithms and numbers of workers, and columns of learning rates."""

    choices = CHOICES
    imports = PARTS

    def __init__(self, number: int, title: str) -> None:
        self.number = number
        self.name = f"survey-table{number}"
        self.title = f"Table {number} of the survey: {title}"
        if number == _OF_SEEDS:
            self.num_seeds = {"smoke": 1, "small": 1, "full": 3}

    def cells(self, scale: Scale) -> Iterable[Cell]:
        size = _SIZES[scale]
        for line in published(f"table{self.number}"):
            algorithm, ratio, workers = _line_of(line)
            if size.workers and workers not in size.workers and self.number != _OF_SEEDS:
                continue
            for column, text in line.items():
                task, _, rate = column.partition(" lr=")
                if task not in size.tasks or (size.rates and rate not in size.rates):
                    continue
                settings = {
                    **settings_of(task, float(rate), scale),
                    "workers": int(workers),
                    **_METHODS[_method(algorithm, ratio)],
                }
                yield Cell(_name(algorithm, ratio, workers), column, settings, percent(text))

    def tables(self, rows: Sequence[Row]) -> list[Table]:
        found = by_place(rows)
        columns = [
            column
            for column in published(f"table{self.number}")[0]
            if " lr=" in column and any(place[1] == column for place in found)
        ]
        lines = []
        for line in published(f"table{self.number}"):
            name = _name(*_line_of(line))
            own = [found.get((name, column)) for column in columns]
            if not any(own):
                continue
            cells = [name]
            for column, row in zip(columns, own):
                cells += [line[column] or "-", accuracy_text(row)]
            first = next(row for row in own if row)
            cells.append(_bytes_text(first))
            lines.append(cells)
        head = ["algorithm, ratio, workers"]
        for column in columns:
            head += [f"{column} published", "ours"]
        notes = [_agreement(rows)] if rows else []
        return [Table(self.title, [*head, "bytes /worker /step"], lines, notes=notes)]


def _line_of(line: Mapping[str, str]) -> tuple[str, str, str]:
    """Algorithm, compression ratio and number of workers."""
    algorithm = line.get("algorithm") or line["algorithm (32 workers, 3 seeds)"]
    return algorithm, line.get("compression ratio", ""), line.get("workers", "32")


def _name(algorithm: str, ratio: str, workers: str) -> str:
    compressed = {"": "", "None": "none"}.get(ratio, f"{ratio}x")
    return ", ".join(part for part in (algorithm, compressed, workers) if part)


def _method(algorithm: str, ratio: str) -> tuple[str, str]:
    if (algorithm, ratio) in _METHODS:
        return algorithm, ratio
    if algorithm in _OTHER_NAMES:
        return _OTHER_NAMES[algorithm]
    # Local-SGD tau=4, Local-SGD tau=4 TopK
    local = algorithm.replace("Local-SGD", "Local SGD").replace("TopK", "topk")
    return local, "100" if local.endswith("topk") else "None"


def settings_of(task: str, rate: float, scale: Scale) -> dict[str, Any]:
    """How a task is trained at a learning rate."""
    trained = {"optimizer": f"sgd({rate})"}
    if task == RESNET:
        trained = {
            "optimizer": f"sgd({rate}, momentum=0.9, weight_decay=0.0001)",
            "schedule": "step((0.5, 0.75))",
        }
    return {**_TIMES, **_TASKS[task], **trained, **_SIZES[scale].settings[task]}


def _bytes_text(row: Row) -> str:
    from gradwire.core.units import format_bytes

    return format_bytes(row["bytes_per_worker_step"]) if "bytes_per_worker_step" in row else "-"


def _agreement(rows: Sequence[Row]) -> str:
    """How many cells are within two points of the published ones."""
    compared = [row for row in rows if "accuracy" in row and row["published"] is not None]
    near = sum(abs(row["accuracy"] - row["published"]) <= 2 for row in compared)
    return f"{near} of {len(compared)} cells are within two points of the published figure."


RECIPES = (
    SurveyTable(2, "synchronization"),
    SurveyTable(3, "numbers of workers"),
    SurveyTable(4, "three seeds"),
    SurveyTable(7, "all-reduce and gossip"),
    SurveyTable(8, "compression"),
)
