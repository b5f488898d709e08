"""Which codec errs least at equal bits? Measures, and makes docs/rd_gradients.png.

    python experiments/rate_distortion.py            # measures, keeps the figures, draws
    python experiments/rate_distortion.py --write    # draws again from the kept figures

Families of codecs, each over its rates or densities, on a Gaussian vector, a Laplacian one and
every saved gradient; then each example of every codec in the library, so that none is forgotten.
Bits are those of the payload. What a family does at a rate lies on the straight line, in
log NMSE, between its neighbouring points; points that another of the family beats in both are left
out, and nothing is extrapolated. Kept in experiments/rate_distortion.json.

Answer: docs/polar.md.
"""

import json
import math
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from torch import Tensor

import kept
from gradwire import kernels
from gradwire.compression import COMPRESSION
from gradwire.compression.allocated import Allocated
from gradwire.compression.source_coding.dq import DQ
from gradwire.compression.source_coding.polar import Polar
from gradwire.core.codec import Codec
from gradwire.core.key import Key
from gradwire.experiment.run.outcome import use_threads
from gradwire.experiment.studies.codecs import inputs, nmse, spec_of

KEPT = kept.ROOT / "experiments" / "rate_distortion.json"
FIGURE = kept.ROOT / "docs" / "rd_gradients.png"
PAGE = kept.ROOT / "docs" / "polar.md"
NUMEL = 1 << 18  # of the drawn vectors
_MOST_BITS = 6  # of points that are kept
AT = (0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0)
SHOWN = (0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0)
PROTOTYPE = {0.25: 0.201, 0.5: 0.118, 1.0: 0.052, 2.0: 0.0114, 3.0: 0.0026}
"""NMSE of an earlier trial of `dq`, on a gradient of kurtosis 898 that is not with the package."""
OURS = ("polar", "polar, rotated", "dq")
OTHER = "another codec"

_RATES = (
    *(0.06, 0.08, 0.1, 0.125, 0.15, 0.175, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.6, 0.7, 0.8),
    *(0.9, 1.0, 1.1, 1.25, 1.4, 1.5, 1.6, 1.75, 2.0, 2.25, 2.5, 2.75, 3.0, 3.1),
)
_DENSITIES = (
    *(0.002, 0.003, 0.004, 0.005, 0.006, 0.008, 0.01, 0.012, 0.016, 0.02, 0.025, 0.03, 0.04, 0.05),
    *(0.06, 0.08, 0.1, 0.12, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0),
)
_LEVELS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128, 256, 512, 1024)


def families() -> dict[str, list[str]]:
    """How each family is written. An error of least squares is asked for wherever one can be."""
    eden = [f"eden({bits}, unbiased=False)" for bits in (1, 2, 3, 4)]
    return {
        "polar": [f"polar({rate})" for rate in _RATES],
        "polar, rotated": [f"polar({rate}, rotate=True)" for rate in _RATES],
        "dq": [f"dq({rate})" for rate in _RATES],
        "sign >> polar": [f"sign >> polar({rate})" for rate in _RATES if rate <= 1],
        "topk >> fp16": [f"topk({density}) >> fp16" for density in _DENSITIES],
        "topk >> qsgd": [
            f"topk({density}) >> qsgd(bits={bits}){coder}"
            for bits, coder in ((4, ""), (4, " >> rans"), (3, " >> rans"), (6, " >> rans"))
            for density in _DENSITIES
        ],
        "qsgd >> rans": [
            f"qsgd({levels}, bucket={bucket}) >> rans"
            for bucket in (512, 65536)
            for levels in _LEVELS
        ],
        "eden": [
            *(f"randomk({d}) >> {eden[0]}" for d in (0.06, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9)),
            *eden,
            *(f"{one} >> rans" for one in eden),
        ],
        "natural >> rans": [
            "natural >> rans",
            *(f"topk({density}) >> natural >> rans" for density in _DENSITIES if density >= 0.01),
        ],
        "topk >> eden": [
            f"topk({density}) >> {one}{coder}"
            for one in eden[1:]
            for coder in ("", " >> rans")
            for density in _DENSITIES
        ],
        "topk >> adaptive": [
            f"topk({density}) >> adaptive({bits}) >> rans"
            for bits in (3, 4)
            for density in _DENSITIES
        ],
        # Allocated is a budget and a choice of others, of which dq may be one.
        OTHER: [
            text
            for cls in COMPRESSION
            if cls not in (Polar, DQ, Allocated)
            for text in cls.examples
        ],
    }


def main() -> None:
    if sys.argv[1:] != ["--write"]:
        if kernels.backend() != "native":
            raise SystemExit("the plain torch kernels would take hours: build the C library first")
        KEPT.write_text(kept.compact(measured()))
    results = json.loads(KEPT.read_text())
    draw(results["rows"], FIGURE)
    PAGE.write_text(kept.with_tables(PAGE.read_text(), tables(results["rows"])))


def measured() -> dict[str, Any]:
    with use_threads(1):
        vectors = inputs(NUMEL)
        rows = []
        for family, texts in families().items():
            print(family, file=sys.stderr, flush=True)
            for codec in _codecs(texts):
                points = {name: point(codec, name, x) for name, x in vectors.items()}
                low = {name: found for name, found in points.items() if found[0] <= _MOST_BITS}
                if low:
                    rows.append({"family": family, "method": repr(codec), "points": low})
    return {
        "numel": NUMEL,
        "rows": rows,
        "kernels": kernels.backend(),
        "commit": kept.commit(),
    }


def _codecs(texts: Iterable[str]) -> list[Codec]:
    """Those that can be read; a reducer is not a codec."""
    found = []
    for text in texts:
        try:
            compression = COMPRESSION.parse(text)
        except ValueError as error:
            print(f"left out: {error}", file=sys.stderr)
            continue
        if isinstance(compression, Codec):
            found.append(compression)
    return found


def point(codec: Codec, name: str, x: Tensor) -> list[float]:
    """Bits per element and NMSE, for one draw where the codec is random."""
    spec, key = spec_of(name, x), Key(0).child("rate distortion").private(0)
    payload, _ = codec.encode(x, codec.init(spec), key)
    return [8 * payload.nbytes / x.numel(), nmse(codec.decode(payload, spec, key), x)]


Curve = list[tuple[float, float]]  # bits and NMSE, ever more and ever less


def curves(rows: Iterable[dict[str, Any]]) -> dict[str, dict[str, Curve]]:
    """By vector and family: the points that no other of the family beats."""
    points: dict[tuple[str, str], Curve] = defaultdict(list)
    for row in rows:
        for vector, (bits, error) in row["points"].items():
            points[vector, row["family"]].append((bits, error))
    found: dict[str, dict[str, Curve]] = defaultdict(dict)
    for (vector, family), own in points.items():
        front: Curve = []
        for bits, error in sorted(own):
            if error > 0 and (not front or error < front[-1][1]):
                front.append((bits, error))
        found[vector][family] = front
    return found


def at(curve: Curve, bits: float) -> float | None:
    """NMSE at so many bits; None outside the curve."""
    for (bits_0, error_0), (bits_1, error_1) in pairwise(curve):
        if bits_0 <= bits <= bits_1:
            share = (bits - bits_0) / (bits_1 - bits_0)
            return math.exp((1 - share) * math.log(error_0) + share * math.log(error_1))
    return None


def ranking(families_of: dict[str, Curve], bits: float) -> list[tuple[float, str]]:
    """(NMSE, family) at so many bits, the best first, of those that reach there."""
    found = [
        (error, family)
        for family, curve in families_of.items()
        if family != OTHER and (error := at(curve, bits)) is not None
    ]
    return sorted(found)


def least_of_ours(families_of: dict[str, Curve], bits: float) -> tuple[float, str] | None:
    return next((found for found in ranking(families_of, bits) if found[1] in OURS), None)


def beaten_by(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Every point at 0.1 to 3 bits, of whatever codec, below our best at its own bits."""
    by_vector, found = curves(rows), []
    for row in rows:
        for vector, (bits, error) in row["points"].items():
            if row["family"] in OURS or not AT[0] <= bits <= AT[-1]:
                continue
            best = least_of_ours(by_vector[vector], bits)
            if best is not None and error < best[0]:
                found.append(f"{row['method']} on {vector}: {error:.4g}, {best[1]} {best[0]:.4g}")
    return found


def tables(rows: Sequence[dict[str, Any]]) -> dict[str, str]:
    by_vector = curves(rows)
    names = [family for family in dict.fromkeys(row["family"] for row in rows) if family != OTHER]
    real = [vector for vector in by_vector if vector not in ("gaussian", "laplacian")]
    found = {"rd winners": kept.markdown(["vector", *map(_rate, AT)], _winners(by_vector))}
    groups = {"gaussian": ["gaussian"], "laplacian": ["laplacian"], "gradients": real}
    for group, vectors in groups.items():
        lines = []
        if group == "gaussian":
            lines.append(["bound", *(f"{4**-bits:.3g}" for bits in SHOWN)])
        for family in names:
            cells = [
                _mean([at(by_vector[v].get(family, []), bits) for v in vectors]) for bits in SHOWN
            ]
            lines.append([f"`{family}`", *(_error(cell) for cell in cells)])
        found[f"rd {group}"] = kept.markdown(["codec", *map(_rate, SHOWN)], lines)
    lines = [[v, *(_error(at(by_vector[v]["dq"], bits)) for bits in PROTOTYPE)] for v in real]
    lines.append(["prototype, another gradient", *map(_error, PROTOTYPE.values())])
    found["rd dq"] = kept.markdown(["gradient", *map(_rate, PROTOTYPE)], lines)
    return found


def _rate(bits: float) -> str:
    return f"{bits:g}"


def _error(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _mean(errors: Sequence[float | None]) -> float | None:
    """Geometric, if all are there."""
    logs = [math.log(error) for error in errors if error is not None]
    return math.exp(sum(logs) / len(logs)) if len(logs) == len(errors) else None


def _winners(by_vector: dict[str, dict[str, Curve]]) -> Iterable[list[str]]:
    """The best family, and the least NMSE that is not ours over the least that is."""
    for vector, own in by_vector.items():
        cells = []
        for bits in AT:
            ranked = ranking(own, bits)
            ours = next((error for error, family in ranked if family in OURS), None)
            others = next((error for error, family in ranked if family not in OURS), None)
            cell = ranked[0][1].removeprefix("polar, ") if ranked else "-"
            if ours is not None and others is not None:
                cell += f" {others / ours:.2f}"
            cells.append(cell)
        yield [vector, *cells]


_STYLES = {  # Okabe and Ito's colours
    "polar": ("#0072b2", "-", "o"),
    "polar, rotated": ("#56b4e9", "-", "s"),
    "dq": ("#d55e00", "-", "D"),
    "sign >> polar": ("#56b4e9", ":", "v"),
    "topk >> fp16": ("#777777", "--", "x"),
    "topk >> qsgd": ("#009e73", "--", "^"),
    "qsgd >> rans": ("#cc79a7", "--", "P"),
    "eden": ("#e69f00", "--", "*"),
    "natural >> rans": ("#8b6914", "--", "X"),
}


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """A panel per vector."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    by_vector = curves(rows)
    figure = Figure(figsize=(15, 6.6), layout="constrained")
    panels = figure.subplots(2, -(-len(by_vector) // 2), sharex=True, sharey=True)
    for axes, (vector, own) in zip(panels.T.flat, by_vector.items()):
        for family, (colour, line, marker) in _STYLES.items():
            if curve := own.get(family):
                bits, errors = zip(*curve)
                axes.plot(
                    bits,
                    errors,
                    color=colour,
                    linestyle=line,
                    marker=marker,
                    markersize=3.5,
                    markevery=2,
                    linewidth=2 if family in OURS else 1.2,
                    label=family,
                    zorder=3 if family in OURS else 2,
                )
        if vector == "gaussian":
            ends = (AT[0] / 2, AT[-1] + 0.1)
            axes.plot(ends, [4**-b for b in ends], color="#000000", label="Shannon's bound")
        axes.set_title({"gaussian": "Gaussian", "laplacian": "Laplacian"}.get(vector, vector))
        axes.set(yscale="log", xlim=(0, 3.1), ylim=(3e-4, 1.2))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.grid(alpha=0.3, which="both", linewidth=0.5)
    figure.supxlabel("bits per element, of the packed payload")
    figure.supylabel("NMSE")
    handles: dict[str, Any] = {}
    for axes in panels.flat:
        for handle, label in zip(*axes.get_legend_handles_labels()):
            handles.setdefault(label, handle)
    figure.legend(handles.values(), handles.keys(), loc="outside right upper", fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main()
