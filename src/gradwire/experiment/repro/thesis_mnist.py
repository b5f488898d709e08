"""The thesis's comparison on MNIST (sec. 3.2.1), with what it announced and did not run.

Two workers, batches of 64, learning rate 0.01, momentum 0.5, 100 epochs, the network of BytePS'
example, a parameter server. Its rows are no compression, 16 bits and "1bit"; it prints a compressor
for natural compression, too (`_thesis_printed.py`). The other rows are this library's: natural
compression as its paper has it, one bit per element with feedback, top-k, and the polar codes that
the thesis is about.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gradwire.core.units import format_bytes
from gradwire.experiment.report.comparison import format_seconds
from gradwire.experiment.repro.published import published
from gradwire.experiment.repro.recipe import Row
from gradwire.experiment.repro.scale import Scale
from gradwire.experiment.repro.table import Table
from gradwire.experiment.repro.trained import Cell, Trained, accuracy_text, by_place

_COLUMN = "MNIST"
_AS_PRINTED = ", as the thesis prints it"
# Label, compression, work per element: O(N) but where elements are ranked or blocks transformed.
_ROWS = (
    ("none", "identity", "O(1)"),
    ("16 bit", "fp16", "O(N)"),
    (f"1bit{_AS_PRINTED}", "thesis_one_bit", "O(N)"),
    (f"natural{_AS_PRINTED}", "thesis_natural", "O(N)"),
    ("natural", "natural", "O(N)"),
    ("onebit with feedback", "ef(onebit)", "O(N)"),
    ("sign with feedback", "ef(sign)", "O(N)"),
    ("qsgd, 4 bits", "qsgd(bits=4)", "O(N)"),
    ("top-k 1% with feedback", "ef(topk(0.01))", "O(N)"),
    ("top-k 0.1% with feedback", "ef(topk(0.001))", "O(N)"),
    ("dgc 0.1%", "dgc(0.001, momentum=0.5)", "O(N)"),
    ("polar of the values, 0.5 bits, with feedback", "ef(polar(0.5))", "O(N log B)"),
    ("polar of the signs, 0.5 bits, with feedback", "ef(sign >> polar(0.5))", "O(N log B)"),
    ("top-k 1% >> polar, with feedback", "ef(topk(0.01) >> polar(1.0))", "O(N)"),
    ("dq, 0.5 bits, with feedback", "ef(dq(0.5))", "O(N)"),
)
_PUBLISHED = {"none": "none", "16 bit": "16 bit", f"1bit{_AS_PRINTED}": "1bit"}
_SIZES: dict[Scale, dict[str, Any]] = {
    "smoke": {"steps": 20, "eval_every": 20},
    "small": {"epochs": 5.0},
    "full": {"epochs": 100.0},
}


class ThesisMnist(Trained):
    name = "thesis-mnist"
    title = "Thesis, sec. 3.2.1: gradient compression on MNIST"
    choices = (
        "As in the thesis: 2 workers, batches of 64, learning rate 0.01, momentum 0.5. Chosen "
        "here: a network of 1 Gbit/s, gradients of 10 ms in virtual time, and momentum before the "
        "compression where feedback would multiply it."
    )
    imports = ("gradwire.experiment.repro._thesis_printed",)

    def shared(self, scale: Scale) -> dict[str, Any]:
        return {
            "data": "mnist",
            "model": "mnist_cnn",
            "workers": 2,
            "batch_size": 64,
            "architecture": "parameter_server",
            "compute": "fixed(0.01)",
            "what_if": ["100Mbit"],
            **_SIZES[scale],
        }

    def cells(self, scale: Scale) -> Iterable[Cell]:
        figures = {line["method"]: float(line["accuracy"].rstrip("%")) for line in _lines()}
        for label, compression, _ in _ROWS:
            momentum = "" if compression.startswith("dgc") else ", momentum=0.5"
            settings = {"compression": compression, "optimizer": f"sgd(0.01{momentum})"}
            name = _PUBLISHED.get(label)
            yield Cell(label, _COLUMN, settings, figures[name] if name else None)

    def tables(self, rows: Sequence[Row]) -> list[Table]:
        found = by_place(rows)
        base = found.get(("none", _COLUMN), {}).get("bytes_sent")
        theirs = {line["method"]: line for line in _lines()}
        lines = []
        for label, _, complexity in _ROWS:
            row = found.get((label, _COLUMN))
            if row is not None:
                source = theirs.get(_PUBLISHED.get(label, ""))
                lines.append(_line(label, complexity, row, base, source))
        head = (
            *("method", "work", "bytes /worker /step", "ratio", "time 1 Gbit/s"),
            *("time 100 Mbit/s", "measured time", "time published", "NLL", "NLL published"),
            *("accuracy %", "accuracy published"),
        )
        return [Table(self.title, head, lines, num_words=2, notes=[_NOTE] if lines else [])]


_NOTE = (
    "Times are virtual, of the whole run; measured is what the simulation took, not a training on "
    "two GPUs. The published times are those of the thesis's machine."
)


def _lines() -> Sequence[Mapping[str, str]]:
    return published("thesis_mnist")


def _line(
    label: str,
    complexity: str,
    row: Row,
    base: float | None,
    source: Mapping[str, str] | None,
) -> list[str]:
    if "accuracy" not in row:
        return [label, complexity, *["-"] * 8, accuracy_text(row), "-"]
    times = row["virtual_times_s"]
    sent = row["bytes_sent"]
    return [
        label,
        complexity,
        format_bytes(row["bytes_per_worker_step"]),
        f"{base / sent:.1f}x" if base and sent else "-",
        *(format_seconds(times[where]) for where in ("1Gbit", "100Mbit")),
        format_seconds(row["wall_time_s"]),
        source["time"] if source else "-",
        f"{row['test_loss']:.4f}",
        source["average NLL loss"] if source else "-",
        accuracy_text(row),
        source["accuracy"].rstrip("%") if source else "-",
    ]


RECIPES = (ThesisMnist(),)
