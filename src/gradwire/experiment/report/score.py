"""How good a model is on the test data: its accuracy, or the metric of a user's own task.

Rows of metrics and summaries have `test_accuracy`, or `test_metric` with the name in `metric`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gradwire.experiment.run.record import Row

_ACCURACY, _METRIC = "test_accuracy", "test_metric"
_SPREAD = ("_min", "_max")  # over the workers' models, under gossip
_KEYS = ["metric", *(key + end for key in (_ACCURACY, _METRIC) for end in ("", *_SPREAD))]


def score_row(metric: str, value: float | None, spread: Sequence[float | None] = ()) -> Row:
    """The part of a row that says how good the model is; `metric` is the setting.

    `spread` has the least and the greatest value, under gossip.
    """
    is_accuracy = metric in ("", "accuracy")
    key = _ACCURACY if is_accuracy else _METRIC
    row: Row = {} if is_accuracy else {"metric": metric.rpartition(":")[2].rpartition(".")[2]}
    row[key] = value
    return row | dict(zip([key + end for end in _SPREAD], spread))


def score_part(row: Row) -> Row:
    """What `score_row` put into a row."""
    return {key: row[key] for key in _KEYS if key in row}


def score_name(row: Row) -> str:
    return "accuracy" if _ACCURACY in row else str(row["metric"])


def score_value(row: Row) -> float | None:
    """An accuracy is a fraction."""
    value: float | None = row[_ACCURACY] if _ACCURACY in row else row[_METRIC]
    return value


def has_spread(row: Row) -> bool:
    return any(key + _SPREAD[0] in row for key in (_ACCURACY, _METRIC))


def format_score(row: Row, digits: int = 1) -> str:
    return _format(score_value(row), _ACCURACY in row, digits)


def format_spread(row: Row) -> str:
    """From the worst to the best worker, under gossip."""
    is_accuracy = _ACCURACY in row
    key = _ACCURACY if is_accuracy else _METRIC
    least, most = (_format(row[key + end], is_accuracy, 1) for end in _SPREAD)
    return f"which have {least} to {most}"


def _format(value: float | None, is_accuracy: bool, digits: int) -> str:
    if value is None:  # JSON has no NaN
        return "nan"
    return f"{100 * value:.{digits}f}%" if is_accuracy else f"{value:.4g}"
