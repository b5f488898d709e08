"""How near do polar codes come to Shannon's bound on bits? Measures, and makes docs/rd.png.

    python experiments/make_rd_figure.py            # measures, keeps the figures, draws
    python experiments/make_rd_figure.py --write    # draws again from the kept figures

What is kept, in experiments/rd.json, is what `gradwire rd --json` prints for several choices of its
options (`parts`). Tables of docs/polar.md are written from it too.

Answer: docs/polar.md.
"""

import json
import sys
from collections.abc import Sequence
from typing import Any

import kept
from gradwire import kernels
from gradwire.experiment.rd import LENGTHS, RATES, measure, rd_figure, table_rows

KEPT = kept.ROOT / "experiments" / "rd.json"
FIGURE = kept.ROOT / "docs" / "rd.png"
PAGE = kept.ROOT / "docs" / "polar.md"
_BITS = 1 << 23


def parts() -> list[dict[str, Any]]:
    """Arguments of `measure`: all lengths, lists, constructions."""
    others = ("tal_vardy", "gaussian_approximation", "bhattacharyya", "polarization_weight")
    return [
        *(
            {"lengths": (n,), "blocks": _BITS // n, "decisions": ("hard", "randomized")}
            for n in LENGTHS
        ),
        *(
            {"lengths": (n,), "blocks": (_BITS >> 2) // n, "list_sizes": (2, 8, 32)}
            for n in LENGTHS
        ),
        {"lengths": (1024,), "blocks": _BITS >> 10, "constructions": others},
    ]


def main() -> None:
    if sys.argv[1:] != ["--write"]:
        if kernels.backend() != "native":
            raise SystemExit("the plain torch kernels would take hours: build the C library first")
        KEPT.write_text(kept.compact(measured()))
    results = json.loads(KEPT.read_text())
    rd_figure(results, FIGURE)
    PAGE.write_text(kept.with_tables(PAGE.read_text(), tables(results)))


def measured() -> dict[str, Any]:
    together: dict[str, Any] = {}
    for arguments in parts():
        own = measure(**arguments, progress=_progress)
        together = {**own, "rows": [*together.get("rows", []), *own["rows"]]}
    return {**together, "commit": kept.commit()}


def _progress(code: str, done: int, total: int) -> None:
    if code:
        print(f"{done + 1}/{total} {code}", file=sys.stderr, flush=True)


def tables(results: dict[str, Any]) -> dict[str, str]:
    """By the name in the page: decisions at all lengths, lists at two, constructions at one."""
    rows = results["rows"]
    usual = [row for row in rows if row["construction"] == "monte_carlo"]
    hard = [row for row in rows if row["decision"] == "hard"]
    return {
        "rd lengths": _markdown([row for row in usual if row["list_size"] == 1]),
        "rd lists": _markdown([r for r in usual if r in hard and r["n"] in (1024, 8192)]),
        "rd constructions": _markdown(
            [row for row in hard if row["n"] == 1024 and row["list_size"] == 1]
        ),
    }


def _markdown(rows: Sequence[dict[str, Any]]) -> str:
    columns = ["N", "search", *(f"R = {rate:g}" for rate in RATES)]
    return kept.markdown(
        columns, ([n, name, *cells] for n, name, cells in table_rows(rows, RATES)), left=2
    )


if __name__ == "__main__":
    main()
