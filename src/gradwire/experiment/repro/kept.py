"""Results that are kept beside the code: a line of JSON for each figure, with its origin."""

import json
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gradwire.experiment.repro.recipe import Row
from gradwire.experiment.repro.scale import Scale
from gradwire.runtime.storage.files import make_folder, write_atomically


def origin(device: str) -> dict[str, str]:
    """Hardware and versions, and the commit of the sources where there is one."""
    import platform

    import torch

    found = {"torch": torch.__version__, "processor": _processor()}
    if device.startswith("cuda"):
        found["gpu"] = torch.cuda.get_device_name(device)
    commit = _commit()
    return {**found, "python": platform.python_version(), **({"commit": commit} if commit else {})}


def keep(path: Path, scale: Scale, rows: Sequence[Row], where: dict[str, str]) -> None:
    """Adds rows to a file; those of the same scale and place replace older ones."""
    make_folder(path.parent)
    rows = [{"scale": scale, **row, **where} for row in rows if row.get("seeds", 1)]
    new = {_place(row): row for row in rows}
    old = {_place(row): row for row in kept_rows(path)}
    lines = [json.dumps(_rounded(row)) + "\n" for row in {**old, **new}.values()]
    write_atomically(path, "".join(lines).encode())


def kept_rows(path: Path, scale: Scale | None = None) -> Iterator[Row]:
    """Rows of a file, if it exists."""
    if path.exists():
        for line in path.read_text().splitlines():
            row = json.loads(line)
            if scale is None or row["scale"] == scale:
                yield row


def _place(row: Row) -> tuple[Any, ...]:
    return row["scale"], row.get("line"), row.get("column")


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {name: _rounded(item) for name, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list) else value


def _processor() -> str:
    path = Path("/proc/cpuinfo")
    names = [line for line in path.open() if line.startswith("model name")] if path.exists() else []
    return f"{len(names)} x {names[0].partition(':')[2].strip()}" if names else "unknown"


def _commit() -> str:
    """Of the sources, with a plus if they have been changed since; "" if that is not known."""
    name = _git("rev-parse", "--short", "HEAD")
    return f"{name}+" if name and _git("status", "--porcelain", "--", ".") else name


def _git(*arguments: str) -> str:
    here = Path(__file__).parents[2]  # all of the package
    try:
        found = subprocess.run(["git", *arguments], capture_output=True, text=True, cwd=here)
    except OSError:
        return ""
    return found.stdout.strip()
