"""Writes the page: a template with styles, scripts and data in it, so that it opens offline.

The files are in `../html`. The page loads nothing: its content security policy names the scripts in
it by their hashes and allows nothing from elsewhere.
"""

import base64
import hashlib
import html
import json
import re
from collections.abc import Sequence
from pathlib import Path

from gradwire.experiment.report.page.content import content
from gradwire.runtime.storage.files import make_folder, naming, write_atomically

_FILES = Path(__file__).parents[1] / "html"
_LIBRARY, _LICENCE = "chart.umd.min.js", "chart.LICENSE.txt"
_SCRIPTS = (  # in this order: each uses those before it
    "format.js",
    "model.js",
    "elements.js",
    "charts.js",
    "controls.js",
    "summary.js",
    "table.js",
    "curves.js",
    "pareto.js",
    "layers.js",
    "timeline.js",
    "settings.js",
    "main.js",
)
_SOURCE_MAP = re.compile(r"^//# sourceMappingURL=.*$", re.MULTILINE)


def write_report(
    folders: Sequence[str | Path], out: str | Path = "report.html", title: str = ""
) -> Path:
    """Writes a page about the runs in these folders, and returns its path.

    A folder may be that of a run, a sweep or a comparison, or hold several of them. Runs of
    different tasks are shown one task at a time. An existing file is replaced.
    """
    path = Path(out)
    if path.is_dir():
        raise ValueError(f"{path} is a folder: name a file, such as {path / 'report.html'}")
    page = report_html(folders, title)
    make_folder(path.parent)
    with naming(path):
        write_atomically(path, page.encode())
    return path


def report_html(folders: Sequence[str | Path], title: str = "") -> str:
    """The page as text."""
    if not folders:
        raise ValueError("a report needs at least one folder with runs, such as runs/NAME")
    paths = [Path(folder) for folder in folders]
    title = title or f"gradwire: {', '.join(_name(path) for path in paths)}"
    data = {"title": title, **content(paths)}
    scripts = [_SOURCE_MAP.sub("", _read(name)) for name in (_LIBRARY, *_SCRIPTS)]
    hashes = " ".join(f"'sha256-{_digest(script)}'" for script in scripts)
    policy = (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    parts = {
        "policy": html.escape(policy, quote=False),
        "title": html.escape(title),
        "licence": _read(_LICENCE).replace("--", "- -"),
        "style": _read("page.css"),
        "data": embedded(data),
        "scripts": "\n".join(f"<script>{script}</script>" for script in scripts),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _read("page.html"))


def embedded(value: object) -> str:
    """JSON for a script element: nothing in it can end that element, or begin a comment."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _name(path: Path) -> str:
    return path.name or path.resolve().name


def _read(name: str) -> str:
    return (_FILES / name).read_text(encoding="utf-8")


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
