"""Saved states of compression: what users load is looked at before it is used."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from gradwire.core.codec import Compression

State = Mapping[str, Any]

_KEYS = ("compression", "rank", "size", "step", "buckets")


def states_in(saved: Any) -> list[State]:
    """The state of one rank, or those of all ranks."""
    rows = [saved] if isinstance(saved, Mapping) else saved
    if isinstance(rows, list | tuple) and rows and all(isinstance(row, Mapping) for row in rows):
        return list(rows)
    raise ValueError(
        f"a saved state is what state_dict() returned on this rank, or a list of what it returned "
        f"on all ranks, got {str(saved)[:100]!r} ({type(saved).__name__})"
    )


def checked_states(saved: Any, compression: Compression) -> list[State]:
    """The states of exchanges; none if nothing had been exchanged when they were saved."""
    rows = states_in(saved)
    if not any(rows):
        return []
    written = repr(compression)
    for row in rows:
        missing = [key for key in _KEYS if key not in row]
        if row.get("version") != 1 or missing or not isinstance(row["buckets"], list):
            lacks = f"without {', '.join(missing)}" if missing else f"version {row.get('version')}"
            raise ValueError(
                f"the saved state is not what state_dict() returned ({lacks}): load what the same "
                "hook or optimizer has saved, or start without it"
            )
        if row["compression"] != written:
            raise ValueError(
                f"the saved state is of {row['compression']}, this is {written}: load it with the "
                "same compression, or start without it"
            )
    return rows


def check_ranks(rows: Sequence[State], rank: int, size: int) -> None:
    """Raises unless there is the state of this rank, or those of all ranks that there were."""
    count = rows[0]["size"]
    if len(rows) == 1 and count > 1:
        if (rows[0]["rank"], count) != (rank, size):
            raise ValueError(
                f"the saved state is that of rank {rows[0]['rank']} of {count}, this is rank "
                f"{rank} of {size}. Give the states of all {count} ranks as a list"
            )
    elif [row["rank"] for row in rows] != list(range(count)):
        raise ValueError(
            f"states of the ranks {[row['rank'] for row in rows]}, expected those of all {count} "
            "ranks in order"
        )


def dtype_of(text: str) -> torch.dtype:
    found = getattr(torch, text.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"the saved state has a tensor of the unknown dtype {text!r}")
    return found
