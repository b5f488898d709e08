"""Table 6 of the survey: what all-reduce algorithms cost, by formula, on the simulator, and on real
processes of this machine.

    binary tree          2 log2(n) (a + b N)
    recursive doubling   log2(n) (a + b N)
    ring                 2 (n - 1) (a + b N / n)

for n workers, N bytes, a latency of a and b seconds per byte. Real processes are ranks of one
thread over the loopback (`loopback.py`): there messages share memory and cores, so a and b are not
known, and their times stand beside those of the simulator as they were measured.
"""

import math
from collections.abc import Callable, Sequence

import torch

from gradwire.architecture import ARCHITECTURE
from gradwire.core.node import Node
from gradwire.experiment.report.comparison import format_seconds
from gradwire.experiment.repro import loopback
from gradwire.experiment.repro.recipe import Means, Recipe, Row
from gradwire.experiment.repro.scale import Scale
from gradwire.experiment.repro.table import Table
from gradwire.runtime.network.network import Network
from gradwire.runtime.virtual.engine import VirtualEngine

_LATENCY_S, _BANDWIDTH = 50e-6, 125e6  # 1 Gbit/s
_NBYTES = (4_000, 400_000, 40_000_000)
_REAL_SIZE = 4  # ranks
_REAL_NBYTES: dict[Scale, Sequence[int]] = {
    "smoke": (4_000, 400_000, 4_000_000),
    "small": _NBYTES,
    "full": _NBYTES,
}
_SIZES: dict[Scale, Sequence[int]] = {"smoke": (4,), "small": (4, 8, 16), "full": (4, 8, 16, 32)}


def _tree(n: int, nbytes: int) -> float:
    return 2 * math.log2(n) * (_LATENCY_S + nbytes / _BANDWIDTH)


def _doubling(n: int, nbytes: int) -> float:
    return math.log2(n) * (_LATENCY_S + nbytes / _BANDWIDTH)


def _ring(n: int, nbytes: int) -> float:
    return 2 * (n - 1) * (_LATENCY_S + nbytes / n / _BANDWIDTH)


_FORMULAS: dict[str, Callable[[int, int], float]] = {
    "binary_tree": _tree,
    "recursive_doubling": _doubling,
    "ring": _ring,
}


class Table6(Recipe):
    name = "table6"
    title = "Table 6 of the survey: costs of all-reduce algorithms"
    choices = (
        "The simulated network has 50 us of latency and 1 Gbit/s. Real processes are "
        f"{_REAL_SIZE} ranks of one thread on this machine, gloo over the loopback; the median "
        "of 11 means, of the slowest rank each."
    )

    def measure(self, means: Means) -> list[Row]:
        return [*_simulated(means.scale), *_real(means.scale)]

    def tables(self, rows: Sequence[Row]) -> list[Table]:
        lines = [
            [
                row["algorithm"],
                str(row["workers"]),
                f"{row['nbytes']:,}",
                format_seconds(row["formula_s"]),
                format_seconds(row["simulated_s"]),
                f"{row['simulated_s'] / row['formula_s']:.4f}",
            ]
            for row in rows
            if "measured_s" not in row
        ]
        head = ("algorithm", "workers", "bytes", "formula", "simulated", "ratio")
        return [Table(self.title, head, lines), *_real_table(rows)]


def _simulated(scale: Scale) -> list[Row]:
    return [
        {
            "line": f"{name}, {size} workers",
            "column": f"{nbytes} bytes",
            "algorithm": name,
            "workers": size,
            "nbytes": nbytes,
            "formula_s": formula(size, nbytes),
            "simulated_s": simulated_s(name, size, nbytes),
        }
        for size in _SIZES[scale]
        for name, formula in _FORMULAS.items()
        for nbytes in _NBYTES
    ]


def _real(scale: Scale) -> list[Row]:
    sizes = _REAL_NBYTES[scale]
    found = loopback.measure(_REAL_SIZE, list(_FORMULAS), sizes)
    return [
        {
            "line": f"{name}, {_REAL_SIZE} processes",
            "column": f"{nbytes} bytes",
            "algorithm": name,
            "workers": _REAL_SIZE,
            "nbytes": nbytes,
            "measured_s": seconds,
            "simulated_s": simulated_s(name, _REAL_SIZE, nbytes),
        }
        for name, taken in found.items()
        for nbytes, seconds in zip(sizes, taken)
    ]


def _real_table(rows: Sequence[Row]) -> list[Table]:
    lines = [
        [
            row["algorithm"],
            str(row["workers"]),
            f"{row['nbytes']:,}",
            format_seconds(row["measured_s"]),
            format_seconds(row["simulated_s"]),
        ]
        for row in rows
        if "measured_s" in row
    ]
    head = ("algorithm", "processes", "bytes", "measured", "simulated")
    title = "The same on real processes of one machine, beside the simulator at 50 us and 1 Gbit/s"
    return [Table(title, head, lines)] if lines else []


def simulated_s(name: str, size: int, nbytes: int) -> float:
    architecture, x = ARCHITECTURE.parse(name), torch.ones(nbytes // 4)

    async def program(node: Node) -> None:
        await architecture.group(node, "x").mean(x)

    engine = VirtualEngine(Network((_LATENCY_S,) * size, (_BANDWIDTH,) * size))
    engine.run([program] * size)
    return engine.now


RECIPES = (Table6(),)
