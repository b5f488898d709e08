"""Line styles, axes and files of all figures.

Colours are Okabe and Ito's, which the colour-blind can distinguish; every line also has its own
line style and marker, so that a figure can be read in print without colours.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FigureFormat = Literal["png", "pdf", "svg"]
FORMATS = get_args(FigureFormat)
COLOURS = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#000000",
    "#e69f00",
    "#56b4e9",
    "#777777",
)
MARKERS = "osD^vPX*"
_LINES = ("-", "--", "-.", ":")
_MAX_LABELS = 5  # of an axis half as wide as a page


def line_style(number: int) -> dict[str, Any]:
    """How the line of this number is drawn; the first 32 differ in more than the marker."""
    again = number // len(COLOURS)
    return {
        "color": COLOURS[number % len(COLOURS)],
        "linestyle": _LINES[(number + again) % len(_LINES)],
        "marker": MARKERS[(number + again) % len(MARKERS)],
        "markersize": 4,
        "linewidth": 1.4,
    }


def log_axis(axes: Axes, unit: str) -> None:
    """A logarithmic x axis for what was drawn, with a few labels that do not overlap."""
    from matplotlib.ticker import EngFormatter, FixedLocator, NullFormatter

    axes.set_xscale("log")
    axes.set_xlim(axes.get_xlim())  # labels are chosen for what is seen now
    axes.xaxis.set_major_locator(FixedLocator(tick_values(*axes.get_xlim())))
    axes.xaxis.set_major_formatter(EngFormatter(unit))
    axes.xaxis.set_minor_formatter(NullFormatter())


def tick_values(low: float, high: float) -> list[float]:
    """A few round numbers of a logarithmic axis: powers of ten, or 1, 2, 5 between them."""
    from matplotlib.ticker import LogLocator, MaxNLocator

    for subs in ((1.0,), (1.0, 3.0), (1.0, 2.0, 5.0)):
        found = LogLocator(subs=subs, numticks=50).tick_values(low, high)
        inside = [float(value) for value in found if low <= value <= high]
        if 3 <= len(inside) <= _MAX_LABELS:
            return inside
        if len(inside) > _MAX_LABELS:
            return inside[:: -(-len(inside) // _MAX_LABELS)]
    found = MaxNLocator(_MAX_LABELS - 1).tick_values(low, high)
    return [float(value) for value in found if low <= value <= high]


def save(figure: Figure, path: Path) -> None:
    """Writes it as the file's suffix says; the same figure is the same bytes each time."""
    import matplotlib

    if path.suffix[1:] not in FORMATS:
        raise ValueError(f"a figure is a .png, .pdf or .svg file, got {path}")
    dates = {".pdf": {"CreationDate": None}, ".svg": {"Date": None}}
    with matplotlib.rc_context({"svg.hashsalt": "gradwire"}):
        figure.savefig(path, dpi=130, metadata=dates.get(path.suffix))
