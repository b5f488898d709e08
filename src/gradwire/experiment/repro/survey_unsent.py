"""Local SGD with top-k in the survey's Table 8: what becomes of the part that is not sent?

The survey reports 87.26, 85.20 and 84.68 per cent for local SGD with 1% of all elements and periods
of 2, 4 and 16, where bulk-synchronous top-k without feedback has 76.94. Its text says that workers
continue to update all parameters. If what they do not send is lost at the end of a round, local SGD
loses 99% of each round, like BSP of each gradient. If it stays in the worker's model, it is in the
next change, too, which is a feedback of its own. Here both are measured, on the same task.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Literal

from gradwire.experiment.repro.published import percent, published
from gradwire.experiment.repro.recipe import Row
from gradwire.experiment.repro.scale import Scale
from gradwire.experiment.repro.survey import CHOICES, PARTS, RESNET, settings_of
from gradwire.experiment.repro.table import Table
from gradwire.experiment.repro.trained import Cell, Trained, accuracy_text, by_place

_PERIODS = (2, 4, 16)
_RATE = 0.1
_UNSENT: tuple[Literal["reset", "kept"], ...] = ("reset", "kept")
_BSP = "BSP topk"


class LocalSGDUnsent(Trained):
    name = "localsgd-unsent"
    title = "Table 8 of the survey: local SGD with top-k, by what becomes of what is not sent"
    choices = f"ResNet-20, 4 workers, learning rate {_RATE}, topk(0.01). {CHOICES}"
    imports = PARTS

    def shared(self, scale: Scale) -> dict[str, Any]:
        return {**settings_of(RESNET, _RATE, scale), "workers": 4, "compression": "topk(0.01)"}

    def cells(self, scale: Scale) -> Iterable[Cell]:
        yield Cell(_BSP, "reset", {"synchronization": "bsp"}, _figure("BSP Topk"))
        for period in _PERIODS:
            for unsent in _UNSENT:
                rule = f'localsgd({period}, unsent="{unsent}")'
                figure = _figure(f"Local SGD tau={period} topk")
                yield Cell(_line(period), unsent, {"synchronization": rule}, figure)

    def tables(self, rows: Sequence[Row]) -> list[Table]:
        found = by_place(rows)
        lines = []
        for name in (_BSP, *map(_line, _PERIODS)):
            own = [found.get((name, unsent)) for unsent in _UNSENT]
            first = next((row for row in own if row is not None), None)
            if first is not None:
                lines.append([name, f"{first['published']:.2f}", *map(accuracy_text, own)])
        return [Table(self.title, ("method", "published", "lost", "kept"), lines)]


def _line(period: int) -> str:
    return f"local SGD, tau = {period}, topk"


def _figure(algorithm: str) -> float | None:
    """Of ResNet-20 with 4 workers and 1% of the elements."""
    wanted = (algorithm, "100", "4")
    names = ("algorithm", "compression ratio", "workers")
    line = next(e for e in published("table8") if tuple(e[name] for name in names) == wanted)
    return percent(line[f"{RESNET} lr={_RATE}"])


RECIPES = (LocalSGDUnsent(),)
