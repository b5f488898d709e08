"""How near do polar codes come to Shannon's bound on bits? Measures, and makes docs/rd.png.

    python experiments/make_rd_figure.py            # measures, keeps the figures, draws
    python experiments/make_rd_figure.py --write    # draws again from the kept figures

What is kept, in experiments/rd.json, is what `gradwire rd --json` prints for several choices of its
options (`parts`), and `polar` on one long Gaussian vector. Tables of docs/polar.md are written from
it too.

Answer: docs/polar.md.
"""

import json
import sys
from collections.abc import Sequence
from typing import Any

import kept
from gradwire import kernels
from gradwire.compression import COMPRESSION
from gradwire.core.codec import Codec
from gradwire.core.key import Key
from gradwire.experiment.run.outcome import use_threads
from gradwire.experiment.studies.codecs import inputs, nmse, spec_of
from gradwire.experiment.studies.rd import LENGTHS, RATES, measure, rd_figure, table_rows

KEPT = kept.ROOT / "experiments" / "rd.json"
FIGURE = kept.ROOT / "docs" / "rd.png"
PAGE = kept.ROOT / "docs" / "polar.md"
_BITS = 1 << 23
_ELEMENTS = 1 << 22
GOALS = {0.1: 0.885, 0.25: 0.727, 0.5: 0.528, 0.75: 0.378, 1.0: 0.27, 1.5: 0.138, 2.0: 0.069}
"""NMSE of a Gaussian that `polar` was to reach with blocks of 8192, by bits per element."""
LIST_OF_8 = (0.3261, 0.1990, 0.1181, 0.0597, 0.0165)
"""Distortion that a list of 8 was to reach at N = 1024, by rate."""


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
        {
            "lengths": (1024,),
            "blocks": _BITS >> 12,
            "constructions": ("tal_vardy",),
            "list_sizes": (8,),
        },
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
    return {**together, "gaussian": gaussian(), "commit": kept.commit()}


def gaussian() -> list[dict[str, float]]:
    """Bits per element and NMSE of `polar` at the rates of GOALS."""
    found = []
    with use_threads(1):
        x = inputs(_ELEMENTS)["gaussian"]
        spec, key = spec_of("gaussian", x), Key(0).child("rate distortion").private(0)
        for rate in GOALS:
            codec = COMPRESSION.parse(f"polar({rate})")
            assert isinstance(codec, Codec)
            payload, _ = codec.encode(x, codec.init(spec), key)
            error = nmse(codec.decode(payload, spec, key), x)
            found.append({"rate": rate, "bits": 8 * payload.nbytes / len(x), "nmse": error})
    return found


def _progress(code: str, done: int, total: int) -> None:
    if code:
        print(f"{done + 1}/{total} {code}", file=sys.stderr, flush=True)


def tables(results: dict[str, Any]) -> dict[str, str]:
    """By the name in the page: decisions at all lengths, lists at two, constructions at one; and
    the Gaussian next to its goals."""
    rows = results["rows"]
    usual = [row for row in rows if row["construction"] == "monte_carlo"]
    hard = [row for row in rows if row["decision"] == "hard"]
    return {
        "rd lengths": _markdown([row for row in usual if row["list_size"] == 1]),
        "rd lists": _lists(hard),
        "rd constructions": _markdown(
            [row for row in hard if row["n"] == 1024 and row["list_size"] == 1]
        ),
        "rd goals": _goals(results["gaussian"]),
    }


def _lists(hard: Sequence[dict[str, Any]]) -> str:
    """At two lengths; under the list of 8 with N = 1024 another construction, and its goal."""
    shown = [r for r in hard if r["n"] in (1024, 8192) and r["construction"] == "monte_carlo"]
    (more,) = (
        (name, cells)
        for _, name, cells in table_rows(
            [r for r in hard if r["construction"] == "tal_vardy" and r["list_size"] == 8], RATES
        )
        if name == "list of 8"
    )
    lines = [[n, name, *cells] for n, name, cells in table_rows(shown, RATES)]
    at = next(i for i, line in enumerate(lines) if line[1] == "list of 8") + 1
    lines[at:at] = [
        ["", f"{more[0]}, tal_vardy", *more[1]],
        ["", "goal for a list of 8", *(f"{goal:.4f}" for goal in LIST_OF_8)],
    ]
    return kept.markdown(_columns(), lines, left=2)


def _goals(rows: Sequence[dict[str, float]]) -> str:
    lines = [
        ["bound", *(f"{4 ** -row['rate']:.4f}" for row in rows)],
        ["goal", *(f"{GOALS[row['rate']]:.3f}" for row in rows)],
        ["`polar`", *(f"{row['nmse']:.4f}" for row in rows)],
    ]
    return kept.markdown(["bits", *(f"{row['rate']:g}" for row in rows)], lines)


def _markdown(rows: Sequence[dict[str, Any]]) -> str:
    lines = ([n, name, *cells] for n, name, cells in table_rows(rows, RATES))
    return kept.markdown(_columns(), lines, left=2)


def _columns() -> list[str]:
    return ["N", "search", *(f"R = {rate:g}" for rate in RATES)]


if __name__ == "__main__":
    main()
