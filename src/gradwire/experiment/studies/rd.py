"""How near polar codes come to Shannon's bound on uniform bits, in a table and a figure.

Each code gets the same random bits; its distortion is the share of them that arrive wrong. Next to
it stand the least that the rate allows, D with 1 - h2(D) = R, and what the thesis that this coder
goes back to reports (Tongji University, 2022). `measure` takes every combination of lengths, rates
and ways to search, except that a list goes with hard decisions only. Hard decisions are those of
the codec, on integers; `randomized` is the published algorithm, with the exact f.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.table import Table
from torch import Tensor

import gradwire
from gradwire import kernels
from gradwire.coding.polar import PolarCompressor
from gradwire.coding.polar.channel import distortion_bound
from gradwire.core.key import Key
from gradwire.experiment.report.drawing import MARKERS as _MARKERS
from gradwire.experiment.report.drawing import save
from gradwire.experiment.run.outcome import use_threads
from gradwire.experiment.run.record import Row
from gradwire.experiment.studies.defaults import RD_LENGTHS as LENGTHS
from gradwire.experiment.studies.defaults import RD_RATES as RATES

THESIS = {
    256: (0.3737, 0.2409, 0.1445, 0.0794, 0.0260),
    512: (0.3665, 0.2161, 0.1315, 0.0729, 0.0221),
    1024: (0.3532, 0.2139, 0.1315, 0.0645, 0.0202),
    2048: (0.3558, 0.2181, 0.1291, 0.0685, 0.0200),
}
_ENOUGH = 1 << 21  # bits per code, unless the number of blocks is given
_MOST = 1 << 33
_PIECE = 1 << 22  # bits at a time
_RATES_ABREAST = 5  # columns of figures that fit 80 characters


@dataclass(frozen=True)
class Search:
    """How a codeword is looked for, and among which."""

    decision: str = "hard"
    list_size: int = 1
    construction: str = "monte_carlo"

    @classmethod
    def of(cls, row: Row) -> "Search":
        return cls(row["decision"], row["list_size"], row["construction"])

    def label(self, construction: bool = False) -> str:
        name = self.decision if self.list_size == 1 else f"list of {self.list_size}"
        return f"{name}, {self.construction}" if construction else name


def searches(
    decisions: Sequence[str], list_sizes: Sequence[int], constructions: Sequence[str]
) -> list[Search]:
    """Every combination but lists of randomized decisions, which would not be the likeliest."""
    found = [
        Search(decision, list_size, construction)
        for construction, list_size, decision in product(constructions, list_sizes, decisions)
        if decision == "hard" or list_size == 1
    ]
    if not found:
        raise ValueError(
            f"a list keeps the likeliest codewords: list sizes {_listed(list_sizes)} need "
            f"decision hard, got {_listed(decisions)}"
        )
    return list(dict.fromkeys(found))


def _listed(values: Sequence[object]) -> str:
    return ", ".join(map(str, values)) or "none"


def measure(
    lengths: Sequence[int] = LENGTHS,
    rates: Sequence[float] = RATES,
    blocks: int | None = None,
    decisions: Sequence[str] = ("hard",),
    constructions: Sequence[str] = ("monte_carlo",),
    list_sizes: Sequence[int] = (1,),
    seed: int = 0,
    progress: Callable[[str, int, int], None] = lambda code, done, total: None,
) -> Row:
    """All figures, ready for JSON. `progress` gets each code, how many are done, of how many.

    `blocks` are coded per code, by default as many as make two million bits.
    """
    given = {"n": lengths, "rate": rates, "decision": decisions, "construction": constructions}
    for name, values in {**given, "list_size": list_sizes}.items():
        if not values:
            raise ValueError(f"{name}: give at least one")
    for rate in rates:
        if not 0 < rate <= 1:
            raise ValueError(f"rate must lie in (0, 1] bits per bit, got {rate:g}")
    chosen = product(
        dict.fromkeys(lengths),
        searches(decisions, list_sizes, constructions),
        dict.fromkeys(rates),
    )
    # All are checked before any is measured.
    if not 0 <= seed < 2**64:
        raise ValueError(f"seed must lie in 0 .. 2^64 - 1, got {seed}")
    codes = [(rate, way, _compressor(n, rate, way)) for n, way, rate in chosen]
    if blocks is not None and not 2 <= blocks <= _MOST // max(lengths):
        raise ValueError(
            f"blocks must lie in 2 .. {_MOST // max(lengths)} at N = {max(lengths)}, got {blocks}"
        )
    rows = []
    with use_threads(1):
        for done, (rate, way, code) in enumerate(codes):
            progress(f"N = {code.N}, R = {rate:g}, {way.label(True)}", done, len(codes))
            rows.append(_measured(code, rate, way, blocks, seed))
        progress("", len(codes), len(codes))
    return {
        "rows": rows,
        "seed": seed,
        "kernels": kernels.backend(),
        "versions": {"gradwire": gradwire.__version__, "torch": torch.__version__},
    }


def _compressor(n: int, rate: float, way: Search) -> PolarCompressor:
    k = round(rate * n)
    if k < 1:
        raise ValueError(
            f"at N = {n} a rate of {rate:g} sends no bit; give a rate of at least {1 / n:g} or a "
            "longer block"
        )
    options: dict[str, Any] = vars(way)
    exact = way.decision == "randomized"
    return PolarCompressor(n, k, **options, f="exact" if exact else "corrected")


def _measured(
    code: PolarCompressor, rate: float, way: Search, blocks: int | None, seed: int
) -> Row:
    number = blocks or max(2, _ENOUGH // code.N)
    at_once = max(1, _PIECE // code.N)
    key = Key(seed).child("gradwire rd").child(code.N)
    wrong = []  # bits, by block
    for piece, start in enumerate(range(0, number, at_once)):
        bits = _source(min(at_once, number - start), code.N, key.child(piece))
        packed = code.compress(bits, key.child(piece).child("decisions").private(0))
        wrong.append((code.decompress(packed) != bits).sum(dim=1))
    share = torch.cat(wrong).double() / code.N
    return {
        "n": code.N,
        "k": code.K,
        "rate": rate,
        **vars(way),
        "f": code.f,
        "blocks": number,
        "distortion": float(share.mean()),
        "standard_error": float(share.std()) / math.sqrt(number),
        "bound": distortion_bound(rate),
        "thesis": thesis(code.N, rate),
    }


def _source(blocks: int, n: int, key: Key) -> Tensor:
    """Uniform bits, uint8 [blocks, n]."""
    words = key.words(-(-blocks * n // 32))
    bits = kernels.unpack_uints(words.view(torch.uint8), 1, blocks * n)
    return bits.to(torch.uint8).view(blocks, n)


def thesis(n: int, rate: float) -> float | None:
    """The distortion that the thesis reports, where it does."""
    known = {round(r, 9): d for r, d in zip(RATES, THESIS.get(n, ()))}
    return known.get(round(rate, 9))


def rd_tables(measured: Row) -> Iterator[Table]:
    """What the terminal shows, within 80 columns for one construction: five rates at a time."""
    rates = sorted({row["rate"] for row in measured["rows"]})
    for start in range(0, len(rates), _RATES_ABREAST):
        yield _table(measured["rows"], rates[start : start + _RATES_ABREAST])


def _table(rows: Sequence[Row], rates: Sequence[float]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False, padding=0)
    table.add_column("N", justify="right", no_wrap=True)
    table.add_column("search", overflow="fold")
    for rate in rates:
        table.add_column(f"R = {rate:g}", justify="right", no_wrap=True)
    for number, (n, name, cells) in enumerate(table_rows(rows, rates)):
        if number and n:  # a new length
            table.add_section()
        style = "dim" if name == "thesis" else None
        table.add_row(n, name, *cells, style=style)
    return table


def table_rows(rows: Sequence[Row], rates: Sequence[float]) -> Iterator[tuple[str, str, list[str]]]:
    """(length if it is a new one, what, a cell for each rate), beginning with the bound."""
    yield "", "bound", [f"{distortion_bound(rate):.4f}" for rate in rates]
    cells = {(row["n"], Search.of(row), row["rate"]): row for row in rows}
    several = len({row["construction"] for row in rows}) > 1
    for n in sorted({row["n"] for row in rows}):
        lines: dict[str, list[str]] = {}
        known = [thesis(n, rate) for rate in rates]
        if any(known):
            lines["thesis"] = [f"{value:.4f}" if value else "-" for value in known]
        for way in dict.fromkeys(Search.of(row) for row in rows if row["n"] == n):
            own = [cells.get((n, way, rate)) for rate in rates]
            if any(own):
                lines[way.label(several)] = [formatted(row) if row else "-" for row in own]
        for number, (name, texts) in enumerate(lines.items()):
            yield "" if number else str(n), name, texts


def formatted(row: Row) -> str:
    """0.12475(5): the standard error in units of the last digit."""
    error = row["standard_error"]
    digits = 5 if error < 1e-3 else 4 if error < 1e-2 else 3
    return f"{row['distortion']:.{digits}f}({round(10**digits * error)})"


# Okabe and Ito's colours, which the colour-blind can tell apart; lengths go from light to dark.
_BLACK, _VERMILION = "#000000", "#d55e00"
_COLOURS = ("#0072b2", "#777777", "#56b4e9", "#009e73", "#cc79a7", "#e69f00")
_LINES = ("-", "--", "-.", (0, (4, 1, 1, 1, 1, 1)))


def rd_figure(measured: Row, path: Path) -> None:
    """Distortion by rate; the excess over the bound by rate; distortion by length and search."""
    from matplotlib.figure import Figure  # takes a second to import

    figure = Figure(figsize=(14, 4.7), layout="constrained")
    by_rate, above, by_length = figure.subplots(1, 3)
    rows = measured["rows"]
    plain = _plainest(rows)
    _draw_rates(by_rate, above, [row for row in rows if Search.of(row) == plain])
    _draw_lengths(by_length, rows)
    for axes in (by_rate, above, by_length):
        axes.grid(alpha=0.3, which="both", linewidth=0.5)
        axes.title.set_fontsize(11)
    figure.suptitle(f"Polar codes on uniform random bits, seed {measured['seed']}", fontsize=12)
    save(figure, path)


def _plainest(rows: Sequence[Row]) -> Search:
    """Hard decisions if there are any, without a list if that was measured."""
    ways = list(dict.fromkeys(Search.of(row) for row in rows))
    return min(ways, key=lambda way: (way.decision != "hard", way.list_size))


def _draw_rates(by_rate: Any, above: Any, rows: Sequence[Row]) -> None:
    lengths = sorted({row["n"] for row in rows})
    fine = [i / 200 for i in range(1, 200)]
    by_rate.plot(fine, [distortion_bound(r) for r in fine], color=_BLACK, label="Shannon's bound")
    published = [n for n in lengths if n in THESIS]
    shades = _shades(len(lengths))
    for number, n in enumerate(published):
        excess = [100 * (d / distortion_bound(r) - 1) for r, d in zip(RATES, THESIS[n])]
        style = {"color": _VERMILION, "marker": _MARKERS[number % 8], "markersize": 5}
        style |= {"fillstyle": "none", "linestyle": ":", "linewidth": 1.2}
        by_rate.plot(RATES, THESIS[n], **style | {"linestyle": ""}, label=f"thesis, N = {n}")
        above.plot(RATES, excess, **style)
    for number, n in enumerate(lengths):
        own = sorted((row for row in rows if row["n"] == n), key=lambda row: float(row["rate"]))
        rates, values = [row["rate"] for row in own], [row["distortion"] for row in own]
        excess = [100 * (row["distortion"] / row["bound"] - 1) for row in own if row["rate"] < 1]
        style = {"color": shades[number], "marker": _MARKERS[number % 8], "markersize": 5}
        style["linestyle"] = _LINES[number % 4]
        by_rate.plot(rates, values, linewidth=1, **style, label=f"gradwire, N = {n}")
        above.plot(rates[: len(excess)], excess, linewidth=1.5, **style)  # at R = 1 there is none
    by_rate.set(title="Bits that arrive wrong", xlim=(0, 1), ylim=(0, 0.5))
    by_rate.set_ylabel("distortion D")
    above.set(title="Distortion above the bound", xlim=(0, 1))
    above.set_ylabel("excess over Shannon's D(R) [%]")
    above.set_ylim(bottom=0)
    for axes in (by_rate, above):
        axes.set_xlabel("rate R [bits sent per bit]")
    by_rate.legend(fontsize=8, loc="upper right")


def _draw_lengths(axes: Any, rows: Sequence[Row]) -> None:
    rates = {row["rate"] for row in rows}
    rate = min(rates, key=lambda r: (abs(r - 0.5), r))
    shown = [row for row in rows if row["rate"] == rate]
    construction = _plainest(rows).construction
    known = {n: value for n in sorted({row["n"] for row in shown}) if (value := thesis(n, rate))}
    style = {"fillstyle": "none", "linestyle": ":", "markersize": 5}
    if known:
        axes.plot(
            known.keys(), known.values(), color=_VERMILION, marker="o", label="thesis", **style
        )
    ways = {Search.of(row) for row in shown if row["construction"] == construction}
    for number, way in enumerate(sorted(ways, key=lambda w: (w.list_size, w.decision))):
        own = sorted((row for row in shown if Search.of(row) == way), key=lambda row: int(row["n"]))
        colour = _COLOURS[number % len(_COLOURS)]
        axes.errorbar(
            [row["n"] for row in own],
            [row["distortion"] for row in own],
            [row["standard_error"] for row in own],
            color=colour,
            marker=_MARKERS[number % 8],
            markersize=5,
            linewidth=1.5,
            linestyle="--" if way.decision != "hard" else "-",
            label=way.label() + (" decisions" if way.list_size == 1 else ""),
        )
    axes.axhline(distortion_bound(rate), color=_BLACK, label="Shannon's bound")
    axes.set_xscale("log", base=2)
    lengths = sorted({row["n"] for row in shown})
    axes.set_xticks(lengths, [str(n) for n in lengths])
    axes.minorticks_off()
    axes.set(title=f"By length and search, R = {rate:g}", xlabel="block length N")
    axes.set_ylabel("distortion D")
    axes.legend(fontsize=8)


def _shades(count: int) -> list[str]:
    """From light to dark blue."""
    light, dark = (0x8C, 0xC8, 0xF0), (0x08, 0x2A, 0x54)
    mixed = []
    for i in range(count):
        share = i / max(1, count - 1)
        channels = (round(a + (b - a) * share) for a, b in zip(light, dark))
        mixed.append("#" + "".join(f"{channel:02x}" for channel in channels))
    return mixed
