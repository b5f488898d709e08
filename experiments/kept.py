"""Raw results that are committed, and the tables that pages show of them."""

import json
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def commit() -> str:
    """Of the code that is measured."""
    told = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT
    )
    return told.stdout.strip()


def compact(measured: dict[str, Any]) -> str:
    """JSON, one line per row, five digits."""
    lines = []
    for name, value in measured.items():
        value = _rounded(value)
        text = json.dumps(value)
        if isinstance(value, list):
            text = "[\n" + ",\n".join(f"  {json.dumps(row)}" for row in value) + "\n ]"
        lines.append(f" {json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {name: _rounded(item) for name, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list) else value


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """A table; the first `left` columns are words, the others figures."""
    sides = "---|" * left + "---:|" * (len(columns) - left)
    lines = [columns, *rows]
    texts = [f"| {' | '.join(line)} |" for line in lines]
    return "\n".join([texts[0], f"|{sides}", *texts[1:]])


def checks() -> bool:
    """Whether pages are compared with what would be written, not written (`--check`)."""
    return "--check" in sys.argv[1:]


def write_page(path: Path, text: str) -> None:
    """Writes a page; with `--check` ends the process with an error if it is out of date."""
    if not checks():
        path.write_text(text)
    elif path.read_text() != text:
        sys.exit(f"{path.relative_to(ROOT)} is out of date: run make docs")


def with_tables(page: str, tables: dict[str, str]) -> str:
    """A page with what stands between <!-- name --> and <!-- end --> replaced."""
    for name, table in tables.items():
        pattern = rf"(<!-- {re.escape(name)} -->\n).*?(\n<!-- end -->)"
        page, count = re.subn(
            pattern, lambda m, table=table: m[1] + table + m[2], page, flags=re.DOTALL
        )
        if count != 1:
            raise ValueError(f"the page has {count} places <!-- {name} --> ... <!-- end -->")
    return page
