"""Tables of docs/training_loops.md, from the results of benchmarks/shaped_training.py.

    python experiments/training_loops.py --write

`--check` fails if the page differs from what would be written.
"""

import json
import sys
from typing import Any

import kept

PAGE = kept.ROOT / "docs" / "training_loops.md"
RESULTS = kept.ROOT / "benchmarks" / "shaped_training.json"


def main() -> None:
    if not {"--write", "--check"} & set(sys.argv[1:]):
        sys.exit("usage: python experiments/training_loops.py --write | --check")
    results = json.loads(RESULTS.read_text())
    tables = {"shaped": steps_table(results["rows"]), "shaped ideal": ideal_table(results["rows"])}
    tables["shaped setting"] = (
        f"Measured at commit {results['commit']} ({results['hardware']}, torch {results['torch']}, "
        f"{results['ranks']} ranks). On one rank the hook takes "
        f"{100 * (results['hook_on_one_rank'] - 1):+.1f}% of a step of DDP."
    )
    kept.write_page(PAGE, kept.with_tables(PAGE.read_text(), tables))


def rates_of(rows: list[dict[str, Any]]) -> list[float | None]:
    return list(dict.fromkeys(row["mbit"] for row in rows))


def head(mbit: float | None) -> str:
    if mbit is None:
        return "no limit"
    return f"{mbit:g} Mbit/s" if mbit < 1000 else f"{mbit / 1000:g} Gbit/s"


def cells(rows: list[dict[str, Any]], method: str) -> list[dict[str, Any]]:
    by_rate = {row["mbit"]: row for row in rows if row["method"] == method}
    return [by_rate[mbit] for mbit in rates_of(rows)]


def named(method: str) -> str:
    kind, _, codec = method.partition(" ")
    if kind == "hook":
        codec, comma, buckets = codec.partition(", ")
        return f"`ddp_comm_hook('{codec}')`{comma}{buckets}"
    return f"`DistributedOptimizer`, `{codec}`" if kind == "optimizer" else method


def steps_table(rows: list[dict[str, Any]]) -> str:
    """Median steps, and what the busiest rank sends."""
    methods = list(dict.fromkeys(row["method"] for row in rows))
    lines = [
        [
            named(method),
            f"{max(cell['bytes'] for cell in cells(rows, method)) / 1e6:.2f}",
            *(f"{cell['step_ms']:.0f}" for cell in cells(rows, method)),
        ]
        for method in methods
    ]
    return kept.markdown(["step, ms", "MB sent", *map(head, rates_of(rows))], lines)


def ideal_table(rows: list[dict[str, Any]]) -> str:
    """Steps relative to the ideal time."""
    methods = [m for m in dict.fromkeys(row["method"] for row in rows) if "compute only" not in m]
    lines = [
        [named(m), *(f"{cell['of_ideal']:.2f}" for cell in cells(rows, m) if cell["mbit"])]
        for m in methods
    ]
    return kept.markdown(
        ["step, of the ideal time", *(head(mbit) for mbit in rates_of(rows) if mbit)], lines
    )


if __name__ == "__main__":
    main()
