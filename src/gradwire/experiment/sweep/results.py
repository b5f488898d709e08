"""What the runs of a sweep have left, as rows, and as frames of pandas.

Rows are read from the records of the runs, so they never say what no record says.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from gradwire.experiment.report.score import score_part
from gradwire.experiment.run.config import Config
from gradwire.experiment.run.record import Record, Row
from gradwire.runtime.storage import text
from gradwire.runtime.storage.files import make_folder, write_atomically

if TYPE_CHECKING:
    import pandas

ELSEWHERE = "at"  # folder of the same run on other networks
_FAILURE = "failure.json"
_FIGURES = (
    "test_loss",
    "steps",
    "gradients",
    "parameters",
    "bytes_sent",
    "bytes_per_worker_step",
    "busiest_node_bytes",
    "dropped_steps",
    "virtual_time_s",
    "training_time_s",
    "wall_time_s",
    "kernels",
    "versions",
)


def write_failure(folder: Path, config: Config, why: str) -> None:
    """Records that a run has no result, and would have none if it were repeated."""
    make_folder(folder)
    content = text.seal_json({"failure": why, "config": asdict(config)})
    write_atomically(folder / _FAILURE, content.encode())


def forget_failure(folder: Path) -> None:
    """Lets a run that had no result be tried again."""
    (folder / _FAILURE).unlink(missing_ok=True)


def row_of(folder: Path) -> Row | None:
    """The row of a run that has ended; None: it has not."""
    if (folder / _FAILURE).exists():
        failed = text.open_json(folder / _FAILURE)
        return {**failed["config"], "failure": failed["failure"], "folder": folder.name}
    record = Record(folder)
    if not record.exists or not record.is_finished:
        return None
    summary = record.summary
    config = summary["config"]
    times = {}
    if "virtual_time_s" in summary:  # real processes have none
        times = {config["bandwidth"]: summary["virtual_time_s"], **summary["virtual_times_s"]}
    for other in elsewhere(folder):
        times[other.config.bandwidth] = other.summary["virtual_time_s"]
    return {
        **config,
        **score_part(summary),
        **{name: summary[name] for name in _FIGURES if name in summary},
        "virtual_times_s": times,
        "folder": folder.name,
    }


def elsewhere(folder: Path) -> list[Record]:
    """The same run on other networks, where each of them needed a run of its own."""
    # A sweep writes them into a folder, a comparison next to the record.
    paths = [*folder.glob(f"{ELSEWHERE}/*/config.toml"), *folder.glob(f"{ELSEWHERE}-*/config.toml")]
    records = (Record(path.parent) for path in sorted(paths))
    return [record for record in records if record.is_finished]


def run_folders(top: Path) -> Iterator[Path]:
    """The folders of runs in a folder and below it, whether they have ended or not.

    Without those of the same run on other networks.
    """
    if not top.is_dir():
        raise ValueError(f"there is no folder {top}")
    if Record(top).exists or (top / _FAILURE).exists():
        yield top
        return
    for folder in sorted(path for path in top.iterdir() if path.is_dir()):
        yield from run_folders(folder)


def load(folder: str | Path, rows: Literal["runs", "evaluations"] = "runs") -> "pandas.DataFrame":
    """The runs in a folder as a frame: a row for each, with settings and figures as columns.

        frame = gradwire.load("runs/sweep")
        frame.groupby("compression").test_accuracy.agg(["mean", "std"])

    With `rows="evaluations"` it has a row for each evaluation of each run: accuracy, loss, bytes
    and virtual time against steps. The folder may be that of a sweep, of a comparison, or of one
    run. Needs pandas.
    """
    try:
        import pandas
    except ImportError:
        raise ValueError(
            "gradwire.load makes a frame of pandas, which is not installed: pip install pandas"
        ) from None
    if rows not in ("runs", "evaluations"):
        raise ValueError(f'rows is "runs" or "evaluations", got {rows!r}')
    found = [(own, row) for own in run_folders(Path(folder)) if (row := row_of(own)) is not None]
    if not found:
        raise ValueError(f"{folder} has no run that has ended")
    if rows == "evaluations":
        return pandas.DataFrame([row for own, ended in found for row in _evaluations(own, ended)])
    return pandas.DataFrame([_flat(row) for _, row in found])


def _flat(row: Row) -> Row:
    """Without tables in it: times have a column for each bandwidth."""
    times = row.get("virtual_times_s", {})
    plain = {name: value for name, value in row.items() if not isinstance(value, dict)}
    return {**plain, **{f"virtual_time_s at {name}": s for name, s in times.items()}}


def _evaluations(folder: Path, row: Row) -> Iterator[Row]:
    path = folder / "metrics.jsonl"
    if not path.exists():  # it failed
        return
    chosen = {name: row[name] for name in asdict(Config())}
    for line in path.read_text().splitlines():
        yield {**chosen, "folder": row["folder"], **_flat(json.loads(line))}


def write_lines(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Writes rows as lines of JSON."""
    write_atomically(path, "".join(json.dumps(row) + "\n" for row in rows).encode())
